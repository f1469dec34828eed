"""Torch's compiler with its `eager` backend, which takes graphs and runs them as they are: breaks
and counts are the same.
"""

import logging
from collections.abc import Iterator

import pytest
import torch

from optkit.errors import StageError
from optkit.session import compile_watch
from optkit.session.compile_watch import BREAKS, CompileWatch


def broken(values: torch.Tensor) -> torch.Tensor:
    sines = values.sin()
    torch._dynamo.graph_break()
    return sines.cos()


@pytest.fixture
def watch() -> Iterator[CompileWatch]:
    torch.compiler.reset()
    watch = CompileWatch()
    yield watch
    watch.close()
    torch.compiler.reset()


def test_a_whole_graph(watch: CompileWatch) -> None:
    assert list(watch.notes()) == []
    torch.compile(lambda values: values.sin() + 1, backend="eager")(torch.ones(3))
    graphs, breaks = watch.notes()
    assert graphs.startswith("compile: 1 graph in ")
    assert graphs.endswith(" s, outside the timings")
    assert breaks == "compile: no graph breaks"


def test_breaks_are_counted_with_their_lines(watch: CompileWatch, capfd: pytest.CaptureFixture[str]) -> None:
    compiled = torch.compile(broken, backend="eager", dynamic=False)
    for length in (2, 3):
        compiled(torch.ones(length))
    graphs, breaks = watch.notes()
    line = broken.__code__.co_firstlineno + 2
    assert graphs.startswith("compile: 4 graphs in ")
    place = f"test_compile_watch.py:{line} (Call to `torch._dynamo.graph_break()`) 2 times"
    assert breaks == f"compile: 2 graph breaks, each of which ends a graph and goes back to Python: {place}"
    assert "Graph break" not in "".join(capfd.readouterr())


def test_only_its_own_time_is_listened_to() -> None:
    torch.compile(broken, backend="eager")(torch.ones(2))
    log = logging.getLogger(BREAKS)
    before = log.level, log.propagate, len(log.handlers)
    watch = CompileWatch()
    assert list(watch.notes()) == []
    watch.close()
    assert (log.level, log.propagate, len(log.handlers)) == before


def test_many_breaks_are_cut(watch: CompileWatch) -> None:
    torch.compile(lambda values: values + 1, backend="eager")(torch.ones(2))
    watch._listener.breaks.update({f"a.py:{line} (why)": 1 for line in range(7)})
    assert list(watch.notes())[1].endswith("a.py:4 (why), and 2 other places")


def test_what_an_earlier_process_left_is_told(watch: CompileWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compile_watch, "_state", lambda: (watch._started[0] + 3, watch._started[1] + 1.25, watch._started[2] + 2)
    )
    assert (
        next(watch.notes()) == "compile: 3 graphs in 1.2 s, outside the timings, "
        "2 of them from the cache of an earlier process"
    )


def test_a_break_where_none_is_allowed() -> None:
    line = broken.__code__.co_firstlineno + 2
    message = (
        rf"^compile: the decode step is not one graph: it breaks at test_compile_watch\.py:{line}\. "
        r"Call to .*Set fullgraph: false"
    )
    with pytest.raises(StageError, match=message), CompileWatch.errors():
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(2))
    torch.compiler.reset()
