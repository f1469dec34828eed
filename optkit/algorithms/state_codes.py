"""Codes of keys and values: float [..., tokens, head_dim] and back, each token by itself.

Integers have one scale and one zero point for a token's head or for groups of its channels, as the
values of KIVI (arXiv:2402.02750). Keys are coded the same way, not per channel as there. A token
never waits for those after it, so prompt and decode steps see the same codes. float8 has one scale
for a whole layer, as vLLM's cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from optkit.algorithms.grid import Grid, minmax_scales, round_to_nearest
from optkit.algorithms.packing import from_bytes, in_bytes

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max


class StateCode(Protocol):
    """How the keys, or the values, of a layer are coded."""

    def encode(self, states: Tensor) -> tuple[Tensor, ...]:
        """float [..., tokens, head_dim] -> tensors [..., tokens, n], to be joined along the tokens."""

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return float [..., tokens, head_dim] in a dtype."""


@dataclass(frozen=True)
class PlainCode:
    """The states themselves."""

    def encode(self, states: Tensor) -> tuple[Tensor, ...]:
        return (states,)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)


@dataclass(frozen=True)
class IntegerCode:
    """Codes of 4 or 8 bits with a scale and a zero point for each group of channels.
    Two codes of 4 bits share a byte.
    """

    bits: int
    group_size: int | None
    """Channels of a head that share a scale; None: all of them. It divides head_dim, which is even
    if codes have 4 bits.
    """

    def encode(self, states: Tensor) -> tuple[Tensor, ...]:
        """float [..., tokens, head_dim] -> uint8 codes, scales and uint8 zero points.
        Scales are bfloat16 for bfloat16, else float16.
        """
        tokens, size = states.shape[:-1], states.shape[-1]
        stored = torch.bfloat16 if states.dtype == torch.bfloat16 else torch.float16
        grid = Grid(self.bits, self.group_size, False, stored)
        flat = states.float().reshape(-1, size)
        rounded = round_to_nearest(flat, *minmax_scales(flat, grid), grid)
        codes = in_bytes(rounded.codes, self.bits)
        return codes.view(*tokens, -1), rounded.scales.to(stored).view(*tokens, -1), rounded.zeros.view(*tokens, -1)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return float [..., tokens, head_dim], `(code - zero) * scale`."""
        codes, scales, zeros = parts
        if self.bits == 4:
            codes = from_bytes(codes, 4, 2 * codes.shape[-1])
        steps = codes.view(*scales.shape, -1).to(dtype) - zeros.to(dtype).unsqueeze(-1)
        return steps.mul_(scales.to(dtype).unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class Float8Code:
    """E4M3 numbers of 8 bits times one scale; what is larger than 448 scales is cut."""

    scale: float = 1.0

    def encode(self, states: Tensor) -> tuple[Tensor, ...]:
        """float [..., tokens, head_dim] -> uint8 of the same shape, the bits of the float8 numbers."""
        return ((states.float() / self.scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8).view(torch.uint8),)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return float [..., tokens, head_dim]."""
        return parts[0].view(FLOAT8).to(dtype) * self.scale
