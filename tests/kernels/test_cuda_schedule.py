"""How optkit's CUDA kernels for matrices are launched: no block asks for more shared memory than
its GPU has.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from optkit.kernels.cuda import matrix
from optkit.kernels.cuda.schedule import (
    CHUNK,
    MOST_SHARED,
    SHARED_BYTES,
    Form,
    Tiles,
    choose_tiles,
    default_schedule,
    ordered_bytes,
    sums_bytes,
)

KIB = 1 << 10
LIMITS = {"8.0": 163 * KIB, "8.6": 99 * KIB, "8.9": 99 * KIB, "9.0": 227 * KIB, "10.0": 227 * KIB, "12.0": 99 * KIB}
"""Shared memory of a block by compute capability (CUDA C++ programming guide, technical
specifications).
"""
SHAPES = {  # outputs, inputs, gated
    "8B qkv": (6144, 4096, False),
    "8B o_proj": (4096, 4096, False),
    "8B gate_up": (28672, 4096, True),
    "8B down_proj": (4096, 14336, False),
    "8B lm_head": (128256, 4096, False),
    "70B qkv": (10240, 8192, False),
    "70B o_proj": (8192, 8192, False),
    "70B gate_up": (57344, 8192, True),
    "70B down_proj": (8192, 28672, False),
    "70B lm_head": (128256, 8192, False),
    "405B down_proj": (16384, 53248, False),
    "expert gate_up": (1536, 2048, True),
    "square gate_up": (4096, 4096, True),
}
ROWS = (*range(1, 9), 9, 16, 17, 32)


def form(name: str, bits: int = 4, group_size: int = 32) -> tuple[Form, bool]:
    outputs, inputs, gated = SHAPES[name]
    return Form(bits, outputs, inputs, torch.bfloat16, group_size, asymmetric=False), gated


def asked_for(shape: Form, rows: int, tiles: Tiles) -> int:
    """The shared memory that linear.cu takes, as its source says it: slots of weight, x and its
    sums where SHARED, two places of sums, [16, WARPS] floats and a barrier for each slot.
    """
    how, token_tiles = tiles.schedule, {1: 1, 2: 2}.get(-(-rows // 8), 4)
    chunks, groups = -(-shape.inputs // CHUNK), max(1, 128 // shape.group_size)
    row = how.span * 128 * shape.bits // 8 + 64
    slot = how.row_tiles * (how.span * (1024 + groups * 16 * 2) if shape.bits == 4 else 16 * row)
    sums = {4: chunks * groups, 8: 1, 16: 0}[shape.bits]
    x = rows * (chunks * 128 * (1 if shape.bits == 8 else 2) + 64) + sums * token_tiles * 8 * 4
    shares = 2 * 4 * how.row_tiles * rows * 16
    return (x if tiles.shared else 0) + how.warps * (how.depth * (slot + 8) + shares + 64)


@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("capability", LIMITS)
def test_no_launch_asks_for_more_than_the_gpu_has(capability: str, name: str, bits: int, group_size: int) -> None:
    shape, gated = form(name, bits, group_size)
    for rows in ROWS:
        tiles = choose_tiles(shape, rows, gated, LIMITS[capability])
        assert tiles.whole_bytes == asked_for(shape, rows, tiles) <= LIMITS[capability]
        usual = default_schedule(shape, rows, gated)
        chosen = tiles.schedule
        assert replace(chosen, depth=usual.depth, warps=usual.warps) == usual
        assert chosen.warps == usual.warps or chosen.depth == 1, "slots are given up first"
        one_more = Tiles(replace(chosen, depth=chosen.depth + 1), tiles.shared, 0)
        assert chosen == usual or chosen.warps < usual.warps or asked_for(shape, rows, one_more) > LIMITS[capability]
        assert not gated or tiles.schedule.row_tiles % 2 == 0, "a tile of either half"


@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_few_rows_lie_in_shared_memory_beside_a_slot_for_each_warp(name: str, bits: int, group_size: int) -> None:
    shape, gated = form(name, bits, group_size)
    for rows in ROWS:
        tiles = choose_tiles(shape, rows, gated, LIMITS["9.0"])
        least = Tiles(replace(default_schedule(shape, rows, gated), depth=1), True, 0)
        few = rows <= MOST_SHARED[bits] and rows * (shape.inputs + CHUNK + 32) * 2 <= SHARED_BYTES
        assert tiles.shared == (few and asked_for(shape, rows, least) <= LIMITS["9.0"])


@pytest.mark.parametrize(
    ("capability", "name", "shared_up_to"),
    [
        ("8.0", "8B down_proj", 3),  # 4 rows in shared memory would be 175,488 bytes of 166,912
        ("8.6", "8B down_proj", 1),
        ("8.9", "8B gate_up", 5),
        ("8.6", "70B down_proj", 0),
        ("8.0", "70B down_proj", 1),
        ("9.0", "8B down_proj", 5),
    ],
)
def test_x_lies_in_shared_memory_where_there_is_room(capability: str, name: str, shared_up_to: int) -> None:
    shape, gated = form(name)
    found = [choose_tiles(shape, rows, gated, LIMITS[capability]).shared for rows in range(1, 9)]
    assert found == [rows <= shared_up_to for rows in range(1, 9)]


def test_fewer_warps_are_taken_where_their_sums_have_no_room() -> None:
    shape, gated = form("8B gate_up")
    for limit in (16 * KIB, 24 * KIB, 48 * KIB):
        for rows in ROWS:
            tiles = choose_tiles(shape, rows, gated, limit)
            assert tiles.whole_bytes <= limit
    assert choose_tiles(shape, 32, gated, 48 * KIB).schedule.warps == 4


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0"])
def test_the_device_is_asked_how_much_it_has(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=LIMITS[capability], multi_processor_count=58)
    asked: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(matrix, "compiled", lambda source, name, macros, device: asked.update(macros))
    shape, gated = form("8B down_proj")
    launch = matrix.launch_of.__wrapped__(shape, 5, True, False, gated, False, None, 0)
    assert launch.shared == (capability == "9.0") == asked["SHARED"] == asked["NORM"]
    assert launch.shared_bytes == choose_tiles(shape, 5, gated, LIMITS[capability]).shared_bytes
    assert (launch.threads, asked["WARPS"]) == (512, 16)


def test_the_buffer_of_x_in_order_holds_x_and_its_sums() -> None:
    shape, _ = form("8B down_proj")
    assert ordered_bytes(shape, 9) == 16 * 14336 * 2
    assert sums_bytes(shape, 9) == 16 * 14336 // 32 * 4
    assert sums_bytes(form("8B down_proj", bits=16)[0], 9) == 0
    coded, _ = form("8B down_proj", bits=8)
    assert (ordered_bytes(coded, 9), sums_bytes(coded, 9)) == (16 * 14336, 16 * 4)
