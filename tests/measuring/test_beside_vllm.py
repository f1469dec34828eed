"""The benchmark beside vLLM: what it makes of a trace."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("beside_vllm")


def event(name: str, begin: float, length: float, launch: int) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": length, "args": {"correlation": launch}}


def test_a_step_is_a_graph_and_what_follows_it(script: ModuleType, tmp_path: Path) -> None:
    """Ten kernels of 6 µs, each of which begins 1 µs before the one before it ends, then one of 9."""
    trace = [event("prompt", each, 0.5, 99) for each in range(-40, -1)]
    for step in range(6):
        trace += [event("linear", 100 * step + 5 * each, 6, step) for each in range(10)]
        trace.append(event("choose", 100 * step + 60, 9, 200 + step))
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*reversed(trace), {"name": "no kernel"}]}))
    found = script.steps(tmp_path / "trace.json")
    assert found["longest"] == [("linear", pytest.approx(60)), ("choose", pytest.approx(9))]
    assert (found["kernels"], found["busy_us"], found["span_us"]) == (11, 51 + 9, 100)


def test_a_trace_without_graphs_is_no_row(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = [event("linear", each, 1, each) for each in range(20)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": trace}))
    script.kernel_row("int4", "vllm", 1, tmp_path / "trace.json")
    assert capsys.readouterr().out == "vllm int4 1: 20 events, 20 launches, graphs of {} kernels\n"
