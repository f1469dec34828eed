"""What the graph takes of an opened model: its layers as matrices, or why it cannot take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from optkit.kernels.cuda.families import why_not_family
from optkit.kernels.cuda.matrix import CODE_BASES, Matrix, can_stack, stacked
from optkit.kernels.cuda.schedule import ROWS
from optkit.kernels.cuda.tiled_linear import TiledLinear
from optkit.kernels.eight_bit_linear import EightBitLinear
from optkit.kernels.float8_linear import Float8Linear


@dataclass(frozen=True)
class Layer:
    """The matrices and norms of a block."""

    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix
    input_norm: Tensor
    output_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


def why_not(model: Any) -> str | None:
    """Return why the step of an opened model cannot be one graph, None if it can."""
    if reason := why_not_family(model.config.to_dict()):
        return reason
    if model.dtype not in CODE_BASES:
        return (
            f"its kernels compute in bfloat16 and float16, not {str(model.dtype).removeprefix('torch.')} "
            "(precision: bf16 opens it so)"
        )
    for name, module in model.named_modules():
        if name.endswith(("_proj", "lm_head")) and not isinstance(module, (nn.Linear, TiledLinear, EightBitLinear)):
            return f"{name} has weights in a form that it does not read"
        if isinstance(module, Float8Linear) and not module.scaled:
            return f"{name} is in 8-bit floats, which GPUs of compute capability 8.9 and above alone multiply"
        if isinstance(module, EightBitLinear) and (module.in_features % ROWS or module.out_features % ROWS):
            return f"{name} has 8-bit weights of {module.out_features} x {module.in_features}, no multiples of {ROWS}"
        if isinstance(module, TiledLinear) and module.order is not None:
            return f"{name} takes its inputs in another order (activation order)"
    return _odd_shapes(model)


def _odd_shapes(model: Any) -> str | None:
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        stacks = {
            "q, k and v": (attention.q_proj, attention.k_proj, attention.v_proj),
            "gate and up": (mlp.gate_proj, mlp.up_proj),
        }
        for name, layers in stacks.items():
            if not can_stack([matrix_of(layer) for layer in layers]):
                return f"{name} of a block are quantized differently"
        if mlp.up_proj.out_features % ROWS or any(
            layer.in_features % 8 for layer in (attention.q_proj, attention.o_proj, mlp.down_proj)
        ):
            return "its widths are no multiples of 16"
    return None


def layer_of(block: Any) -> Layer:
    """Return what a step takes of a block, whose layers become views of stacked matrices."""
    attention, mlp = block.self_attn, block.mlp
    return Layer(
        qkv=_stack_([attention.q_proj, attention.k_proj, attention.v_proj]),
        output=matrix_of(attention.o_proj),
        gate_up=_stack_([mlp.gate_proj, mlp.up_proj]),
        down=matrix_of(mlp.down_proj),
        input_norm=block.input_layernorm.weight,
        output_norm=block.post_attention_layernorm.weight,
        query_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
    )


def matrix_of(layer: nn.Module) -> Matrix:
    """Return the weights of an opened model's layer as the step multiplies by them."""
    if isinstance(layer, TiledLinear):
        return layer.matrix()
    if isinstance(layer, EightBitLinear):
        outputs, inputs = layer.codes.shape
        bias, scales = layer.bias if layer.bias is None else layer.bias.to(layer.dtype), layer.scales.expand(outputs)
        return Matrix(layer.codes, outputs, inputs, layer.dtype, scales.contiguous(), layer.input_scale, bias=bias)
    assert isinstance(layer, nn.Linear)
    bias = None if layer.bias is None else layer.bias.data
    return Matrix(layer.weight.data, layer.out_features, layer.in_features, layer.weight.dtype, bias=bias)


def _stack_(layers: list[nn.Module]) -> Matrix:
    """Return layers as one matrix, of which they become views."""
    matrices = [matrix_of(layer) for layer in layers]
    whole = stacked(matrices)
    for layer, part in zip(layers, whole.parts([matrix.outputs for matrix in matrices]), strict=True):
        if isinstance(layer, TiledLinear):
            layer.take_(part)
        elif isinstance(layer, EightBitLinear):
            layer.codes, layer.scales = part.weight, part.scales  # type: ignore[assignment]
        elif isinstance(layer, nn.Linear):
            layer.weight.data = part.weight
            if part.bias is not None:
                layer.bias.data = part.bias
    return whole
