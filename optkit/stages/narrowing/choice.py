"""Which channels and heads of a block are left, by what they add to outputs on a text.
The outputs are those of the layers that read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from optkit.algorithms.hessian import Hessian
from optkit.algorithms.importance import channel_energy, compensated, head_energy, highest
from optkit.model.blocks import BlockInputs
from optkit.model.narrowing import Left
from optkit.model.skeleton import Projection, Skeleton
from optkit.model.together import Together
from optkit.model.width import Axis, Role, Widths
from optkit.stages.quantizing.hessians import S, finite_matrix, watch_inputs


class _Squares:
    """Sums the squares of each input, every token divided by its root mean square."""

    def __init__(self, inputs: Tensor) -> None:
        self.tokens = 0
        self.total: Tensor = torch.zeros(inputs.shape[-1], device=inputs.device)

    def add(self, inputs: Tensor) -> None:
        rows = inputs.flatten(0, -2).float()
        scale = rows.square().mean(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        self.tokens += len(rows)
        self.total += (rows.square() / scale).sum(0)

    def add_up_(self, together: Together, tokens: int) -> None:
        self.tokens = tokens
        together.sum_(self.total)


@dataclass(frozen=True, eq=False)
class Reader:
    """A layer whose inputs become fewer, and what they were on the text."""

    name: str
    module: Projection
    role: Role
    """Of its inputs."""
    matrix: Tensor
    """Mean of x x^T, float32 [in, in]."""

    @property
    def weight(self) -> Tensor:
        """float [out, in]."""
        return _weight(self.module)

    def making_up(self, left: Left) -> Tensor | None:
        """Return the weight that makes up for what was removed, 0 there; None if nothing was.
        It is float32 as the checkpoint stores it.
        """
        kept = left.channels(self.role)
        if kept is None:
            return None
        places = kept.to(self.matrix.device)
        made = torch.zeros(self.weight.shape, device=places.device)
        made[:, places] = compensated(self.weight, self.matrix, places)
        return made.T if isinstance(self.module, Conv1D) else made


@dataclass
class WidthChooser:
    """Chooses for one loaded block after another."""

    skeleton: Skeleton
    inputs: BlockInputs | None
    """What the text becomes in front of the next block; None if nothing is chosen by a text."""
    axes: Mapping[str, tuple[Axis, ...] | None]
    """Of each tensor of the checkpoint."""
    before: Widths
    after: Widths
    pooling: bool
    """Heads of keys and values become means of their neighbours; else the ones that matter least
    go, with the queries that read them.
    """

    def hidden(self, blocks: Sequence[int], device: str) -> Tensor:
        """Return the hidden channels that matter most, int64 [hidden], over all blocks.
        This takes the hidden states through the blocks.

        A channel counts by its share of what the layers that read a norm make of it, and all these
        layers count the same.
        """
        total = torch.zeros(self.before.hidden)
        for index in blocks:
            self.skeleton.load_(self.skeleton.blocks[index].name, device)
            readers = self._readers(index, Role.HIDDEN)
            for name, squares in self._watch(index, readers, _Squares).items():
                energy = squares.total * _weight(readers[name]).float().square().sum(0)
                total += (energy / energy.sum()).cpu()
            if self.inputs:
                self.skeleton.advance_(index, self.inputs)
            self.skeleton.release_(self.skeleton.blocks[index].name)
        return highest(total, self.after.hidden)

    def choose(self, index: int, hidden: Tensor | None) -> tuple[Left, list[Reader]]:
        """Return what is left of a block, and the layers that read what was chosen among."""
        before, after = self.before, self.after
        wanted = [Role.FFN] if after.ffn != before.ffn else []
        if after.heads != before.heads or (after.key_heads != before.key_heads and not self.pooling):
            wanted.append(Role.QUERY)
        layers = {name: (module, role) for role in wanted for name, module in self._readers(index, role).items()}
        hessians = self._watch(index, {name: module for name, (module, _) in layers.items()}, _hessian)
        readers = [
            Reader(name, *layers[name], finite_matrix(hessian, name, self.skeleton))
            for name, hessian in hessians.items()
        ]
        ffn, energies = None, torch.zeros(before.heads)
        for reader in readers:
            if reader.role is Role.FFN:
                ffn = highest(channel_energy(reader.weight, reader.matrix), after.ffn).cpu()
            else:
                energies = head_energy(reader.weight, reader.matrix, before.head_size).cpu()
        heads, pools = left_heads(energies, before, after, self.pooling)
        return Left(before, after, hidden, ffn, heads, pools), readers

    def _watch(self, index: int, layers: Mapping[str, nn.Module], start: Callable[[Tensor], S]) -> dict[str, S]:
        return watch_inputs(self.skeleton, index, self.inputs, layers, start) if self.inputs else {}

    def _readers(self, index: int, role: Role) -> dict[str, Projection]:
        """Return the layers of a block whose inputs are of one role."""
        found = {}
        for name, module in self.skeleton.linears(self.skeleton.blocks[index]).items():
            axes = self.axes[f"{name}.weight"]
            if axes and axes[0 if isinstance(module, Conv1D) else 1] == (role,):
                found[name] = module
        return found


def left_heads(
    energies: Tensor, before: Widths, after: Widths, pooling: bool
) -> tuple[tuple[int, ...] | None, tuple[tuple[int, ...], ...] | None]:
    """Return the heads of the queries that are left.
    For each head of keys and values that is left it returns those that it is the mean of.

    energies: float32 [heads], of the queries. Every head of keys and values that is left has
    equally many queries.
    """
    if (before.heads, before.key_heads) == (after.heads, after.key_heads):
        return None, None
    shared, left = before.heads // before.key_heads, after.heads // after.key_heads
    groups: list[tuple[int, ...]] = [(group,) for group in range(before.key_heads)]
    if pooling:
        size = before.key_heads // after.key_heads
        groups = [tuple(range(start, start + size)) for start in range(0, before.key_heads, size)]
    else:
        best = highest(energies.view(before.key_heads, shared).sum(1), after.key_heads)
        groups = [groups[place] for place in best.tolist()]
    heads, pools = [], []
    for group in groups:
        queries = torch.tensor([group_head * shared + query for group_head in group for query in range(shared)])
        chosen = queries[highest(energies[queries], left)].tolist()
        heads += chosen
        pools.append(tuple(sorted({query // shared for query in chosen})))
    return tuple(heads), tuple(pools)


def _hessian(inputs: Tensor) -> Hessian:
    return Hessian(inputs.shape[-1], inputs.device)


def _weight(module: Projection) -> Tensor:
    """Return a layer's weight, float [out, in]."""
    return module.weight.T if isinstance(module, Conv1D) else module.weight
