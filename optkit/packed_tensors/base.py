"""How a quantized linear layer lies on disk, and what config.json says of such a model.

No torch is needed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from optkit.errors import StageError
from optkit.model.apart import CheckpointApart, parts_of, with_experts_apart
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import EXPERTS, Layer, Selection, layers_of
from optkit.model.output_layer import HEAD
from optkit.model.read_weights import Read
from optkit.model.shape import ModelShape, TensorInfo

COMPRESSED_TENSORS = "compressed-tensors"
BITSANDBYTES = "bitsandbytes"


class LayerFormat(Protocol):
    """The form of one linear layer: a frozen value, equal for layers of equal form."""

    @property
    def method(self) -> str:
        """The `quant_method` of config.json: `compressed-tensors`, `gptq`, `awq` or `bitsandbytes`."""

    @property
    def label(self) -> str:
        """One phrase for reports, e.g. `4 bits, groups of 64`."""

    def tensors(self, weight_dtype: str, outputs: int, inputs: int) -> dict[str, TensorInfo]:
        """Return the tensors that take the place of a weight of this dtype and shape.
        They are named by their last name.
        """


@runtime_checkable
class CompressedTensors(LayerFormat, Protocol):
    """A form that compressed-tensors describes."""

    def scheme(self) -> dict[str, Any]:
        """Return an entry of `config_groups` without `targets`.
        It has `weights`, `input_activations`, `output_activations` and `format`.
        """


@runtime_checkable
class WholeModelFormat(LayerFormat, Protocol):
    """A form whose method describes a model as one thing, with exceptions."""

    def model_config(self, formats: Mapping[str, LayerFormat], kept: Iterable[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a model whose layers have these formats.
        Most of them have this one.
        """


REMEDIES: Mapping[str, str] = {
    Read.CLASS: "Use the stage fp8",
    Read.REPLACED: "Take rtn, gptq, awq or fp8, which take its experts apart",
}
"""What to do if no layer of a model can be packed, and fp8, int8 and nf4 are no way out."""
WHOLE_REASONS = (Read.REPLACED, Read.SHARED)
"""Why layers cannot be packed whatever reads their weight."""


def apart(shape: ModelShape, form: Callable[[Layer], LayerFormat]) -> ModelShape:
    """Return a model's shape as the method reads it that packs its layers: with experts one by one."""
    return with_experts_apart(shape) if _is_opened_apart(shape, form) else shape


def read_apart(directory: Path, form: Callable[[Layer], LayerFormat]) -> Checkpoint:
    """Return a model directory whose shape is that of `apart`."""
    checkpoint = Checkpoint(directory)
    return CheckpointApart(directory) if _is_opened_apart(checkpoint.shape, form) else checkpoint


def _is_opened_apart(shape: ModelShape, form: Callable[[Layer], LayerFormat]) -> bool:
    """Say whether transformers puts experts one by one in the place of joined ones."""
    opened = (COMPRESSED_TENSORS, BITSANDBYTES)
    return bool(parts_of(shape)) and all(form(layer).method in opened for layer in layers_of(shape).values())


def packable(selection: Selection, form: Callable[[Layer], LayerFormat], stage: str) -> Selection:
    """Return the selection without layers in whose form the model's own code would miss the weight.
    If that is all of the blocks', with codes in whole bytes. Raises StageError if no layer of theirs is left.
    """
    missed = _missed_weights(selection, form)
    if missed and missed.keys() >= selection.layers.keys() - {HEAD}:
        whole = {name: replace(layer, whole_bytes=name in missed) for name, layer in selection.layers.items()}
        if not _missed_weights(larger := Selection(whole, selection.skipped), form):
            return larger
        name, why = next(iter(missed.items()))
        raise StageError(
            f"none of the {len(missed):,} layers can be packed so ({name}, ...)",
            where=stage,
            why=f"{why[0].upper()}{why[1:]}{'' if why in WHOLE_REASONS else '; a packed layer has no plain weight'}",
            remedy=REMEDIES.get(why, "Use the stage fp8, int8 or nf4"),
        )
    return selection.without(missed, stage)


def _missed_weights(selection: Selection, form: Callable[[Layer], LayerFormat]) -> dict[str, str]:
    """Return layer -> what the model's own code would not find in it."""
    found = {
        name: _missed_weight(layer, form(layer))
        for name, layer in selection.layers.items()
        if layer.reads and not layer.transposed  # no form of compressed-tensors is for these
    }
    return {name: why for name, why in found.items() if why}


def _missed_weight(layer: Layer, form: LayerFormat) -> str:
    """Return what the model's own code would not find in a layer of a form, empty if nothing.

    compressed-tensors gives the dtype of the float weight, bitsandbytes that of its codes. In its
    packed forms, compressed-tensors has nothing called weight until the model runs.
    """
    leaves = form.tensors("F32", layer.outputs, layer.inputs)
    packed = not layer.transposed and "weight" not in leaves
    missed = {
        Read.COMPUTES: True,
        Read.SHARED: True,
        Read.FOUR: form.method == BITSANDBYTES and "SCB" in leaves,
        Read.REPLACED: form.method in (COMPRESSED_TENSORS, BITSANDBYTES),
        Read.DTYPE: form.method == BITSANDBYTES,
        Read.CLASS: form.method == BITSANDBYTES or (form.method == COMPRESSED_TENSORS and packed),
        Read.OPENS: form.method == COMPRESSED_TENSORS and packed,
    }
    return next((str(read) for read, lost in missed.items() if lost and read in layer.reads), "")


def quantization_config(formats: Mapping[str, LayerFormat], kept: Iterable[str]) -> dict[str, Any]:
    """Return the `quantization_config` of config.json.
    `formats` are those of the quantized layers, `kept` the Linears that stay.

    compressed-tensors: layers of equal scheme form a group. The largest group is that of every
    `Linear`; the others list their layers, or name all experts by a pattern. lm_head is listed in
    any case: vLLM takes it for no `Linear`.
    """
    counts = Counter(formats.values())
    usual = max(counts, key=lambda each: (counts[each], each.label))
    if isinstance(usual, WholeModelFormat):
        return usual.model_config(formats, kept)
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, form in sorted(formats.items()):
        if not isinstance(form, CompressedTensors):
            raise TypeError(f"{name}: {form} is no form of compressed-tensors")
        scheme = form.scheme()
        groups.setdefault(json.dumps(scheme, sort_keys=True), (scheme, []))[1].append(name)
    ordered = [group for _, group in sorted(groups.items(), key=lambda item: (-len(item[1][1]), item[0]))]
    kinds = {scheme["format"] for scheme, _ in ordered}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {"targets": _targets(names, formats) if index else ["Linear", *({HEAD} & set(names))]}
            | scheme
            for index, (scheme, names) in enumerate(ordered)
        },
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }


def _targets(names: list[str], formats: Mapping[str, LayerFormat]) -> list[str]:
    """Return the targets of a group that is not the largest: its layers, and one pattern if it has all experts.

    transformers reads all experts of a model as the first group with such a pattern says, or as the largest.
    """
    experts = [name for name in formats if EXPERTS in name]
    if not experts or not {*experts} <= {*names}:
        return names
    return [f"re:.*{re.escape(EXPERTS)}.*", *(name for name in names if EXPERTS not in name)]
