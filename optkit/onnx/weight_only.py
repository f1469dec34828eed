"""Weights in 4 or 8 bits, a block of inputs at a time, for the operator MatMulNBits.

The numbers of `rtn`, `hqq` and `k_quant` come from onnxruntime's own `MatMulNBitsQuantizer`, which
is given one slice of one matrix at a time. So memory stays small, and each matrix may have bits of
its own. What the tool loses on the way (the accuracy level with HQQ, the bits with k-quant) does
not matter. Those of `mse` are optkit's (`algorithms.scale_search`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from optkit.algorithms.grid import Grid, round_to_nearest
from optkit.algorithms.packing import in_bytes
from optkit.algorithms.scale_search import search_scales
from optkit.onnx.quiet import quiet_tools

Algorithm = Literal["rtn", "mse", "k_quant", "hqq"]
SLICE_ELEMENTS = 1 << 24
"""Weights that the tool gets at once; k-quant holds a dozen float32 and float64 copies of them."""


@dataclass(frozen=True)
class BlockForm:
    """How a matrix is stored."""

    bits: Literal[4, 8]
    block_size: int
    symmetric: bool
    algorithm: Algorithm
    accuracy_level: Literal[0, 4]
    """What the operator computes with: 4 rounds the inputs to int8, block by block; 0 leaves them
    as they are.
    """


@dataclass(frozen=True)
class BlockCodes:
    """A matrix [inputs, outputs] of MatMulNBits: code `q` of a block is `(q - zero) * scale`."""

    codes: NDArray[np.uint8]
    """[outputs, blocks, block_size * bits / 8]: two codes of 4 bits in a byte, the first one low.
    The last block is padded.
    """
    scales: NDArray[Any]
    """[outputs, blocks], in the dtype of the weights."""
    zeros: NDArray[Any] | None
    """uint8 [outputs, ceil(blocks * bits / 8)], packed as the codes are; of HQQ, which leaves
    fractions: [outputs, blocks], in the dtype of the weights; None: 8 or 128."""


def quantize_matrix(weight: NDArray[Any], form: BlockForm) -> BlockCodes:
    """Return a float matrix [inputs, outputs] in blocks along its inputs."""
    step = max(1, SLICE_ELEMENTS // weight.shape[0])
    quantize = _search if form.algorithm == "mse" else _ask_tool
    parts = [quantize(weight[:, start : start + step], form) for start in range(0, weight.shape[1], step)]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return BlockCodes(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(zeros) if zeros else None,
    )


def _ask_tool(weight: NDArray[Any], form: BlockForm) -> BlockCodes:
    from onnx import TensorProto, helper, numpy_helper

    with quiet_tools(), np.errstate(all="ignore"):
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        held = numpy_helper.from_array(np.ascontiguousarray(weight), "weight")
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "weight"], ["y"], name="matrix")], "g", ends[:1], ends[1:], [held]
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
        tool = MatMulNBitsQuantizer(
            model, bits=form.bits, block_size=form.block_size, is_symmetric=form.symmetric, algo_config=_algorithm(form)
        )
        tool.process()
    written = tool.model.model.graph
    (node,) = written.node
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in written.initializer}
    codes, scales, *rest = [arrays[name] for name in node.input[1:]]
    outputs = weight.shape[1]
    return BlockCodes(codes, scales.reshape(outputs, -1), rest[0].reshape(outputs, -1) if rest else None)


def _algorithm(form: BlockForm) -> Any:
    from onnxruntime.quantization import matmul_nbits_quantizer as tools

    if form.algorithm == "hqq":
        return tools.HQQWeightOnlyQuantConfig(block_size=form.block_size, bits=form.bits)
    if form.algorithm == "k_quant":
        return tools.KQuantWeightOnlyQuantConfig(customized_weight_config={"matrix": {"bits": form.bits}})
    return tools.DefaultWeightOnlyQuantConfig(block_size=form.block_size, is_symmetric=form.symmetric, bits=form.bits)


def _search(weight: NDArray[Any], form: BlockForm) -> BlockCodes:
    grid = Grid(
        form.bits, form.block_size, form.symmetric, torch.float16 if weight.dtype == np.float16 else torch.float32
    )
    rows = np.pad(weight.T.astype(np.float32), ((0, 0), (0, -weight.shape[0] % form.block_size)))
    padded = torch.from_numpy(rows)
    quantized = round_to_nearest(padded, *search_scales(padded, grid), grid)
    codes = in_bytes(quantized.codes, form.bits).numpy().reshape(len(rows), -1, form.block_size * form.bits // 8)
    zeros = None if form.symmetric else in_bytes(quantized.zeros, form.bits).numpy()
    return BlockCodes(codes, quantized.scales.numpy().astype(weight.dtype), zeros)
