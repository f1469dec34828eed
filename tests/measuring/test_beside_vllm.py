"""The benchmark beside vLLM: what it makes of a trace."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
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


class Engine:
    """Gives each prompt's last token, the last prompt first."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def add_request(self, name: str, prompt: dict[str, Any], wanted: Any) -> None:
        self.asked.append((name, prompt))

    def has_unfinished_requests(self) -> bool:
        return bool(self.asked)

    def step(self) -> list[Any]:
        name, prompt = self.asked.pop()
        return [SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=prompt["prompt_token_ids"][-1:])])]


def test_the_second_engine_says_how_many_tokens_are_the_firsts(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))  # type: ignore[arg-type]
    prompts = script.prompts_for(1000, 12)
    assert prompts[:3] == script.prompts_for(1000, 3)
    found = script.first_tokens(Engine(), prompts)
    assert found == [prompt[-1] for prompt in prompts]
    script.compare_tokens(tmp_path, "vllm", found)
    assert capsys.readouterr().out == ""
    script.compare_tokens(tmp_path, "optkit", [found[0] + 1, *found[1:], 7])
    assert capsys.readouterr().out == f"| optkit | {tmp_path.name} | first tokens as vllm's | 11 of 12 |\n"
