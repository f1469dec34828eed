"""`exporter: optimum`: what its environment is told, that both readings of the source are compared,
and what is refused.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from optkit.backends import optimum_export
from optkit.backends.environments import Environments
from optkit.backends.libraries import LIBRARIES
from optkit.backends.older_transformers import logits_here
from optkit.errors import RecipeError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.recipe.recipe import load_recipe
from optkit.stage import Report
from optkit.stages.onnx import Onnx
from tests.conftest import TinyModel
from tests.support.encoders import save_encoder
from tests.support.fake_library import environment_at
from tests.support.running import run_stage

TinyOnnx = Callable[[str, str], Path]
Requests = list[dict[str, Any]]

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package)


@pytest.fixture
def worker(tiny_model: TinyModel, tiny_onnx: TinyOnnx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Requests:
    """Stand in for the environment of optimum: its worker leaves a graph of the tiny llama, and the
    logits of what it is given.
    """
    requests: Requests = []
    environment = environment_at(
        tmp_path / "environment", "optimum", {"transformers": "4.57.6", "optimum-onnx": "0.1.0"}
    )

    def run_worker(
        _environment: Any, request: dict[str, Any], _progress: Any, _log: Any, check: Callable[[Path], None]
    ) -> dict[str, Any]:
        requests.append(request | {"config": json.loads((Path(request["source"]) / "config.json").read_text())})
        logits = logits_here(Path(request["source"]), request["probe"], "float32")
        file = Path(request["target"]).parent / "logits.safetensors"
        save_file({"logits": logits * (2 if tmp_path.joinpath("other").exists() else 1)}, file)
        check(file)
        for path in tiny_onnx("llama", "fp32").glob("model.onnx*"):
            shutil.copy(path, request["target"])
        return {}

    monkeypatch.setenv("OPTKIT_ENVS", str(tmp_path / "envs"))
    monkeypatch.setattr(Environments, "find", lambda *_arguments: environment)
    monkeypatch.setattr(optimum_export, "run_worker", run_worker)
    return requests


def exported(source: Path, target: Path, **fields: Any) -> Report:
    return run_stage(Onnx(exporter="optimum", **fields), source, target)


def test_it_is_told_what_its_transformers_reads(tiny_model: TinyModel, worker: Requests, tmp_path: Path) -> None:
    report = exported(tiny_model("llama"), tmp_path / "onnx", opset=18)
    assert worker[0]["fields"] == {"task": "text-generation-with-past", "opset": 18}
    assert {"rope_theta", "rope_scaling", "rope_parameters"} <= set(worker[0]["config"])
    assert (report.details["exporter"], report.details["versions"]["optimum-onnx"]) == ("optimum", "0.1.0")
    assert report.details["sources_apart"] < 1e-6
    assert max(report.details["logits_apart"].values()) < 2e-6
    assert {"model.onnx", "model.onnx.data", "config.json", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "onnx").iterdir()
    }
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_another_model_is_not_exported(tiny_model: TinyModel, worker: Requests, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    said = (
        r"^backend optimum: the logits of transformers 4.57.6 and \S+ are 1 apart, 0.001 is the limit.*Take "
        r"exporter: torch for this model"
    )
    with pytest.raises(StageError, match=said):
        exported(tiny_model("llama"), tmp_path / "onnx")
    assert list((tmp_path / "onnx").iterdir()) == []


def test_without_its_environment(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTKIT_ENVS", str(tmp_path / "envs"))
    said = (
        "^onnx: exporter optimum: the environment of optimum is not built. optimum-onnx needs a .* "
        "Run: optkit env build optimum.$"
    )
    with pytest.raises(StageError, match=said):
        exported(tiny_model("llama"), tmp_path / "onnx")


def test_another_version_of_it_is_another_key() -> None:
    assert Onnx(exporter="optimum").made_with() == {"packages": list(LIBRARIES["optimum"].requirements)}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"opset": 21}, "opset: the exporter optimum writes 14 to 20, not 21: take one of these"),
        ({"target": "cuda"}, "target: a graph of the exporter optimum is the same for every provider. Leave it out"),
        ({"lm_head": 8}, "lm_head: the exporter optimum rounds nothing. Leave it out, and put onnx_quantize behind it"),
    ],
)
def test_fields_that_mean_nothing_to_it(tiny_model: TinyModel, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe(
            {
                "model": str(tiny_model("llama")),
                "stages": [{"onnx": {"exporter": "optimum", **fields}}],
                "evals": ["footprint"],
            }
        )


def test_encoders_are_not_for_it(tmp_path: Path) -> None:
    shape = Checkpoint(save_encoder("BertModel", tmp_path / "bert")).shape
    with pytest.raises(
        StageError, match="^onnx: optimum exports decoders here, and BertModel is none. Take exporter: torch"
    ):
        Onnx(exporter="optimum").predict(shape, "cpu")


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kv_cache", [True, False])
def test_optimum_itself(tiny_model: TinyModel, tmp_path: Path, kv_cache: bool) -> None:
    from optkit.progress import SilentProgress

    Environments().build("optimum", SilentProgress())
    report = exported(tiny_model("llama"), tmp_path / "onnx", kv_cache=kv_cache)
    assert max(report.details["logits_apart"].values()) < 2e-6
    assert ("10 steps" in report.details["logits_apart"]) == kv_cache
    assert torch.__version__.startswith(report.details["versions"]["torch"].partition("+")[0])
