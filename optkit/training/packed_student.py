"""A quantized checkpoint as a float32 model with frozen weights, to train adapters beside.

The packed weights are dequantized once, so a step costs what it costs beside float weights, and
takes their memory. The values are those that the packed layers compute with, so that what was
learned beside them holds beside the packed ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from optkit.errors import StageError
from optkit.kernels.bitsandbytes_layers import FourBitLayer, four_bit_layers
from optkit.kernels.integer_kernels import IntegerLayer
from optkit.kernels.microscaled import MicroscaledLayer
from optkit.kernels.open_packed import fill_, match_packed
from optkit.kernels.quant_methods import quantized_layers
from optkit.kernels.stored_layer import QuantizedLayer, plain_layer
from optkit.model.adapter import FEW_BITS, LEARNABLE
from optkit.model.checkpoint import Checkpoint
from optkit.progress import Progress
from optkit.training.student import Student

FOUR_BITS = "bitsandbytes"


def open_packed_student(directory: Path, device: str, progress: Progress, trust_remote_code: bool = False) -> Student:
    """Open a quantized checkpoint on the device in float32; nothing in it wants a gradient.

    Raises StageError for a form of weights that gradients have no way through, SourceError if
    weights and model do not fit.
    """
    checkpoint = Checkpoint(directory)
    matched = match_packed(checkpoint, _layers(checkpoint), torch.float32, trust_remote_code)
    fill_(matched, checkpoint, device, torch.float32, progress, _dequantized)
    return Student(matched.model.requires_grad_(False), checkpoint, matched.names)


def _dequantized(layer: QuantizedLayer, bias: Tensor | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
    return plain_layer(_weight(layer, dtype, device), bias), "{layers} are dequantized"


def _weight(layer: QuantizedLayer, dtype: torch.dtype, device: str) -> Tensor:
    if isinstance(layer, FourBitLayer | IntegerLayer | MicroscaledLayer) and not layer.scheme.get("input_activations"):
        return layer.dequantize(dtype, device)
    _, sentence = layer.build(None, dtype, device)
    raise StageError(
        f"there are no gradients through its weights ({sentence.partition(':')[0]})",
        where=layer.where,
        why=FEW_BITS,
        remedy=LEARNABLE,
    )


def _layers(checkpoint: Checkpoint) -> Mapping[str, QuantizedLayer]:
    """Return the quantized layers; raises StageError if nobody here reads them."""
    method = str((checkpoint.quantization or {}).get("quant_method"))
    found = four_bit_layers(checkpoint) if method == FOUR_BITS else quantized_layers(checkpoint)
    if not found:
        what = (
            "8-bit weights of bitsandbytes"
            if method == FOUR_BITS
            else f"a form of {method} that optkit does not open itself"
        )
        raise StageError(f"there are no gradients through {what}", where=str(checkpoint.directory), remedy=LEARNABLE)
    return found
