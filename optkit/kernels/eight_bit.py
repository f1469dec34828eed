"""Layers of 8-bit weights, formats "float-quantized" and "int-quantized" of compressed-tensors.
See `optkit.algorithms.eight_bit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from optkit.algorithms.eight_bit import dequantize
from optkit.errors import SourceError
from optkit.kernels.float8_linear import Float8Linear, WidenedLinear, why_not_scaled
from optkit.kernels.int8_linear import Int8Linear, why_not_integers
from optkit.kernels.stored_layer import QuantizedLayer
from optkit.progress import ToActOn


@dataclass(frozen=True)
class _Parts:
    """What a layer is made of, checked."""

    codes: Tensor
    scales: Tensor
    """float [tiles of outputs, tiles of inputs]."""
    tile: tuple[int, int]
    input_scale: Tensor | None


class _EightBitLayer(QuantizedLayer):
    """What both formats share."""

    leaves = ("weight", "weight_scale", "input_scale")

    number: ClassVar[str]
    """`type` of the scheme."""
    strategies: ClassVar[frozenset[str]]
    """How scales of weights may be spread."""
    inputs_rounded: ClassVar[frozenset[str]]
    """How inputs may be rounded: `token`, `tensor` (static), `group`, or `none`."""

    @classmethod
    def reads(cls, scheme: Mapping[str, Any]) -> bool:
        return cls.reads_weights(scheme) and _rounding(scheme, cls.number) in cls.inputs_rounded

    @classmethod
    def reads_weights(cls, scheme: Mapping[str, Any]) -> bool:
        weights = scheme.get("weights") or {}
        fits = weights.get("num_bits") == 8 and weights.get("type") == cls.number and weights.get("symmetric", True)
        return bool(fits) and weights.get("strategy") in cls.strategies

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.checkpoint.tensors[f"{self.name}.weight"].shape
        return outputs, inputs

    def dequantize(self, dtype: torch.dtype, device: str) -> Tensor:
        parts = self._parts(device)
        return dequantize(parts.codes, parts.scales.float(), parts.tile).to(dtype)

    @property
    def rounding(self) -> str:
        """How its inputs are rounded."""
        return _rounding(self.scheme, self.number)

    def _parts(self, device: str) -> _Parts:
        static = ("input_scale",) if self.rounding == "tensor" else ()
        parts = self.read(self.leaves, device, required=("weight_scale", *static))
        outputs, inputs = self.shape
        weights = self.scheme["weights"]
        rows, columns = {"tensor": (outputs, inputs), "channel": (1, inputs)}.get(weights["strategy"]) or weights[
            "block_structure"
        ]
        tiles = (-(-outputs // rows), -(-inputs // columns))
        scales = parts["weight_scale"]
        if scales.numel() != tiles[0] * tiles[1]:
            raise SourceError(
                f"scales {list(scales.shape)} are not those of {tiles[0]:,} x {tiles[1]:,} tiles of a "
                f"weight [{outputs}, {inputs}]",
                where=self.where,
                remedy="Make the artifact again",
            )
        return _Parts(parts["weight"], scales.view(tiles), (rows, columns), parts["input_scale"] if static else None)


class FloatQuantizedLayer(_EightBitLayer):
    """A layer of E4M3 weights, in the format "float-quantized"."""

    number = "float"
    dtypes = frozenset({"F8_E4M3"})
    strategies = frozenset({"tensor", "channel", "block"})
    inputs_rounded = frozenset({"none", "token", "tensor", "group"})

    @classmethod
    def reads(cls, scheme: Mapping[str, Any]) -> bool:
        blocks_and_one_input_scale = (scheme.get("weights") or {}).get("strategy") == "block" and _rounding(
            scheme, "float"
        ) == "tensor"
        return super().reads(scheme) and not blocks_and_one_input_scale

    def build(self, bias: Tensor | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
        parts = self._parts(device)
        if self.rounding in ("none", "group") or self.scheme["weights"]["strategy"] == "block":
            group = self._input_group()
            sentence = ToActOn(f"fp8: {{layers}} are dequantized at each call, {_INPUTS[self.rounding]}")
            return WidenedLinear(parts.codes, parts.scales, parts.tile, group, bias, dtype), sentence
        layer = Float8Linear(parts.codes, parts.scales, parts.input_scale, bias, dtype)
        reason = why_not_scaled(*self.shape, device)
        how = ToActOn(f"are widened at each call, because {reason}") if reason else "use torch._scaled_mm"
        return layer, type(how)(f"fp8: {{layers}} {how}; {_INPUTS[self.rounding]}")

    def _input_group(self) -> int | None:
        """Return how many inputs are rounded with one scale, None if they are not rounded."""
        inputs = self.shape[1]
        group = {"none": None, "token": inputs}.get(
            self.rounding, (self.scheme["input_activations"] or {}).get("group_size")
        )
        if group and inputs % group:
            raise SourceError(f"{inputs} inputs are not a multiple of the {group} that share a scale", where=self.where)
        return group


class IntQuantizedLayer(_EightBitLayer):
    """A layer of 8-bit integers whose inputs are rounded too, in the format "int-quantized"."""

    number = "int"
    dtypes = frozenset({"I8"})
    strategies = frozenset({"tensor", "channel"})
    inputs_rounded = frozenset({"token", "tensor"})

    def build(self, bias: Tensor | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
        parts = self._parts(device)
        layer = Int8Linear(parts.codes, parts.scales, parts.input_scale, bias, dtype)
        reason = why_not_integers(*self.shape, device)
        how = ToActOn(f"are multiplied in float32, because {reason}") if reason else "use torch._int_mm"
        return layer, type(how)(f"w8a8: {{layers}} {how}; {_INPUTS[self.rounding]}")


_INPUTS = {
    "none": "inputs are not rounded",
    "token": "inputs are rounded with a scale for each token",
    "tensor": "inputs are rounded with a calibrated scale",
    "group": "inputs are rounded in groups",
}


def _rounding(scheme: Mapping[str, Any], number: str) -> str:
    """Return `token`, `group`, `tensor` (static) or `none`, else what is not known here."""
    inputs = scheme.get("input_activations")
    if not inputs:
        return "none"
    if inputs.get("num_bits") != 8 or inputs.get("type") != number or not inputs.get("symmetric", True):
        return "unknown"
    strategy, dynamic = inputs.get("strategy"), inputs.get("dynamic", False)
    known = {("token", True): "token", ("group", True): "group", ("tensor", False): "tensor"}
    return known.get((strategy, dynamic), "unknown") if isinstance(dynamic, bool) else "unknown"
