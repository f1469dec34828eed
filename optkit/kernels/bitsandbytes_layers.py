"""4-bit layers of bitsandbytes as float weights, without the library, to train beside them.

How they lie is in `optkit.packed_tensors.bitsandbytes`. transformers opens such a model to run it, with
bitsandbytes' own kernels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optkit.kernels.stored_layer import QuantizedLayer, plain_layer
from optkit.model.checkpoint import Checkpoint

STATE = ".weight.quant_state.bitsandbytes__"


def four_bit_layers(checkpoint: Checkpoint) -> Mapping[str, QuantizedLayer]:
    """Return the 4-bit layers of a checkpoint by name."""
    found = [name.partition(STATE) for name in checkpoint.tensors if STATE in name]
    return {name: FourBitLayer(checkpoint, name, {"type": kind}) for name, _, kind in found}


class FourBitLayer(QuantizedLayer):
    """A layer in NF4 or FP4."""

    leaves = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.present((*self.leaves, self._state_leaf))

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs; reads some bytes."""
        outputs, inputs = self._state["shape"]
        return int(outputs), int(inputs)

    def build(self, bias: Tensor | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
        """Return a plain layer of its float weights. Raises what `dequantize` raises."""
        return plain_layer(self.dequantize(dtype, device), bias), "{layers} are dequantized"

    def dequantize(self, dtype: torch.dtype, device: str) -> Tensor:
        """Return float [out, in] as bitsandbytes computes it.
        Each code's value times the scale of its block is rounded to the stored dtype.

        Raises SourceError if a tensor is missing.
        """
        state = self._state
        nested = "nested_blocksize" in state
        parts = self.read(self.leaves, device, required=self.leaves if nested else self.leaves[:3])
        scales = parts["weight.absmax"]
        if nested:
            coarse = parts["weight.nested_absmax"].repeat_interleave(int(state["nested_blocksize"]))[: len(scales)]
            scales = parts["weight.nested_quant_map"][scales.int()] * coarse + float(state["nested_offset"])
        codes = parts["weight"].view(-1).int()
        values = parts["weight.quant_map"][torch.stack([codes >> 4, codes & 15], dim=1).view(-1)]
        outputs, inputs = self.shape
        weights = (
            values[: outputs * inputs].float() * _spread(scales, int(state["blocksize"]), outputs * inputs)
        ).view(outputs, inputs)
        return weights.to(getattr(torch, str(state["dtype"]))).to(dtype)

    @property
    def _state_leaf(self) -> str:
        return f"{STATE[1:]}{self.scheme['type']}"

    @property
    def _state(self) -> Mapping[str, Any]:
        told: Mapping[str, Any] = json.loads(bytes(self.checkpoint.read(f"{self.name}.{self._state_leaf}").tolist()))
        return told


def _spread(scales: Tensor, block: int, count: int) -> Tensor:
    return scales.float().repeat_interleave(block)[:count]
