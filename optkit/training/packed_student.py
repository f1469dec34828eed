"""A quantized checkpoint as a float32 model with frozen weights, to train adapters beside.

The packed weights are dequantized once, so a step costs what it costs beside float weights, and
takes their memory. The values are those that the packed layers compute with, so that what was
learned beside them holds beside the packed ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from optkit.errors import StageError
from optkit.kernels.bitsandbytes_layers import FourBitLayer, four_bit_layers
from optkit.kernels.formats import quantized_layers
from optkit.kernels.load import fill_, match_packed
from optkit.kernels.microscaled import MicroscaledLinear
from optkit.kernels.packed import PackedLinear, PackedWeight
from optkit.kernels.stored import QuantizedLayer
from optkit.model.adapter import FEW_BITS, LEARNABLE
from optkit.model.checkpoint import Checkpoint
from optkit.progress import Progress
from optkit.training.student import Student

FOUR_BITS = "bitsandbytes"


@dataclass(frozen=True)
class _Dequantized:
    """A quantized layer that is built as a plain one."""

    layer: QuantizedLayer | FourBitLayer
    where: str

    @property
    def name(self) -> str:
        return self.layer.name

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.layer.tensors

    @property
    def shape(self) -> tuple[int, int]:
        return self.layer.shape

    def build(self, bias: Tensor | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
        outputs, inputs = self.shape
        linear = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(self._weight(dtype, device), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        return linear, "{layers} are dequantized"

    def integers(self, device: str) -> PackedWeight | None:
        return self.layer.integers(device)

    def _weight(self, dtype: torch.dtype, device: str) -> Tensor:
        if isinstance(self.layer, FourBitLayer):
            return self.layer.dequantize(dtype, device)
        packed = self.layer.integers(device)
        if packed is not None:
            return PackedLinear(packed, None, dtype).dequantize()
        built, sentence = self.layer.build(None, dtype, device)
        if isinstance(built, MicroscaledLinear):
            return built.dequantize()
        raise StageError(
            f"there are no gradients through its weights ({sentence.partition(':')[0]})",
            where=f"{self.where}: {self.layer.name}",
            why=FEW_BITS,
            remedy=LEARNABLE,
        )


def open_packed_student(directory: Path, device: str, progress: Progress, trust_remote_code: bool = False) -> Student:
    """Open a quantized checkpoint on the device in float32; nothing in it wants a gradient.

    Raises StageError for a form of weights that gradients have no way through, SourceError if
    weights and model do not fit.
    """
    checkpoint = Checkpoint(directory)
    layers: Mapping[str, _Dequantized] = {
        layer.name: _Dequantized(layer, str(directory)) for layer in _layers(checkpoint)
    }
    matched = match_packed(checkpoint, layers, torch.float32, trust_remote_code)
    fill_(matched, checkpoint, device, torch.float32, progress)
    return Student(matched.model.requires_grad_(False), checkpoint, matched.names)


def _layers(checkpoint: Checkpoint) -> list[QuantizedLayer | FourBitLayer]:
    """Return the quantized layers; raises StageError if nobody here reads them."""
    method = str((checkpoint.quantization or {}).get("quant_method"))
    found: list[QuantizedLayer | FourBitLayer] = []
    found += four_bit_layers(checkpoint) if method == FOUR_BITS else (quantized_layers(checkpoint) or {}).values()
    if not found:
        what = (
            "8-bit weights of bitsandbytes"
            if method == FOUR_BITS
            else f"a form of {method} that optkit does not open itself"
        )
        raise StageError(f"there are no gradients through {what}", where=str(checkpoint.directory), remedy=LEARNABLE)
    return found
