"""How a launch of `linear.cu` goes over a matrix, by its shape, x's rows and shared memory.

Needs no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

ROWS = 16
"""Outputs of a tile."""
CHUNK = 128
"""Inputs of a tile."""
MOST_TOKENS = 32
"""That `multiply` takes at once."""
SHARED_BYTES = 160 << 10
"""Of a block, that x takes at most: two blocks do not fit then."""


@dataclass(frozen=True)
class Schedule:
    """How a block goes over its part of a matrix."""

    warps: int
    """That share the inputs of a row of tiles."""
    depth: int
    """Chunks that a warp has asked for before it needs them."""
    row_tiles: int
    """Tiles of 16 outputs that a warp multiplies by the same x; pairs of them if outputs are gated."""
    blocks: int
    """On each multiprocessor; each goes over several rows of tiles."""


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for."""

    bits: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    group_size: int
    asymmetric: bool
    integer: bool = False
    """8 bits: integers, not E4M3."""
    gelu: bool = False
    """Gated outputs go through GELU (tanh), not SiLU."""

    @property
    def x_bytes(self) -> int:
        """Of an input as it is multiplied."""
        return 1 if self.bits == 8 else 2

    @property
    def tiles(self) -> int:
        return -(-self.outputs // ROWS)

    @property
    def chunks(self) -> int:
        return -(-self.inputs // CHUNK)

    def macros(self, token_tiles: int = 1, row_tiles: int = 1, warps: int = 8, depth: int = 1) -> dict[str, str]:
        """Return the macros of linear.cu."""
        numbers = {
            **{"BITS": self.bits, "INPUTS": self.inputs, "GROUP": self.group_size},
            **{"TOKEN_TILES": token_tiles, "ROW_TILES": row_tiles, "WARPS": warps, "DEPTH": depth},
        }
        flags = {
            "BF16": self.dtype == torch.bfloat16,
            "ASYMMETRIC": self.asymmetric,
            "INTEGER": self.integer,
            "GELU": self.gelu,
        }
        return {name: str(number) for name, number in numbers.items()} | {name: "1" for name, on in flags.items() if on}


@dataclass(frozen=True)
class Tiles:
    """How a launch goes over a matrix, and where x lies meanwhile."""

    schedule: Schedule
    shared: bool
    """x goes through shared memory, if it can be normed on its way; else it is put in order in
    global memory first.
    """
    shared_bytes: int
    """Dynamic shared memory of a block."""

    @property
    def whole_bytes(self) -> int:
        """All shared memory of a block: a float32 for each warp is static."""
        return self.shared_bytes + 4 * self.schedule.warps


def choose_tiles(form: Form, tokens: int, gated: bool, limit: int, schedule: Schedule | None = None) -> Tiles:
    """Return how `tokens` rows of x (at most MOST_TOKENS) are multiplied.
    Blocks of the GPU have `limit` bytes of shared memory.

    x lies in shared memory if it fits beside what the warps add up, in global memory else; there
    half as many warps are taken until they fit. One warp needs 8 KiB at most, so every GPU has
    room.
    """
    chosen = schedule or default_schedule(form, tokens, gated)
    x_bytes = tokens * (form.chunks * CHUNK * form.x_bytes + 64) + sums_bytes(form, tokens)
    if tokens <= 8 and tokens * ((form.inputs + CHUNK) * form.x_bytes + 64) <= SHARED_BYTES:
        tiles = Tiles(chosen, True, x_bytes + _added_bytes(chosen, tokens))
        if tiles.whole_bytes <= limit:
            return tiles
    while (tiles := Tiles(chosen, False, _added_bytes(chosen, tokens))).whole_bytes > limit and chosen.warps > 1:
        chosen = replace(chosen, warps=chosen.warps // 2)
    return tiles


def default_schedule(form: Form, tokens: int, gated: bool) -> Schedule:
    """Return what is good on an H200 for matrices of thousands of inputs."""
    few, quantized = tokens <= 8, form.bits == 4
    wide, narrow, long = form.outputs > 16 * form.inputs, form.outputs <= form.inputs, form.inputs > 2 * form.outputs
    if form.bits == 8 and not wide:
        square = few and narrow and not long and not gated
        if few and long and not gated:
            return Schedule(warps=8, depth=7, row_tiles=1, blocks=1)
        depth = 4 if few and not square and not gated else 2
        return Schedule(warps=8, depth=depth, row_tiles=1 if square else 2, blocks=2 if square else 1)
    if not few:
        return Schedule(warps=8, depth=1 if gated or wide else 2, row_tiles=2, blocks=1 if gated else 3)
    if gated:
        return (
            Schedule(warps=16, depth=2, row_tiles=2, blocks=1)
            if quantized
            else Schedule(warps=8, depth=2, row_tiles=2, blocks=4)
        )
    if long:
        return Schedule(warps=16 if quantized else 8, depth=4 if quantized else 7, row_tiles=1, blocks=1)
    if wide:
        return (
            Schedule(warps=8, depth=2, row_tiles=1, blocks=1)
            if form.bits == 16
            else Schedule(warps=4, depth=4, row_tiles=1, blocks=4)
        )
    if quantized:
        return Schedule(warps=16 if narrow else 8, depth=2, row_tiles=1, blocks=2 if narrow else 3)
    return Schedule(warps=8, depth=4, row_tiles=1, blocks=1)


def ordered_bytes(form: Form, tokens: int) -> int:
    """Return the bytes of x in the order in which the kernel reads it."""
    return token_tiles(tokens) * 8 * form.chunks * CHUNK * form.x_bytes


def sums_bytes(form: Form, tokens: int) -> int:
    """Return the bytes of a float32 for each token and, of 4 bits, each group of inputs, no more than a chunk."""
    places = {4: form.chunks * max(1, CHUNK // form.group_size), 8: 1, 16: 0}[form.bits]
    return places * token_tiles(tokens) * 8 * 4


def token_tiles(tokens: int) -> int:
    """Return the tiles of 8 tokens that a kernel is compiled for: 1, 2 or 4."""
    tiles = -(-tokens // 8)
    return tiles if tiles < 3 else 4


def _added_bytes(schedule: Schedule, tokens: int) -> int:
    """Return the bytes of the warps' sums, in two places in turns."""
    return 2 * schedule.warps * schedule.row_tiles * token_tiles(tokens) * 8 * ROWS * 4
