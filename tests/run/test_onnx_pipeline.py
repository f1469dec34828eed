"""From a recipe that ends in ONNX to a scorecard, and an ONNX directory as the model of one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from optkit_cli.main import main

from optkit import keys as keys_module
from optkit.errors import EvalError, SourceError, StageError
from optkit.measure import Eval
from optkit.model.shape import ModelShape
from optkit.model.writer import copy_companions
from optkit.pipeline import evaluate, open_artifact, plan, read_scorecard, run
from optkit.recipe import registry
from optkit.scorecard import Scorecard
from optkit.session.onnx_session import OnnxSession
from optkit.stage import Context, Cost, Format, Report, Setting, Transform

RECIPE = """\
name: tiny
model: {model}
stages:
{stages}
evals:
  - footprint
  - perplexity: {{dataset: python-reference, split: test, window: 64, windows: 3}}
  - divergence: {{dataset: python-reference, split: test, window: 64, windows: 3}}
  - throughput: {{isolated: false, prompts: [8], new_tokens: 4, repeats: 2, warmup: 1}}
gates:
  perplexity: "<= 1.01x"
  kl_divergence: "<= 0.001"
"""
EVALS = "evals:\n  - perplexity: {dataset: python-reference, split: test, window: 32, windows: 3}\n"
MADE = {"stand-in": Path()}


class Export(Transform):
    """Copies an ONNX directory that lies ready."""

    produces: ClassVar[Format] = Format.ONNX

    def run(self, source: Path, target: Path, context: Context) -> Report:
        copy_companions(source, target)
        shutil.copytree(MADE["stand-in"], target, dirs_exist_ok=True)
        return Report(changed=1)

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        return Cost(disk_bytes=shape.size_bytes, ram_bytes=shape.size_bytes), shape


class Fuse(Export):
    """Reads an ONNX directory and leaves the same."""

    accepts: ClassVar[frozenset[Format]] = frozenset({Format.ONNX})


class Broken(Export):
    """Leaves a graph without its data."""

    def run(self, source: Path, target: Path, context: Context) -> Report:
        super().run(source, target, context)
        (target / "model.onnx.data").unlink()
        return Report(changed=1)


class Weigh(Eval):
    """Reads weights."""

    reads_weights: ClassVar[bool] = True


class Tone(Setting):
    """Changes a torch model."""


@pytest.fixture(autouse=True)
def stand_ins(tiny_onnx: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(MADE, "stand-in", tiny_onnx("llama", "fp32"))
    stages = {"export": Export, "fuse": Fuse, "broken": Broken, "tone": Tone}
    for known, classes in ((registry.STAGES, stages), (registry.EVALS, {"weigh": Weigh})):
        for kind, each in classes.items():
            monkeypatch.setitem(known, kind, f"{__name__}:{each.__name__}")
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)


def recipe(model: Path, *stages: str) -> str:
    return RECIPE.format(model=model, stages="\n".join(f"  - {stage}" for stage in stages))


def rows(card: Scorecard) -> dict[str, float | None]:
    return {row.metric.name: row.ratio for row in card.rows}


def test_the_whole_way(tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.yaml").write_text(recipe(tiny_model("llama"), "export", "fuse"))
    (tmp_path / "evals.yaml").write_text(EVALS)
    planned = plan("tiny.yaml", device="cpu")
    assert [(step.kind, step.format) for step in planned.steps] == [
        ("model", "checkpoint"),
        ("export", "onnx"),
        ("fuse", "onnx"),
    ]
    card = run("tiny.yaml", device="cpu")
    found = rows(card)
    assert found["perplexity"] == pytest.approx(1, abs=1e-5)
    assert found["weights_bytes"] is not None
    assert found["decode_tokens_per_s"] is not None
    assert card.exit_status == 0
    assert any(note.startswith("onnxruntime 1.") for note in card.notes)
    assert not any("onnxruntime" in note for note in card.baseline_notes)
    assert [rung.stage for rung in card.attribution] == ["unmodified", "export", "fuse"]

    artifact = tmp_path / "artifacts" / "tiny"
    assert {"model.onnx", "model.onnx.data", "genai_config.json", "config.json", "tokenizer.json", "optkit.json"} <= {
        path.name for path in artifact.iterdir()
    }
    assert isinstance(open_artifact(artifact, device="cpu"), OnnxSession)
    again = run("tiny.yaml", device="cpu")
    assert all(step.cached for step in again.steps)
    assert [row.metric.value for row in again.rows] == [row.metric.value for row in card.rows]
    assert read_scorecard(artifact).rows == again.rows
    assert len(evaluate(str(artifact), "evals.yaml", device="cpu").rows) == 1
    for words in (
        ("show", str(artifact)),
        ("compare", str(artifact), str(artifact)),
        ("plan", "tiny.yaml"),
        ("eval", str(artifact), "--evals", "evals.yaml"),
    ):
        capsys.readouterr()
        assert main(list(words)) == 0, capsys.readouterr().err


def test_what_a_stage_left_is_read_again(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(recipe(tiny_model("llama"), "broken"))
    with pytest.raises(SourceError, match=r"1 of 1 files with its weights are missing: model.onnx.data"):
        run("tiny.yaml", device="cpu")
    assert not (tmp_path / "artifacts" / "tiny").exists()


def test_an_onnx_directory_is_a_model(
    tiny_onnx: Callable[[str, str], Path], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(tiny_onnx("llama", "fp32"), tmp_path / "model"))
    (tmp_path / "evals.yaml").write_text(EVALS)
    card = evaluate(str(directory), "evals.yaml", device="cpu")
    of_checkpoint = evaluate(str(tiny_model("llama")), "evals.yaml", device="cpu")
    assert card.rows[0].metric.value == pytest.approx(of_checkpoint.rows[0].metric.value, rel=1e-5)

    (tmp_path / "tiny.yaml").write_text(recipe(directory, "fuse"))
    assert [step.format for step in plan("tiny.yaml", device="cpu").steps] == ["onnx", "onnx"]
    assert rows(run("tiny.yaml", device="cpu"))["perplexity"] == 1


def test_what_has_no_place_in_an_onnx_model(
    tiny_onnx: Callable[[str, str], Path], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = tiny_onnx("llama", "fp32")
    (tmp_path / "tiny.yaml").write_text(recipe(directory, "bf16"))
    with pytest.raises(
        StageError, match="cast reads a checkpoint .* is an ONNX model. Start from the checkpoint that it was exported"
    ):
        plan("tiny.yaml", device="cpu")
    (tmp_path / "tiny.yaml").write_text(recipe(tiny_model("llama"), "fuse"))
    with pytest.raises(
        StageError, match="fuse reads an ONNX model and .* is a checkpoint with float weights. Put onnx before it"
    ):
        plan("tiny.yaml", device="cpu")
    (tmp_path / "tiny.yaml").write_text(f"name: tiny\nmodel: {directory}\nstages: [tone]\nevals: [footprint]\n")
    with pytest.raises(
        StageError, match="tone is applied to a torch model when it is opened, and .* is an ONNX model. Take it out."
    ):
        plan("tiny.yaml", device="cpu")
    (tmp_path / "evals.yaml").write_text("evals: [weigh]\n")
    with pytest.raises(EvalError, match="weigh reads the weights of a checkpoint, and .* is an ONNX model"):
        evaluate(str(directory), "evals.yaml", device="cpu")


def test_timings_of_onnx_are_those_of_one_build(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.yaml").write_text(recipe(tiny_model("llama"), "export"))
    (tmp_path / "other.yaml").write_text(recipe(tiny_model("llama"), "bf16"))

    def keys(name: str) -> dict[str, str]:
        return {each.kind: each.key for each in plan(name, device="cpu").evals}

    before, other = keys("tiny.yaml"), keys("other.yaml")
    monkeypatch.setattr(keys_module, "installed", lambda builds: {"onnxruntime-gpu": "9.9"})
    after = keys("tiny.yaml")
    assert {kind for kind in before if before[kind] != after[kind]} == {"throughput"}
    assert keys("other.yaml") == other


def test_the_record_of_an_artifact_lists_the_data(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(
        f"name: tiny\nmodel: {tiny_model('llama')}\nstages: [export]\nevals: [footprint]\n"
    )
    run("tiny.yaml", device="cpu")
    artifact = tmp_path / "artifacts" / "tiny"
    files = json.loads((artifact / "optkit.json").read_text())["files"]
    assert {"model.onnx", "model.onnx.data"} <= files.keys()
    with (artifact / "model.onnx.data").open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises(Exception, match=r"1 of \d+ files are missing or were changed: model.onnx.data"):
        open_artifact(artifact, device="cpu")
