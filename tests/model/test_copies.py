"""What is made on a GPU is copied while more is made; its order and its numbers stay."""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from optkit.model import copies
from optkit.model.copies import by_pieces, in_main_memory
from optkit.model.kept_blocks import KeptBlocks
from optkit.progress import SilentProgress, SilentTask


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def plain(number: int) -> Tensor:
    return torch.full((4,), float(number))


def late(number: int) -> Tensor:
    return plain(number).as_subclass(OnGpu)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([plain, plain, plain], "made 0, got 0, made 1, got 1, made 2, got 2"),
        ([late, late, late, late], "made 0, made 1, made 2, got 0, made 3, got 1, got 2, got 3"),
        ([late, plain, late], "made 0, made 1, got 0, got 1, made 2, got 2"),
    ],
)
def test_only_what_a_gpu_makes_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, kinds: list[Callable[[int], Tensor]], expected: str
) -> None:
    monkeypatch.setattr(copies, "beside_computing", lambda tensor: nullcontext())
    monkeypatch.setattr(copies, "own_copy", lambda tensor: tensor.as_subclass(Tensor).clone())
    monkeypatch.setattr(copies, "AHEAD_BYTES", 40)
    events = []

    def made() -> Iterator[tuple[str, Tensor]]:
        for number, kind in enumerate(kinds):
            events.append(f"made {number}")
            yield str(number), kind(number)

    for name, tensor in in_main_memory(made()):
        events.append(f"got {name}")
        assert tensor.tolist() == [float(name)] * 4
    assert ", ".join(events) == expected


@pytest.mark.parametrize("shape", [(7, 9), (0, 4), (5,), (), (600, 900)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    monkeypatch.setattr(copies, "PASSED_BYTES", 40 if math.prod(shape) < 100 else 1 << 16)
    monkeypatch.setattr(copies, "pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = by_pieces(given)
    assert found.dtype == dtype
    assert torch.equal(found.float(), given.float())
    assert found.untyped_storage().nbytes() == given.nbytes


def test_a_block_goes_before_the_next_one_is_made() -> None:
    kept = KeptBlocks(None, "cpu", SilentProgress(), "awq", 0)

    def produced() -> Iterator[dict[str, Tensor]]:
        for number in range(3):
            block = {"weight": plain(number)}
            made = weakref.ref(block["weight"])
            yield block
            del block
            kept._writer.submit(int).result()  # behind the thread's copies
            assert not made()

    assert [float(each["weight"][0]) for each in kept.each(produced(), SilentTask())] == [0, 1, 2]
