"""Layers of a compressed-tensors checkpoint, each of one of the `config_groups`.
A group's `format` says what its tensors mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optkit.errors import SourceError
from optkit.kernels.eight_bit import FloatQuantizedLayer, IntQuantizedLayer
from optkit.kernels.integer_layers import BytesLayer, PackQuantizedLayer
from optkit.kernels.microscaled import MicroscaledLayer
from optkit.kernels.stored_layer import QuantizedLayer
from optkit.model.checkpoint import Checkpoint
from optkit.model.schemes import best_target

FORMATS: dict[str, type[QuantizedLayer]] = {
    "float-quantized": FloatQuantizedLayer,
    "int-quantized": IntQuantizedLayer,
    "naive-quantized": BytesLayer,
    "mxfp4-pack-quantized": MicroscaledLayer,
    "nvfp4-pack-quantized": MicroscaledLayer,
    "pack-quantized": PackQuantizedLayer,
}
"""Format of a group -> its class."""
CLASS = "Linear"
"""The target that means every linear layer."""
BEYOND = ("kv_cache_scheme", "sparsity_config", "transform_config")
"""What a `quantization_config` can ask for beside its groups, and transformers has to open."""


def compressed_tensors_layers(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[QuantizedLayer] | None:
    """Return a checkpoint's quantized layers, None if its config asks for something not ours.

    Raises SourceError for a layer that no group names.
    """
    groups = groups_of(config)
    if not groups or any(config.get(key) for key in BEYOND) or not all(_is_ours(group) for group in groups):
        return None
    return layers_in_groups(checkpoint, groups, FORMATS)


def groups_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the `config_groups`, each with its format."""
    groups = (config.get("config_groups") or {}).values()
    return [{**group, "format": str(group.get("format") or config.get("format"))} for group in groups]


def layers_in_groups(
    checkpoint: Checkpoint, groups: Sequence[Mapping[str, Any]], formats: Mapping[str, type[QuantizedLayer]]
) -> list[QuantizedLayer]:
    """Return a checkpoint's layers whose groups have these formats.
    Raises SourceError for a layer that no group names.
    """
    classes = {formats[group["format"]] for group in groups}
    layers: list[QuantizedLayer] = []
    for tensor, info in checkpoint.tensors.items():
        name, _, leaf = tensor.rpartition(".")
        if any(each.is_weight(leaf, info) for each in classes):
            group = _group_of(name, groups, str(checkpoint.directory))
            layers.append(formats[group["format"]](checkpoint, name, group))
    return layers


def _is_ours(group: Mapping[str, Any]) -> bool:
    layer = FORMATS.get(group["format"])
    return layer is not None and not group.get("output_activations") and layer.reads(group)


def _group_of(name: str, groups: Sequence[Mapping[str, Any]], where: str) -> Mapping[str, Any]:
    """Return a layer's group: one that names it, else by a pattern (`re:...`), else by class."""
    targets = [(str(target), group) for group in groups for target in group.get("targets") or (CLASS,)]
    if named := best_target(name, targets):
        return named
    raise SourceError(
        "it is quantized and no group of config_groups names it",
        where=f"{where}: {name}",
        remedy="See that config.json and the weights belong together",
    )
