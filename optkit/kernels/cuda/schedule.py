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
MOST_SHARED = {4: 6, 8: 6, 16: 8}
"""Rows of x that go through shared memory at most, by the bits of a weight: each block norms and orders all
of them. With another schedule than the default it is 8.
"""


@dataclass(frozen=True)
class Schedule:
    """How a block goes over its part of a matrix."""

    warps: int
    """That share the inputs of a row of tiles."""
    depth: int
    """Slots in shared memory that a warp has asked for before it needs them."""
    row_tiles: int
    """Tiles of 16 outputs that a warp multiplies by the same x; pairs of them if outputs are gated."""
    blocks: int
    """On each multiprocessor; each goes over several rows of tiles."""
    span: int = 1
    """Chunks in a slot, side by side."""


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

    def slot_bytes(self, schedule: Schedule) -> int:
        """Return the shared memory of a slot: of 4 bits with scales and offsets, else rows 64 bytes apart."""
        if self.bits == 4:
            scale_bytes = 32 * max(1, CHUNK // self.group_size) * (1 + self.asymmetric)
            return schedule.row_tiles * schedule.span * (CHUNK * ROWS // 2 + scale_bytes)
        return schedule.row_tiles * ROWS * (schedule.span * CHUNK * self.bits // 8 + 64)

    def macros(self, token_tiles: int = 1, schedule: Schedule | None = None) -> dict[str, int]:
        """Return the macros of linear.cu."""
        how = schedule or Schedule(8, 1, 1, 1)
        return {
            **{"BITS": self.bits, "INPUTS": self.inputs, "GROUP": self.group_size, "TOKEN_TILES": token_tiles},
            **{"ROW_TILES": how.row_tiles, "WARPS": how.warps, "DEPTH": how.depth, "SPAN": how.span},
            **{"ASYMMETRIC": self.asymmetric, "INTEGER": self.integer, "GELU": self.gelu},
            "BF16": self.dtype == torch.bfloat16,
        }


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
        """All shared memory of a block: 16 float32 for each warp are static, and a barrier for each slot."""
        return self.shared_bytes + (4 * 16 + 8 * self.schedule.depth) * self.schedule.warps


def choose_tiles(form: Form, tokens: int, gated: bool, limit: int, schedule: Schedule | None = None) -> Tiles:
    """Return how `tokens` rows of x (at most MOST_TOKENS) are multiplied.
    Blocks of the GPU have `limit` bytes of shared memory.

    x lies in shared memory if it fits beside a slot for each warp and what the warps add up, in
    global memory else. Slots are given up one by one until they fit, then half of the warps. One
    warp needs 25 KiB at most, so every GPU has room.
    """
    chosen = schedule or default_schedule(form, tokens, gated)
    few = (
        tokens <= (8 if schedule else MOST_SHARED[form.bits])
        and tokens * ((form.inputs + CHUNK) * form.x_bytes + 64) <= SHARED_BYTES
    )
    fewer = [replace(chosen, depth=depth) for depth in range(chosen.depth, 0, -1)]
    fewer += [replace(fewer[-1], warps=chosen.warps >> halved) for halved in range(1, chosen.warps.bit_length())]
    x_bytes = tokens * (form.chunks * CHUNK * form.x_bytes + 64) + sums_bytes(form, tokens)
    kept = [(each, True) for each in fewer if few and each.warps == chosen.warps] + [(each, False) for each in fewer]
    tiles = [Tiles(each, x, _slots_bytes(form, each) + _added_bytes(each, tokens) + x * x_bytes) for each, x in kept]
    return next(found for found in tiles if found.whole_bytes <= limit)


def default_schedule(form: Form, tokens: int, gated: bool) -> Schedule:
    """Return what is good on an H200 for matrices of thousands of inputs."""
    kinds = {
        "gated": gated,
        "long": form.inputs > 2 * form.outputs,
        "wide": form.outputs > 16 * form.inputs,
        "narrow": form.outputs <= form.inputs,
    }
    found = SCHEDULES[form.bits, tokens <= 8]
    return found.get(next((kind for kind, fits in kinds.items() if fits), "usual"), found["usual"])


SCHEDULES = {
    (4, True): {
        "gated": Schedule(8, 2, 2, 2, span=2),
        "long": Schedule(16, 3, 1, 1, span=2),
        "wide": Schedule(8, 2, 2, 2, span=2),
        "narrow": Schedule(16, 1, 2, 1, span=2),
        "usual": Schedule(8, 2, 1, 1, span=4),
    },
    (8, True): {
        "gated": Schedule(8, 3, 2, 1),
        "long": Schedule(8, 3, 1, 1, span=2),
        "narrow": Schedule(8, 2, 2, 1, span=2),
        "usual": Schedule(8, 2, 1, 2, span=2),
    },
    (16, True): {
        "gated": Schedule(8, 2, 2, 1),
        "long": Schedule(16, 2, 1, 1),
        "wide": Schedule(16, 1, 1, 1, span=2),
        "narrow": Schedule(8, 2, 2, 1),
        "usual": Schedule(8, 3, 1, 1),
    },
    (4, False): {"gated": Schedule(8, 3, 2, 2), "long": Schedule(8, 2, 2, 1, span=2), "usual": Schedule(8, 2, 2, 2)},
    (8, False): {"gated": Schedule(8, 3, 2, 1), "long": Schedule(8, 3, 2, 1), "usual": Schedule(8, 2, 1, 2, span=2)},
    (16, False): {
        "gated": Schedule(16, 1, 2, 1),
        "long": Schedule(16, 1, 2, 1),
        "wide": Schedule(8, 1, 2, 2),
        "usual": Schedule(8, 2, 2, 1),
    },
}
"""By the bits of a weight, whether tokens are few, and what a matrix is like."""


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
    return 2 * schedule.warps * schedule.row_tiles * tokens * ROWS * 4


def _slots_bytes(form: Form, schedule: Schedule) -> int:
    """Return the bytes of the weight on its way to a block."""
    return schedule.warps * schedule.depth * form.slot_bytes(schedule)
