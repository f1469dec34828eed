"""Scales of a float8 KV cache, as compressed-tensors describes them and vLLM reads them.
No torch is needed.

`quantization_config.kv_cache_scheme` says float8 with one scale per layer; `<attention>.k_scale`
and `<attention>.v_scale`, float32 [1], hold largest value / 448 for the keys (after rotary
embedding) and the values of a layer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optkit.errors import SourceError
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape

SCHEME: Mapping[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
"""The `kv_cache_scheme`."""
KEYS, VALUES = "k_scale", "v_scale"
PROJECTION = re.compile(r"(.*)\.(?:k|qkv)_proj\.")


@dataclass(frozen=True)
class KvScales:
    """One scale of the keys and one of the values for each attention layer, in order."""

    keys: tuple[float, ...]
    values: tuple[float, ...]


def attention_layers(shape: ModelShape) -> list[str]:
    """Return the names of the decoder's attention layers, in order, as far as names tell.
    For example `model.layers.0.self_attn`.
    """
    found = {match[1] for name in shape.tensors if shape.block(name) and (match := PROJECTION.match(name))}
    return sorted(found, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])


def split_kv_scales(checkpoint: Checkpoint) -> tuple[Checkpoint, KvScales | None]:
    """Return the checkpoint without the scales of its KV cache, and these.
    None if it has none that optkit reads.

    Raises SourceError if the config announces scales and a layer has none.
    """
    quantization = dict(checkpoint.quantization or {})
    scheme = quantization.pop("kv_cache_scheme", None)
    if not scheme or quantization.get("quant_method") != "compressed-tensors" or not _is_ours(scheme):
        return checkpoint, None
    layers = attention_layers(checkpoint.shape)
    names = {leaf: [f"{layer}.{leaf}" for layer in layers] for leaf in (KEYS, VALUES)}
    missing = [name for each in names.values() for name in each if name not in checkpoint.tensors]
    if missing or not layers:
        raise SourceError(
            f"{len(missing):,} scales of the KV cache are missing: "
            f"{', '.join(missing[:3]) or 'there is no attention layer'}",
            where=str(checkpoint.directory),
            why="kv_cache_scheme in config.json announces them",
            remedy="Make the artifact again",
        )
    scales = KvScales(
        *(tuple(float(checkpoint.read(name).flatten()[0]) for name in names[leaf]) for leaf in (KEYS, VALUES))
    )
    rest = copy.copy(checkpoint)
    held = {*names[KEYS], *names[VALUES]}
    rest.tensors = {name: info for name, info in checkpoint.tensors.items() if name not in held}
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    rest.config = {**config, "quantization_config": quantization} if quantization.get("config_groups") else config
    rest.shape = ModelShape(rest.config, rest.tensors)
    return rest, scales


def _is_ours(scheme: Mapping[str, Any]) -> bool:
    return all(scheme.get(key) == value for key, value in SCHEME.items())
