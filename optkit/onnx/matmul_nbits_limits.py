"""What ONNX Runtime's execution providers and its MatMulNBits operator take.
Neither torch nor onnx is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from optkit.errors import StageError
from optkit.model.packed_names import CODES
from optkit.model.shape import ModelShape

DTYPES: dict[str, tuple[str, ...]] = {
    "cpu": ("float32", "float16"),
    "cuda": ("float16", "bfloat16"),
    "dml": ("float16",),
    "webgpu": ("float16", "float32"),
}
"""Execution provider -> the dtypes that a graph for it can compute in, the usual one first."""
BITS = (4, 8)
"""Bits of the codes that MatMulNBits is given."""
GROUP_SIZES = (16, 32, 64, 128, 256)
"""Inputs of MatMulNBits that can share a scale."""
HEAD_GROUP_SIZES = {4: 32, 8: 128}
"""Bits that lm_head is rounded to for the export -> inputs that share a scale. In 8 bits wider
groups cost no accuracy and read less.
"""
CODED = {"pack-quantized": "compressed-tensors", "gptq": "gptq", "awq": "awq"}
"""Forms of layers whose codes can be handed over, and the `quant_method` that they belong to."""


@dataclass(frozen=True)
class _Scheme:
    """Layers of one form, as a `quantization_config` describes them."""

    layer: str
    """One of them."""
    form: str
    bits: int
    group_size: int
    """0 if it is not said: one scale per output channel."""
    rounds_inputs: bool = False


def refuse_scheme(shape: ModelShape) -> None:
    """Raise StageError for a `quantization_config` whose codes MatMulNBits cannot hold."""
    quantization = shape.config.get("quantization_config") or {}
    for scheme in _schemes(quantization, coded_layers(shape.tensors)):
        if scheme.form not in CODED:
            raise unfit(scheme.layer, f"its weights are {scheme.form}, not integer codes in groups")
        if scheme.rounds_inputs:
            raise unfit(scheme.layer, "its inputs are rounded to 8 bits while the model runs")
        if reason := why_not_matmul_nbits(scheme.bits, scheme.group_size or GROUP_SIZES[-1]):
            raise unfit(scheme.layer, reason)


def why_not_matmul_nbits(bits: int, group_size: int) -> str:
    """Return why MatMulNBits cannot hold codes of so many bits in groups of so many inputs.
    It is empty if it can.

    Groups that are wider or no power of two are told as several of the same scale, if these are
    not too narrow.
    """
    if bits not in BITS:
        return f"it has {bits} bits"
    if gcd(group_size, GROUP_SIZES[-1]) < GROUP_SIZES[0]:
        return f"its groups of {group_size} inputs are no multiple of {GROUP_SIZES[0]}"
    return ""


def unfit(layer: str, why: str) -> StageError:
    """Return the error for a layer whose weight MatMulNBits cannot hold."""
    sizes = f"{', '.join(str(size) for size in GROUP_SIZES[:-1])} or {GROUP_SIZES[-1]}"
    return StageError(
        "ONNX Runtime has no operator for its weight",
        where=layer,
        why=why[0].upper() + why[1:],
        remedy=f"Give it {' or '.join(str(each) for each in BITS)} bits in groups of {sizes} inputs "
        "(or multiples), or exclude it",
    )


def head_group_size(inputs: int, bits: int) -> int:
    """Return how many inputs of a rounded lm_head share a scale: as many as asked for that divide."""
    return gcd(inputs, HEAD_GROUP_SIZES[bits])


def coded_layers(tensors: Iterable[str]) -> list[str]:
    """Return the names of layers that hold codes."""
    names = (name.rpartition(".") for name in tensors)
    return [layer for layer, _, leaf in names if leaf in CODES]


def _schemes(quantization: Mapping[str, Any], layers: list[str]) -> list[_Scheme]:
    method = str(quantization.get("quant_method", ""))
    any_layer = next(iter(layers), "the model")
    if method in ("gptq", "awq"):
        size = max(int(quantization.get("group_size") or 0), 0)
        return [_Scheme(any_layer, method, int(quantization.get("bits", 4)), size)]
    if method != "compressed-tensors":
        return [_Scheme("the model", f"those of {method}", 0, 0)] if method else []
    groups = list((quantization.get("config_groups") or {}).values())
    listed = {target for group in groups for target in group.get("targets") or ()}
    usual = next((layer for layer in layers if layer not in listed), any_layer)
    found = []
    for group in groups:
        weights = group.get("weights") or {}
        layer = next((target for target in group.get("targets") or () if target in layers), usual)
        size = int(weights.get("group_size") or 0) if weights.get("strategy") == "group" else 0
        form = str(group.get("format") or quantization.get("format"))
        found.append(
            _Scheme(layer, form, int(weights.get("num_bits") or 0), size, bool(group.get("input_activations")))
        )
    return found
