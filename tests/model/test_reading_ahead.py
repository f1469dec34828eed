"""The next block's weights are read while one is worked on, and are the same."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from optkit.errors import SourceError
from optkit.model import main_memory, reading_ahead
from optkit.model.checkpoint import Checkpoint
from optkit.model.reading_ahead import ReadAhead
from optkit.model.skeleton import Skeleton

TinyModel = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_memory, "pinned", lambda size: torch.empty(size, dtype=torch.uint8))


def test_what_was_read_ahead_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, reads = ReadAhead(), []

    def read(name: str) -> torch.Tensor:
        reads.append(name)
        return torch.full((2,), float(len(reads)))

    ahead.begin({"a": lambda: read("a")})
    assert ahead.take("a", lambda: read("late")).tolist() == [1, 1]
    assert ahead.take("a", lambda: read("again")).tolist() == [2, 2]
    assert reads == ["a", "again"]


def test_no_more_is_read_ahead_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_ahead, "AHEAD_BYTES", 10)
    ahead, reads = ReadAhead(), []

    def read(name: str) -> torch.Tensor:
        reads.append(name)
        return torch.zeros(1)

    def seen() -> str:
        ahead._threads.submit(lambda: None).result()
        return "".join(reads)

    ahead.begin({name: partial(read, name) for name in "abcde"}, dict(zip("abcde", (20, 5, 5, 5, 20), strict=True)))
    assert seen() == "a"
    ahead.take("a", partial(read, "A"))
    assert seen() == "abc"
    ahead.take("e", partial(read, "E"))  # out of turn: it is read at once, and not again
    for name in "bcd":
        ahead.take(name, partial(read, name.upper()))
    assert seen() == "abcEd"


def test_an_error_is_raised_where_the_tensor_is_needed() -> None:
    ahead = ReadAhead()

    def fail() -> torch.Tensor:
        raise SourceError("a.weight ends in the middle")

    ahead.begin({"a": fail})
    with pytest.raises(SourceError, match="ends in the middle"):
        ahead.take("a", fail)


@pytest.mark.parametrize("kind", ["llama", "zamba2"])
def test_blocks_in_order_are_read_ahead(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    begun: list[set[str]] = []
    begin = ReadAhead.begin
    monkeypatch.setattr(ReadAhead, "begin", lambda self, reads: (begun.append(set(reads)), begin(self, reads))[0])
    skeleton = Skeleton(Checkpoint(tiny_model(kind)))
    skeleton.read_first("cuda")
    inputs = skeleton.capture_inputs(torch.tensor([[5, 7]]), "cpu")
    embedding = skeleton.checkpoint.read("model.embed_tokens.weight")
    assert torch.equal(inputs.hidden[0], embedding[[5, 7]])
    assert begun.pop() > {"model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"}
    for block in skeleton.blocks:
        skeleton._read_next(block, "cuda")
        skeleton.load_(block.name, "cpu")
        for name, parameter in block.module.named_parameters(prefix=block.name):
            stored = skeleton.checkpoint.read(skeleton.tensor_name(name))
            assert torch.equal(parameter, stored), name
        skeleton.release_(block.name)
    assert len(begun) == len(skeleton.blocks) - 1
    last, first = skeleton.blocks[-1], skeleton.blocks[0]
    skeleton._read_next(last, "cuda")
    skeleton._read_next(first, "cuda")
    assert len(begun) == len(skeleton.blocks) - 1, "in another order nothing is read ahead"
