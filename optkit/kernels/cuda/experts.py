"""Experts of a block in two launches for all tokens: which expert multiplies a row, the GPU alone knows.

Choices are sorted by expert on the GPU and cut into groups of a few rows. Blocks of `linear.cu` take
a group each, so that an expert's weights are read once for up to 8 tokens. How many groups there are
is not asked: there are blocks for as many as there can be, and those of no group end at once.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optkit.algorithms.eight_bit import FLOAT8
from optkit.kernels.cuda.layer_matrices import goes_through_gelu, matrix_of, stack_, why_not_matrix
from optkit.kernels.cuda.matrix import Matrix, can_stack, coded_rows, dequantized, launch_of
from optkit.kernels.cuda.nvrtc import Kernel, compiled
from optkit.kernels.cuda.scaled_products import CAPABILITY
from optkit.kernels.cuda.schedule import ROWS, Form, Schedule, choose_tiles
from optkit.kernels.cuda.step_products import step_product
from optkit.model.experts import Experts, experts_in, why_not_joined

MOST_GROUPS = {4: 9, 8: 1, 16: 1}
"""By the bits of a weight, the groups of an expert in the mean up to which the kernels are ahead of torch's grouped
products on an H200 (`experts_ways_h200.json`). In 4 bits those need floats, which are written first.
"""
ROUTED_ALONE = 16
"""Tokens up to which one block of the GPU chooses their experts and sorts them, too; for more, several choose."""
MOST_PRODUCTS = 34 << 30
"""The rows of an expert in the mean times its weights, at most, where there are no grouped products. More go through
the modules of the experts: they wait for the GPU once, and multiply all rows of an expert at once.
From so many on those of Mixtral in FP8 are ahead on an H200.
"""
STEPPED = 256
"""Tokens of a step, which may not wait for the GPU."""
MOST_BLOCKS = 65535
"""Of a launch, side by side."""
MOST_ROWS = 8
"""Of a group."""
MOST_CHOICES = 32
"""Of a token, of which each lane of a warp keeps one."""
THREADS = 512
HAS_GROUPED = hasattr(F, "grouped_mm")
"""torch has it from 2.10 on."""
TRIED, TRIED_ERROR = 16, 0.03
"""Tokens that are sent through an MLP to see what it computes, and how far rounding takes most of them."""


class StackedExperts(nn.Module):
    """The experts of a block, whose matrices are parts of two."""

    def __init__(self, experts: nn.Module, count: int, gate_up: Matrix, down: Matrix) -> None:
        """The matrices are of one expert each, with the weights of all of them one behind the other."""
        super().__init__()
        self.experts, self.count, self.gate_up, self.down = experts, count, gate_up, down
        self.grouped = _is_grouped(gate_up) and _is_grouped(down)
        """Whether torch multiplies the rows of long prompts, those of all experts in one product."""

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return float [tokens, hidden] of such states and their experts, [tokens, top_k]."""
        if not self.grouped and not self.takes(*chosen.shape):
            found: Tensor = self.experts(hidden, chosen, weights)
            return found
        hidden, total = hidden.contiguous(), torch.empty_like(hidden)
        with torch.cuda.device(hidden.device):
            given = Choices.empty(chosen.contiguous(), weights.contiguous(), self.count, self.most_rows())
            self.through(given, hidden, total)
        return total

    def takes(self, tokens: int, choices: int) -> bool:
        """Say whether so many tokens are few enough for the kernels."""
        weights = sum(each.outputs * each.inputs for each in (self.gate_up, self.down))
        blocks = max(tokens, self.count + tokens * choices // self.most_rows())
        most = MOST_GROUPS[self.gate_up.form.bits] * self.most_rows() if self.grouped else MOST_PRODUCTS // weights
        few = tokens * choices <= most * self.count and blocks <= MOST_BLOCKS
        return few or (not self.grouped and tokens <= STEPPED)

    def most_rows(self) -> int:
        """Return the rows of a group at most."""
        device = self.gate_up.weight.get_device()
        return min(_most_rows(self.gate_up.form, True, device), _most_rows(self.down.form, False, device))

    def through(
        self,
        choices: Choices,
        x: Tensor,
        total: Tensor,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
        add: bool = False,
    ) -> None:
        """Write what the chosen experts make of x, [tokens, hidden], into total, or add it. With a `norm` x is
        normed first.
        """
        choices.sort_()
        if not self.takes(*choices.chosen.shape):
            self.through_grouped(choices, x if norm is None else F.rms_norm(x, norm.shape, norm, epsilon), total, add)
            return
        rows = choices.chosen.numel()
        gated, made = x.new_empty(rows, self.down.inputs), x.new_empty(rows, self.down.outputs)
        choices.multiply(self.gate_up, x, gated, gated=True, norm=norm, epsilon=epsilon)
        choices.multiply(self.down, gated, made, gated=False)
        choices.sum_into_(total, made, add)

    def through_grouped(self, choices: Choices, x: Tensor, total: Tensor, add: bool) -> None:
        """Do so with all rows of an expert at once. Matrices of 4 bits hold their floats meanwhile."""
        order, product = choices.order, partial(_grouped_product, ends=choices.ends)
        gate, up = product(self.gate_up, x[order // choices.chosen.shape[1]]).chunk(2, 1)
        gated = (F.gelu(gate, approximate="tanh") if self.gate_up.gelu else F.silu(gate)).mul_(up)
        made = torch.empty(len(order), self.down.outputs, dtype=x.dtype, device=x.device)
        made[order] = product(self.down, gated)
        choices.sum_into_(total, made, add)


def _is_grouped(matrix: Matrix) -> bool:
    if not HAS_GROUPED or matrix.bias is not None or matrix.dtype != torch.bfloat16:
        return False
    codes = matrix.weight
    return matrix.form.bits != 8 or (
        codes.is_cuda and codes.dtype == FLOAT8.dtype and torch.cuda.get_device_capability(codes.device) == CAPABILITY
    )


def _grouped_product(matrix: Matrix, rows: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows, those of an expert side by side, by the matrices of as many experts as there are ends."""
    count = len(ends)
    if matrix.scales is None or matrix.form.bits != 8:
        whole = dequantized(replace(matrix, outputs=count * matrix.outputs))
        return F.grouped_mm(rows, whole.view(count, -1, matrix.inputs).transpose(1, 2), offs=ends)
    codes, scales = coded_rows(matrix, rows, None, 0.0)
    weights, of_weights = matrix.weight.view(count, -1, matrix.inputs).transpose(1, 2), matrix.scales.view(count, -1)
    return torch._scaled_grouped_mm(
        codes, weights, scales, of_weights, offs=ends, out_dtype=matrix.dtype, use_fast_accum=True
    )


@dataclass(frozen=True)
class Mixture:
    """A block's MLP of a router and experts, nothing else: softmax of logits, of which the largest are chosen."""

    own: nn.Module
    experts: StackedExperts
    router: Matrix
    choices: int
    to_one: bool
    """The shares of a token's experts add up to 1."""

    @classmethod
    def of(cls, mlp: nn.Module) -> Mixture | nn.Module:
        """Return an MLP of `StackedExperts` as such, itself if it computes anything else."""
        parts, router = dict(mlp.named_children()), getattr(mlp, "gate", None)
        weight, choices = getattr(router, "weight", None), getattr(router, "top_k", None)
        experts = parts.get("experts")
        if {*parts} != {"gate", "experts"} or not isinstance(experts, StackedExperts) or not isinstance(choices, int):
            return mlp
        if weight is None or weight.shape != (experts.count, experts.gate_up.inputs) or choices > MOST_CHOICES:
            return mlp
        matrix = Matrix(weight.data, len(weight), weight.shape[1], weight.dtype)
        tried = (cls(mlp, experts, matrix, choices, to_one) for to_one in (True, False))
        return next((found for found in tried if found.is_right()), mlp)

    @torch.no_grad()
    def is_right(self) -> bool:
        """Say whether it computes what its MLP does, of most of some tokens: rounding sends some to others."""
        x = torch.randn(TRIED, self.router.inputs, generator=torch.Generator().manual_seed(0)).to(self.router.weight)
        chances, chosen = (x @ self.router.weight.T).float().softmax(-1).topk(self.choices)
        found = self.experts(x, chosen, chances / chances.sum(-1, keepdim=True) if self.to_one else chances)
        expected = self.own(x[None])[0]
        far = (found - expected).float().norm(dim=1) / expected.float().norm(dim=1)
        return bool(far.median() < TRIED_ERROR)

    def takes(self, tokens: int) -> bool:
        """Say whether so many tokens are few enough for `add_to_`; more go through `own`."""
        return self.experts.grouped or self.experts.takes(tokens, self.choices)

    def add_to_(self, hidden: Tensor, norm: Tensor | None, epsilon: float) -> None:
        """Add to hidden states what it makes of them, normed if there is a norm."""
        logits = torch.empty(len(hidden), self.router.outputs, dtype=torch.float32, device=hidden.device)
        step_product(self.router, hidden, logits, norm=norm, epsilon=epsilon)
        choices = Choices.routed(logits, self.choices, self.to_one, self.experts.most_rows())
        self.experts.through(choices, hidden, hidden, norm, epsilon, add=True)


@dataclass(frozen=True)
class Choices:
    """The choices of some tokens, which are sorted by expert if asked to be."""

    chosen: Tensor
    """int64 [tokens, choices]."""
    shares: Tensor
    """float [tokens, choices]: what each expert's output is multiplied by."""
    experts: int
    rows: int
    """Of a group at most."""
    groups: Tensor
    """int32 [groups, 4]: expert, first of its places in `order`, how many."""
    order: Tensor
    """int32 [tokens * choices]: places in `chosen`."""
    ends: Tensor
    """int32 [experts]: of each expert's in `order`."""
    is_sorted: bool = False

    @classmethod
    def routed(cls, logits: Tensor, choices: int, to_one: bool, most_rows: int) -> Choices:
        """Return those of the largest logits, float32 [tokens, experts]; few of them are sorted, too."""
        tokens, experts = logits.shape
        chosen = torch.empty(tokens, choices, dtype=torch.int64, device=logits.device)
        found = cls.empty(chosen, logits.new_empty(tokens, choices), experts, most_rows)
        arguments = (logits, chosen, found.shares, *found._places(), tokens, len(found.groups))
        blocks = 1 if tokens <= ROUTED_ALONE else -(-tokens * 32 // THREADS)
        found._kernel("route", SHARED_OUT=to_one)((blocks, 1, 1), THREADS, arguments)
        return replace(found, is_sorted=blocks == 1)

    @classmethod
    def empty(cls, chosen: Tensor, shares: Tensor, experts: int, most_rows: int) -> Choices:
        """Return the given ones, for groups of up to `most_rows` rows."""
        rows = min(most_rows, 1 << (len(chosen) - 1).bit_length())
        groups = min(chosen.numel(), experts + chosen.numel() // rows)
        empty = partial(chosen.new_empty, dtype=torch.int32)
        return cls(chosen, shares, experts, rows, empty((groups, 4)), empty(chosen.numel()), empty(experts))

    def multiply(
        self, matrix: Matrix, x: Tensor, y: Tensor, *, gated: bool, norm: Tensor | None = None, epsilon: float = 0.0
    ) -> None:
        """Write a product of each choice: gated ones of its token's row of x, side by side as they are sorted,
        others of such rows, as they were chosen.
        """
        form, device, width = matrix.form, x.get_device(), self.chosen.shape[1]
        schedule, full = schedule_of(form, self.rows, gated), -(-self.chosen.numel() // self.rows)
        launch = launch_of(form, self.rows, norm is not None, False, gated, False, schedule, device, width, full)
        arrays = (matrix.weight, matrix.scales, matrix.offsets, matrix.bias, x, None, norm, epsilon, y)
        sizes = (matrix.outputs, self.rows, launch.second_half)
        grid = (launch.blocks, len(self.groups), 1)
        launch.kernel(grid, launch.threads, (*arrays, *sizes, self.groups, self.order), launch.shared_bytes)

    def sum_into_(self, total: Tensor, made: Tensor, add: bool) -> None:
        """Write each token's products times their shares into total, float [tokens, outputs], or add them."""
        vectors = total.shape[1] // 8
        arguments = (made, self.shares, self.chosen, total, vectors)
        kernel = self._kernel("weighted", RESIDUAL=add, BF16=total.dtype == torch.bfloat16)
        kernel((-(-vectors // 256), len(total), 1), 256, arguments)

    def sort_(self) -> None:
        """Sort them into groups of as many rows as an expert may have."""
        if not self.is_sorted:
            arguments = (self.chosen, *self._places(), self.chosen.numel(), len(self.groups))
            self._kernel("group")((1, 1, 1), THREADS, arguments)

    def _places(self) -> tuple[Tensor, ...]:
        return self.groups, self.order, self.ends

    def _kernel(self, name: str, **flags: bool) -> Kernel:
        numbers = {"EXPERTS": self.experts, "CHOICES": self.chosen.shape[1], "MOST": self.rows}
        macros = {**numbers, **flags, "WIDE": self.shares.dtype == torch.float32}
        return compiled("experts.cu", name, macros, self.chosen.get_device())


def why_not_stacked(mlp: nn.Module) -> str | None:
    """Return why the packed experts of a block's MLP cannot be `StackedExperts`, None if they can or if it has none."""
    direct = [child for child in mlp.children() if isinstance(child, Experts)]
    if len(direct) != len(experts_in(mlp)):
        return f"the packed experts of {type(mlp).__name__} lie deeper in it"
    for experts in direct:
        first, last = _layers(experts)
        if len(first) != 2 * len(last) or goes_through_gelu(_gate_alone(experts[0].gate)) is None:
            return "its experts have no gate of SiLU or GELU"
        for layers in (first, last):
            if reason := next((reason for layer in layers if (reason := why_not_matrix(layer, "an expert"))), None):
                return reason
            matrices = [matrix_of(layer) for layer in layers]
            if not can_stack(matrices) or matrices[0].outputs % ROWS:
                return "the experts of a block are quantized differently"
    return None


def with_stacked_experts_(mlp: nn.Module) -> nn.Module:
    """Return an MLP whose experts are `StackedExperts`, if their matrices lie one by one or are joined as those are.
    The given one keeps its own modules, which become views of them.
    """
    found = copy(mlp)
    found._modules = {name: child and _stacked_(child) for name, child in mlp._modules.items()}
    return found


def _stacked_(module: nn.Module) -> nn.Module:
    if not isinstance(module, Experts):
        return _joined(module)
    gelu = goes_through_gelu(_gate_alone(module[0].gate))
    wholes = stack_(_layers(module)[0], bool(gelu)), stack_(_layers(module)[1])
    torch.cuda.empty_cache()  # the matrices that were stacked are small, and memory of small ones holds no large one
    gate_up, down = (replace(whole, outputs=whole.outputs // len(module)) for whole in wholes)
    return StackedExperts(module, len(module), gate_up, down)


def _joined(module: nn.Module) -> nn.Module:
    known: Any = module
    if why_not_joined(module) or not known.has_gate or not HAS_GROUPED or known.down_proj.dtype == torch.float16:
        return module  # its own products of long prompts are ahead of those that are left
    gelu, wholes = goes_through_gelu(_gate_alone(known._apply_gate)), (known.gate_up_proj.data, known.down_proj.data)
    if gelu is None or any(size % ROWS for whole in wholes for size in whole.shape[1:]):
        return module
    gate_up, down = (Matrix(each.flatten(0, 1), each.shape[1], each.shape[2], each.dtype) for each in wholes)
    return StackedExperts(module, len(wholes[0]), replace(gate_up, gelu=gelu), down)


def _layers(experts: Any) -> tuple[list[Any], list[Any]]:
    """Return the first layers of all experts, gate and up by turns, and the last ones."""
    first = [expert.get_submodule(name) for expert in experts for name in expert.input_names]
    return first, [expert.get_submodule(expert.down_name) for expert in experts]


def _gate_alone(gate: Any) -> Callable[[Tensor], Tensor]:
    return lambda points: gate(torch.cat([points, torch.ones_like(points)], -1))


@cache
def _most_rows(form: Form, gated: bool, device: int) -> int:
    """Return the rows of a group that fit in the shared memory of a block."""
    properties: Any = torch.cuda.get_device_properties(device)
    limit = int(properties.shared_memory_per_block_optin)
    tiles = {rows: choose_tiles(form, rows, gated, limit, schedule_of(form, rows, gated)) for rows in (MOST_ROWS, 4, 2)}
    return next((rows for rows, found in tiles.items() if found.shared), 1)


def schedule_of(form: Form, rows: int, gated: bool) -> Schedule:
    """Return how a block goes over an expert; what is good on an H200."""
    tiles, blocks = 2 if gated else 1, 2 if form.bits == 16 else 4
    if form.chunks > 32:
        return Schedule(8, 2, tiles, 4, span=2)
    if form.chunks > 8:
        return Schedule(4, 2, tiles, *((blocks, 1) if rows == 1 else (2, 2)))
    return Schedule(-(-form.chunks // 2), 1, tiles, blocks, span=2)
