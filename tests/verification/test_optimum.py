"""optimum's ORTModel classes as an engine of `optkit verify`: whose Python is asked, what it
answers, and what is not for it.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optkit.backends.environments import Environments
from optkit.progress import SilentProgress
from optkit.verification import verify
from optkit.verification.engines import OPTIMUM, Answer, ask, interpreter
from optkit.verification.verify import verify_artifact
from optkit.verification.workers.open_in_optimum import inputs_of, is_cache, missing, other_cache, strange_input
from tests.conftest import TinyModel
from tests.support.encoders import save_encoder
from tests.support.fake_library import environment_at
from tests.support.publishing import published
from tests.support.running import run_stage

pytest.importorskip("onnx")
TinyOnnx = Callable[[str, str], Path]
CACHE = {"input_ids": ["batch", "sequence"], "past_key_values.0.key": ["batch", 2, "past", 16]}


@pytest.fixture(autouse=True)
def no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Look for environments in an empty folder, but for the tests of optimum itself."""
    monkeypatch.delenv("OPTKIT_OPTIMUM_PYTHON", raising=False)
    if "peers" not in request.keywords:
        monkeypatch.setenv("OPTKIT_ENVS", str(tmp_path / "envs"))


def test_its_own_environment_is_asked_where_no_other_python_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert interpreter("optimum", {}) == sys.executable
    built = environment_at(tmp_path / "built", "optimum", {})
    monkeypatch.setattr(Environments, "find", lambda _self, name: built if name == "optimum" else None)
    assert interpreter("optimum", {}) == str(built.interpreter)
    assert interpreter("optimum", {"optimum": sys.executable}) == interpreter("onnxruntime", {}) == sys.executable


def test_what_to_type_where_it_is_not_built(tmp_path: Path) -> None:
    request = {"directory": str(tmp_path), "device": "cpu"}
    assert missing(request, {}) == ["optimum-onnx"]
    answer = ask(OPTIMUM, sys.executable, request, tmp_path, 60)
    assert answer.problem == "not installed: optimum-onnx. Run: optkit env build optimum"


def test_a_model_that_is_not_for_it_is_no_failure(
    tiny_onnx: TinyOnnx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = published(tiny_onnx("llama", "fp32"), tmp_path / "out")
    monkeypatch.setattr(
        verify, "ask", lambda *_arguments: Answer(1.0, {}, not_applicable="optimum has nothing for the input states")
    )
    found = verify_artifact(
        artifact, engines=["optimum"], pythons={}, device="cpu", tokens=20, timeout_s=60, progress=SilentProgress()
    )
    assert (found.exit_status, found.loading[0].verdict) == (0, "skipped")
    assert found.loading[0].reason == "not applicable: optimum has nothing for the input states"


def test_what_it_feeds(tiny_onnx: TinyOnnx) -> None:
    inputs = inputs_of({"directory": str(tiny_onnx("llama", "fp32"))})
    assert {"input_ids", "past_key_values.0.key", "past_key_values.0.value"} <= set(inputs)
    assert [name for name in inputs if is_cache(name)] == [
        name for name in inputs if name.startswith("past_key_values")
    ]
    assert strange_input(inputs) == ""
    assert strange_input({"input_ids": [], "past_conv.0": []}) == "optimum has nothing for the input past_conv.0"


@pytest.mark.parametrize(
    ("heads", "size", "said"),
    [
        (2, 16, ""),
        (
            4,
            16,
            "ORTModelForCausalLM begins with 4 heads of 16 numbers for a qwen9; past_key_values.0.key "
            "is ['batch', 2, 'past', 16]",
        ),
        (None, 16, ""),
    ],
)
def test_a_cache_that_begins_with_other_heads(heads: int | None, size: int, said: str) -> None:
    model: Any = SimpleNamespace(
        embed_size_per_head=size, num_key_value_heads=heads, config=SimpleNamespace(model_type="qwen9")
    )
    assert other_cache(model, CACHE) == said


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_optimum_itself(tiny_model: TinyModel, tiny_onnx: TinyOnnx, tmp_path: Path) -> None:
    from optkit.stages.onnx import Onnx

    Environments().build("optimum", SilentProgress())
    made = {"torch": {}, "uncached": {"kv_cache": False}}
    for name, fields in made.items():
        run_stage(Onnx(exporter="torch", **fields), tiny_model("llama"), tmp_path / name)
    run_stage(Onnx(), save_encoder("BertForSequenceClassification", tmp_path / "bert"), tmp_path / "encoder")
    for model in (tiny_onnx("llama", "fp32"), *(tmp_path / name for name in (*made, "encoder"))):
        artifact = published(model, tmp_path / "out" / model.name)
        found = verify_artifact(
            artifact, engines=["optimum"], pythons={}, device="cpu", tokens=20, timeout_s=300, progress=SilentProgress()
        )
        assert (found.loading[0].verdict, found.loading[0].reason) == ("agrees", ""), model
        assert found.loading[0].version.startswith("0.1")
