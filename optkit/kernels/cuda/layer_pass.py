"""Rows of hidden states through a layer: of one new token for each sequence, or of whole prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels.cuda.experts import Mixture
from optkit.kernels.cuda.finishing import Coded, Products, finish, finish_coded
from optkit.kernels.cuda.matrix import Matrix, scratch_bytes
from optkit.kernels.cuda.scaled_products import is_scaled
from optkit.kernels.cuda.schedule import MOST_TOKENS
from optkit.kernels.cuda.step_layers import GatedMlp, Layer
from optkit.kernels.cuda.step_products import (
    code_products,
    is_coded,
    leaves_scales,
    step_gated,
    step_product,
    takes_coded,
)
from optkit.kernels.cuda.wide import Lined

if TYPE_CHECKING:
    from optkit.kernels.cuda.decoding import GraphDecoder

Scaled = tuple[Tensor | None, Tensor | None, Tensor | None]
UNSCALED: Scaled = (None, None, None)


class Rows:
    """Hidden states of `batch` sequences of `length` new tokens, and the buffers that a layer fills."""

    def __init__(self, decoder: GraphDecoder, batch: int, length: int) -> None:
        first, device = decoder.layers[0], decoder.embedding.device
        self.batch, self.epsilon, self.exchange, rows = batch, decoder.epsilon, decoder.exchange, batch * length
        mlps = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, GatedMlp)]
        self.hidden, self._qkv = (
            torch.empty(rows, width, dtype=decoder.embedding.dtype, device=device)
            for width in (decoder.embedding.shape[1], first.qkv.outputs)
        )
        matrices = [decoder.head, *(matrix for layer in decoder.layers for matrix in (layer.qkv, layer.output))]
        matrices += [matrix for mlp in mlps for matrix in (mlp.gate_up, mlp.down)]
        needed = max(scratch_bytes(matrix.form, min(rows, MOST_TOKENS)) for matrix in matrices)
        self.ordered = torch.zeros(needed, dtype=torch.uint8, device=device)
        self.qkv, self.scaled = self._qkv, UNSCALED
        """What `attend` reads, and what it is multiplied by, if they are products of codes: scales of rows and
        channels, and a bias.
        """
        self._unadded: Products | None = None

    def through(self, layer: Layer, attend: Callable[[], Tensor | Lined]) -> None:
        """Add to the hidden states what a layer does, to those rows that `attend` leaves.
        It returns what attention makes of `qkv`, [rows, heads * channels].
        """
        self._attends_to(layer)
        self._add(layer.output, attend(), layer.attended_norm)
        if isinstance(layer.mlp, GatedMlp):
            gate_up, down = layer.mlp.gate_up, layer.mlp.down
            x, norm = self._ready(gate_up, layer.mlp_norm)
            self._add(down, step_gated(gate_up, down, x, norm, self.epsilon, self.ordered), layer.fed_norm)
            return
        self.finish()
        mlp = layer.mlp
        if isinstance(mlp, Mixture) and has_kernels_for(layer, len(self.hidden)):
            mlp.add_to_(self.hidden, layer.mlp_norm, self.epsilon)
            return
        normed = self.hidden if layer.mlp_norm is None else self._normed(self.hidden, layer.mlp_norm)
        found = (mlp.own if isinstance(mlp, Mixture) else mlp)(normed.view(self.batch, -1, normed.shape[1]))
        found = (found[0] if isinstance(found, tuple) else found).view_as(normed)
        self.hidden += found if layer.fed_norm is None else self._normed(found, layer.fed_norm)

    def _attends_to(self, layer: Layer) -> None:
        """Make q, k and v; of codes what is left to do, too, which who turns them does."""
        if leaves_scales(layer.qkv, len(self.hidden)) and not norms_all_heads(layer):
            x, norm = self._ready(layer.qkv, layer.input_norm)
            products = code_products(layer.qkv, x, norm, self.epsilon)
            self.qkv, self.scaled = products.sums, (products.scales, layer.qkv.scales, layer.qkv.bias)
            return
        self.qkv, self.scaled = self._qkv, UNSCALED
        self.product(layer.qkv, self.qkv, layer.input_norm)
        self._norm_heads_(layer)

    def product(self, matrix: Matrix, y: Tensor, norm: Tensor | None) -> None:
        """Write x W^T into y, where x are the hidden states, normed if there is a norm."""
        x, norm = self._ready(matrix, norm)
        step_product(matrix, x, y, norm=norm, epsilon=self.epsilon, ordered=self.ordered)

    def keep_rows(self, which: Tensor) -> None:
        """Go on with these rows alone; which: int64 [rows]."""
        self.finish()
        self.hidden = self.hidden.index_select(0, which)

    def finish(self) -> None:
        """Add to the hidden states what is still to be added."""
        if self._unadded:
            finish(self._unadded, self.hidden, add=True, gated=False)
        self._unadded = None

    def _ready(self, matrix: Matrix, norm: Tensor | None) -> tuple[Tensor | Coded, Tensor | None]:
        """Return the hidden states as a matrix takes them, and the norm that is left to do."""
        unadded = self._unadded
        if unadded is None or not takes_coded(unadded.matrix, matrix, len(self.hidden)):
            self.finish()
            return self.hidden, norm
        self._unadded = None
        return finish_coded(unadded, matrix, self.hidden, norm, self.epsilon), None

    def _add(self, matrix: Matrix, x: Tensor | Lined, norm: Tensor | None) -> None:
        if norm is None and self.exchange is None:
            if isinstance(x, Lined) or not is_coded(matrix, len(x)) or is_scaled(matrix, len(x)):
                step_product(matrix, x, self.hidden, add=True, ordered=self.ordered)
            else:
                # the kernel in front of the next product adds it, norms it and rounds it in one
                self._unadded = code_products(matrix, x)
            return
        added = self._products(matrix, x)
        if self.exchange:
            total = self.hidden if norm is None else added.sums
            self.exchange.sum_into_(total, added.sums, matrix.scales, added.scales, add=norm is None)
        if norm is not None:
            self.hidden += self._normed(added.sums, norm)

    def _products(self, matrix: Matrix, x: Tensor | Lined) -> Products:
        """Return what a matrix makes of x; who adds up what all GPUs have scales products of codes where it can."""
        scales = self.exchange and self.exchange.has_kernel_for(len(x)) and leaves_scales(matrix, len(x))
        if scales and matrix.bias is None and not isinstance(x, Lined):
            return code_products(matrix, x)
        added = torch.empty_like(self.hidden)
        step_product(matrix, x, added, ordered=self.ordered)
        return Products(matrix, added)

    def _norm_heads_(self, layer: Layer) -> None:
        """Norm queries and keys over all heads (OLMo 2); over each head the attention kernel does it."""
        if layer.query_norm is None or layer.key_norm is None or not norms_all_heads(layer):
            return
        queries, keys = self.qkv.split([layer.query_norm.numel(), self.qkv.shape[1] - layer.query_norm.numel()], 1)
        for part, norm in ((queries, layer.query_norm), (keys[:, : layer.key_norm.numel()], layer.key_norm)):
            part.copy_(self._normed(part, norm))

    def _normed(self, x: Tensor, norm: Tensor) -> Tensor:
        return F.rms_norm(x, norm.shape, norm, self.epsilon)


def has_kernels_for(layer: Layer, tokens: int) -> bool:
    """Say whether so many tokens go through a layer's MLP by kernels; else its module is called, which may ask the GPU
    for what no graph can.
    """
    mlp = layer.mlp
    return isinstance(mlp, GatedMlp) or (isinstance(mlp, Mixture) and layer.fed_norm is None and mlp.takes(tokens))


def norms_all_heads(layer: Layer) -> bool:
    """Say whether queries are normed over all of their heads at once."""
    return layer.query_norm is not None and layer.query_norm.numel() == layer.output.inputs
