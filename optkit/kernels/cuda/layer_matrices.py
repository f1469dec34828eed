"""Layers of an opened model as matrices that a decode step multiplies by, alone or stacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from optkit.kernels.cuda.matrix import Matrix, stacked
from optkit.kernels.cuda.schedule import ROWS
from optkit.kernels.cuda.tiled_linear import TiledLinear
from optkit.kernels.eight_bit_linear import EightBitLinear
from optkit.kernels.float8_linear import Float8Linear
from optkit.kernels.shares import local_part, split_dimension
from optkit.model.split_plan import BY_INPUTS


def matrix_of(layer: nn.Module) -> Matrix:
    """Return the weights of an opened model's layer as the step multiplies by them."""
    if isinstance(layer, TiledLinear):
        return layer.matrix()
    if isinstance(layer, EightBitLinear):
        outputs, inputs = layer.codes.shape
        bias, scales = layer.bias if layer.bias is None else layer.bias.to(layer.dtype), layer.scales.expand(outputs)
        return Matrix(layer.codes, outputs, inputs, layer.dtype, scales.contiguous(), layer.input_scale, bias=bias)
    assert isinstance(layer, nn.Linear)
    weight, bias = local_part(layer.weight.data), None if layer.bias is None else local_part(layer.bias.data)
    if bias is not None and split_dimension(layer) == BY_INPUTS and distributed.get_rank():
        bias = None  # it is added once
    outputs, inputs = weight.shape
    return Matrix(weight, outputs, inputs, weight.dtype, bias=bias)


def why_not_matrix(module: nn.Module, name: str) -> str | None:
    """Return why a step cannot multiply by a layer of such a name, None if it can."""
    if not isinstance(module, (nn.Linear, TiledLinear, EightBitLinear)):
        return f"{name} has weights in a form that it does not read"
    if isinstance(module, TiledLinear) and module.order is not None:
        return f"{name} takes its inputs in another order (activation order)"
    if isinstance(module, Float8Linear) and not module.scaled:
        return f"{name} is in 8-bit floats, which GPUs of compute capability 8.9 and above alone multiply"
    step, outputs, inputs = ROWS if isinstance(module, EightBitLinear) else 8, module.out_features, module.in_features
    if isinstance(module, nn.Linear):
        outputs, inputs = local_part(module.weight).shape
    if inputs % step or (step == ROWS and outputs % step):
        return f"{name} is {outputs} x {inputs}, no multiples of {step}"
    return None


def goes_through_gelu(activation: Callable[[Tensor], Tensor]) -> bool | None:
    """Return how a gate activates, True: GELU by tanh, False: SiLU; None for others."""
    points = torch.linspace(-4, 4, 17)
    for gelu, expected in ((False, F.silu(points)), (True, F.gelu(points, approximate="tanh"))):
        if torch.allclose(activation(points), expected, atol=1e-5):
            return gelu
    return None


def stack_(layers: list[Any], gelu: bool = False) -> Matrix:
    """Return layers as one matrix, of which they become views."""
    matrices = [matrix_of(layer) for layer in layers]
    if len(layers) == 1:
        return replace(matrices[0], gelu=gelu)
    whole = stacked(matrices)
    for layer, part in zip(layers, whole.parts([matrix.outputs for matrix in matrices]), strict=True):
        if isinstance(layer, TiledLinear):
            layer.take_(part)
        elif isinstance(layer, EightBitLinear):
            layer.codes, layer.scales = part.weight, part.scales  # type: ignore[assignment]
        else:
            _view_(layer, "weight", part.weight)
            if part.bias is not None:
                _view_(layer, "bias", part.bias)
    return replace(whole, gelu=gelu)


def _view_(layer: nn.Module, name: str, tensor: Tensor) -> None:
    """Let a parameter be a view of another tensor, in a split model its share."""
    parameter: Any = getattr(layer, name)
    if hasattr(parameter, "_local_tensor"):
        parameter._local_tensor = tensor
    else:
        parameter.data = tensor
