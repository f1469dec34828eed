"""Take the channels and heads that are left out of a tensor, and put them back to where they were."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from optkit.model.width import LINEARS, Axis, Role, Widths, changing


@dataclass(frozen=True)
class Left:
    """What is left of a block; None if that is everything."""

    before: Widths
    after: Widths
    hidden: Tensor | None = None
    """int64: channels of the hidden states."""
    ffn: Tensor | None = None
    """int64: channels inside of the feed-forward layers."""
    heads: tuple[int, ...] | None = None
    """Of the queries."""
    pools: tuple[tuple[int, ...], ...] | None = None
    """For each head of the keys and values, those that it is the mean of (arXiv:2305.13245, section
    2.1).
    """

    def touches(self, axes: tuple[Axis, ...]) -> bool:
        """Whether a tensor with these axes changes."""
        roles = changing(self.before, self.after)
        return any(role in roles for axis in axes for role in axis)

    def narrow(self, tensor: Tensor, axes: tuple[Axis, ...]) -> Tensor:
        """Return what is left of a tensor, in its dtype; float32 if it is a mean of heads."""
        for dim, axis in enumerate(axes):
            if self.touches((axis,)):
                parts = tensor.split([self.before.size(role) for role in axis], dim)
                tensor = torch.cat([self._select(part, dim, role) for part, role in zip(parts, axis, strict=True)], dim)
        return tensor

    def spread(self, narrowed: Tensor, axes: tuple[Axis, ...]) -> Tensor:
        """Return what is left in the shape that the tensor had.
        0 stands for what was removed, and pooled heads are as often there as they were.
        """
        for dim, axis in enumerate(axes):
            if self.touches((axis,)):
                parts = narrowed.split([self.after.size(role) for role in axis], dim)
                narrowed = torch.cat(
                    [self._place(part, dim, role) for part, role in zip(parts, axis, strict=True)], dim
                )
        return narrowed

    def norm_weight(self, weight: Tensor) -> Tensor:
        """Return the weight of an RMS norm of the hidden states that are left, float32.

        Their mean square is taken over fewer channels, which makes it larger if the others were
        small; the weight makes up for that.
        """
        if self.hidden is None:
            return weight
        return weight[self.hidden.to(weight.device)].float() * self._growth

    def whole_norm(self, narrowed: Tensor) -> Tensor:
        """Return the weight that all channels need for what `norm_weight` left, as it was rounded: 0 for the others."""
        return self.spread(narrowed.float() / self._growth, ((Role.HIDDEN,),))

    @property
    def _growth(self) -> float:
        return sqrt(self.before.hidden / self.after.hidden)

    def channels(self, role: Role) -> Tensor | None:
        """Return the places that are kept along an axis, int64; None if they all are."""
        if role is Role.QUERY and self.heads is not None:
            size = self.before.head_size
            return (torch.tensor(self.heads)[:, None] * size + torch.arange(size)).flatten()
        return {Role.HIDDEN: self.hidden, Role.FFN: self.ffn}.get(role)

    def _select(self, part: Tensor, dim: int, role: Role) -> Tensor:
        if role is Role.KEY and self.pools is not None:
            heads = part.unflatten(dim, (self.before.key_heads, self.before.head_size))
            pooled = [
                heads.index_select(dim, torch.tensor(pool, device=part.device)).float().mean(dim) for pool in self.pools
            ]
            return torch.cat(pooled, dim)
        kept = self.channels(role)
        return part if kept is None else part.index_select(dim, kept.to(part.device))

    def _place(self, part: Tensor, dim: int, role: Role) -> Tensor:
        shape = list(part.shape)
        shape[dim] = self.before.size(role)
        if role is Role.KEY and self.pools is not None:
            heads = part.unflatten(dim, (self.after.key_heads, self.after.head_size))
            full = part.new_zeros(shape).unflatten(dim, (self.before.key_heads, self.before.head_size))
            for place, pool in enumerate(self.pools):
                for head in pool:
                    full.select(dim, head).copy_(heads.select(dim, place))
            flat: Tensor = full.flatten(dim, dim + 1)
            return flat
        kept = self.channels(role)
        return part if kept is None else part.new_zeros(shape).index_copy_(dim, kept.to(part.device), part)


def is_norm(name: str) -> bool:
    """Whether a tensor that is as long as the hidden states is a norm's weight, and not a bias."""
    module = name.rpartition(".")[0]
    return module.rpartition(".")[2] not in LINEARS and ".".join(module.rsplit(".", 2)[-2:]) not in LINEARS
