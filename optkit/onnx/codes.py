"""Codes of 4 or 8 bits in bytes, as in MatMulNBits (com.microsoft), and those read back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optkit.algorithms.grid import QuantizedWeight
from optkit.onnx.model_file import ModelFile


def in_bytes(codes: Tensor, bits: int, fill: int = 0) -> Tensor:
    """Pack uint8 [rows, count] along the rows, low bits first: uint8 [rows, ceil(count bits / 8)].

    `fill` stands in the rest of the last byte.
    """
    held = 8 // bits
    padded = nn.functional.pad(codes, (0, -codes.shape[1] % held), value=fill).view(len(codes), -1, held)
    return sum((padded[:, :, place] << (place * bits) for place in range(held)), torch.zeros_like(padded[:, :, 0]))


def from_bytes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo `in_bytes`: uint8 [rows, count]."""
    places = [packed >> place & ((1 << bits) - 1) for place in range(0, 8, bits)]
    return torch.stack(places, dim=-1).flatten(1)[:, :count]


def stored_codes(graph: ModelFile, name: str) -> QuantizedWeight:
    """Return the weight of a MatMulNBits: codes [out, in], scales and zero points [out, groups]."""
    node = next(node for node in graph.proto.graph.node if node.name == name)
    fields = {attribute.name: attribute.i for attribute in node.attribute}
    outputs, inputs, bits = fields["N"], fields["K"], fields["bits"]
    groups = -(-inputs // fields["block_size"])
    packed, scales, *zeros = [
        torch.from_numpy(graph.array(given).copy()).reshape(outputs, -1) for given in node.input[1:] if given
    ]
    middle = torch.full((outputs, groups), 1 << (bits - 1), dtype=torch.uint8)
    return QuantizedWeight(
        from_bytes(packed, bits, inputs), scales, from_bytes(zeros[0], bits, groups) if zeros else middle, bits
    )
