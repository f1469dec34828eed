"""Read what packed layers hold, as the formats say it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.algorithms.grid import QuantizedWeight
from optkit.algorithms.packing import unpack


def unpack_compressed_tensors(tensors: Mapping[str, Tensor], bits: int) -> QuantizedWeight:
    """Read the tensors of one linear layer in the pack-quantized format."""
    rows, columns = (int(size) for size in tensors["weight_shape"])
    scales = tensors["weight_scale"]
    if "weight_zero_point" in tensors:
        zeros = unpack(tensors["weight_zero_point"], bits, rows, 0)
    else:
        zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8, device=scales.device)
    return QuantizedWeight(unpack(tensors["weight_packed"], bits, columns, 1), scales, zeros, bits)


def unpack_gptq(tensors: Mapping[str, Tensor], bits: int) -> QuantizedWeight:
    """Read one linear layer in GPTQ's format; raises ValueError for activation order."""
    scales, group_of_input = tensors["scales"], tensors["g_idx"].long()
    columns = group_of_input.numel()
    width = columns // scales.shape[0]
    if not torch.equal(group_of_input.cpu(), torch.arange(columns) // width):
        raise ValueError("the inputs are grouped out of order (g_idx of an activation-ordered GPTQ checkpoint)")
    zeros = unpack(tensors["qzeros"], bits, scales.shape[1], 1) + 1
    codes = unpack(tensors["qweight"], bits, columns, 0)
    return QuantizedWeight(codes.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous(), bits)
