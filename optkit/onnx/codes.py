"""The weight of a MatMulNBits (com.microsoft) read back."""

from __future__ import annotations

import torch

from optkit.algorithms.grid import QuantizedWeight
from optkit.algorithms.packing import from_bytes
from optkit.onnx.model_file import ModelFile


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
