"""Prompts of a Llama-like model: products by its own layers, and what stands between them in C++.
The residual stream and the KV cache are float32 whatever the model's dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from optkit.environment import cpu_has
from optkit.kernels.cpu.native import dense_linear, library
from optkit.kernels.cpu.structures import Structures

_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64
FUNCTIONS = {
    "norm": (_ADDRESS, _NUMBER, _NUMBER, _ADDRESS, _NUMBER, _ADDRESS),
    "attend": (_ADDRESS, _NUMBER, _NUMBER, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
    "gate": (_ADDRESS, _ADDRESS, _NUMBER),
}
"""Of prompts.cpp, and what they take."""


class PromptPass:
    """Runs blocks on prompts from their first token on."""

    def __init__(self, blocks: Iterable[Any], structures: Structures) -> None:
        self.blocks, self.structures = list(blocks), structures

    def hidden(self, given: Tensor) -> Tensor:
        """float32 [batch, length, width] -> what leaves the last block, of the same shape.
        The keys and values are in the cache then.
        """
        for index in range(len(self.blocks)):
            given = left_by(self.inputs_in_turn(index, given))
        return given

    def inputs_in_turn(self, index: int, given: Tensor) -> Generator[Tensor, None, Tensor]:
        """Run one block: yield what its layers are given, float32 [batch * length, in], in front of those
        of queries, keys and values, of the output, of gate and up, and of down. Return what leaves it.
        """
        attention, mlp, length = self.blocks[index].self_attn, self.blocks[index].mlp, given.shape[1]
        hidden = given.flatten(0, 1).contiguous()
        rows = self._normed(index, 0, hidden)
        yield rows
        rows = self._attended(index, length, products((attention.q_proj, attention.k_proj, attention.v_proj), rows))
        yield rows
        hidden = hidden + products((attention.o_proj,), rows)[0]
        rows = self._normed(index, 1, hidden)
        yield rows
        rows, up = products((mlp.gate_proj, mlp.up_proj), rows)
        _function("gate")(rows.data_ptr(), up.data_ptr(), rows.numel())
        del up  # whoever waits in front of a layer holds as little as can be
        yield rows
        hidden += products((mlp.down_proj,), rows)[0]
        return hidden.view(given.shape)

    def _attended(self, index: int, length: int, projected: list[Tensor]) -> Tensor:
        attended = torch.empty_like(projected[0])
        places = (each.data_ptr() for each in (*projected, attended))
        _function("attend")(self.structures.model, index, length, *places)
        return attended

    def _normed(self, index: int, last: int, hidden: Tensor) -> Tensor:
        normed = torch.empty_like(hidden)
        _function("norm")(self.structures.model, index, last, hidden.data_ptr(), len(hidden), normed.data_ptr())
        return normed


def left_by(run: Generator[Tensor, None, Tensor]) -> Tensor:
    """Run a block to its end, and return what leaves it."""
    while True:
        try:
            next(run)
        except StopIteration as ended:
            left: Tensor = ended.value
            return left


def products(layers: tuple[nn.Module, ...], rows: Tensor) -> list[Tensor]:
    """Return float32 [n, out] of several layers, for rows float32 [n, in]."""
    narrow = {dtype: rows.to(dtype) for dtype in {_dtype(layer) for layer in layers}}
    return [_product(layer, narrow[_dtype(layer)]).float().contiguous() for layer in layers]


def _product(layer: nn.Module, rows: Tensor) -> Tensor:
    """By the tiles of dense_linear, where they are faster than torch's library: float32 on x86."""
    replaced = "forward" in vars(layer)
    if not isinstance(layer, nn.Linear) or replaced or rows.dtype != torch.float32 or not cpu_has("avx2"):
        product: Tensor = layer(rows)
        return product
    product = dense_linear(rows, layer.weight)
    return product if layer.bias is None else product.add_(layer.bias)


def _dtype(layer: nn.Module) -> torch.dtype:
    return layer.weight.dtype if isinstance(layer, nn.Linear) else torch.float32


@cache
def _function(name: str) -> Any:
    function = getattr(ctypes.CDLL(str(library())), f"optkit_prompt_{name}")
    function.argtypes, function.restype = FUNCTIONS[name], None
    return function
