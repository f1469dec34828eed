"""`run`, `plan`, `validate`, `eval`, `show` and `compare` on a tiny model, as a user calls them."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optkit_cli.progress import LineProgress
from optkit_evals.perplexity import Perplexity
from safetensors.torch import load_file, save_file

from optkit import pipeline
from optkit.artifact import read_artifact
from optkit.errors import UsageError
from optkit.measuring import evaluation
from optkit.measuring.measurement import Measurement
from optkit.recipe.gates import Verdict
from optkit.scorecard import Scorecard
from optkit.stage import Context, Report
from optkit.stages.cast import Cast
from optkit.store.contents import prune
from optkit.store.store import Store
from tests.support.command_line import desk_with, spoken
from tests.support.fresh_python import python

RECIPE = """\
name: tiny
model: {model}
stages:
  - bf16
evals:
  - footprint
  - perplexity: {{dataset: python-reference, split: test, window: 64, windows: 4}}
gates:
  size_bytes: "{limit}"
"""


@pytest.fixture
def desk(tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty directory with a recipe, a store of its own, and nothing else; it is the
    working directory.
    """
    return desk_with(tmp_path, monkeypatch, "tiny.yaml", RECIPE.format(model=tiny_model("llama"), limit="<= 0.9x"))


def test_the_whole_way(desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = spoken(capsys, "plan", "tiny.yaml", "--device", "cpu")
    assert [line.split()[:3] for line in out.splitlines() if line.startswith(("model", "cast"))] == [
        ["model", "hit", "checkpoint"],
        ["cast", "miss", "checkpoint"],
    ]
    assert not (desk / "artifacts").exists()

    out, err = spoken(capsys, "run", "tiny.yaml", "--device", "cpu")
    assert out.splitlines()[-1] == "PASS  1 of 1 gates pass  artifacts/tiny"
    assert "cast  0/" in err
    assert "cast" not in out.partition("gate")[2]
    assert read_artifact(desk / "artifacts" / "tiny").record.name == "tiny"

    assert spoken(capsys, "show", "artifacts/tiny")[0] == out
    again, err = spoken(capsys, "run", "tiny.yaml", "--device", "cpu", "--quiet", "--verbose")
    assert "from the store" in again
    assert err == ""
    assert (
        spoken(capsys, "plan", "tiny.yaml", "--device", "cpu")[0].splitlines()[-1] == "nothing to do: a "
        "run ends at once"
    )

    compared, _ = spoken(capsys, "compare", "artifacts/tiny", "artifacts/tiny")
    assert "size_bytes" in compared.splitlines()[1]
    monkeypatch.setattr(Perplexity, "run", lambda *_words: pytest.fail("it was measured again"))
    measured, _ = spoken(capsys, "eval", "artifacts/tiny", "--evals", "tiny.yaml", "--device", "cpu", "--quiet")
    assert measured.splitlines()[-1] == "PASS  1 of 1 gates pass"


def test_an_artifact_is_measured_from_anywhere_and_without_its_calibration_text(
    desk: Path, tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (desk / "model").symlink_to(tiny_model("llama"))
    (desk / "mine.txt").write_text("A sentence to calibrate on. " * 99, encoding="utf-8")
    stage = "stages=[{gptq: {calibration: {dataset: mine.txt, samples: 2, sequence_length: 16}}}]"
    spoken(capsys, "run", "tiny.yaml", "--model", "model", "--set", stage, "--device", "cpu", "--quiet")
    (desk / "mine.txt").rename(desk / "other.txt")
    (desk / "evals.yaml").write_text("model: any\nevals: [footprint]\n", encoding="utf-8")
    (desk / "below").mkdir()
    monkeypatch.chdir(desk / "below")
    out, _ = spoken(capsys, "eval", "../artifacts/tiny", "--evals", "../evals.yaml", "--device", "cpu", "--quiet")
    assert "size_bytes" in out
    same = "model: any\nevals: [{perplexity: {dataset: ../other.txt, window: 16}}]\n"
    (desk / "same.yaml").write_text(same, encoding="utf-8")
    _, err = spoken(
        capsys, "eval", "../artifacts/tiny", "--evals", "../same.yaml", "--device", "cpu", "--quiet", status=1
    )
    assert err.startswith("error: ../other.txt: the model was calibrated on mine.txt (all).")


@pytest.mark.usefixtures("warm_children")
def test_json_is_one_document_on_stdout_and_the_rest_is_elsewhere(desk: Path) -> None:
    words = ["run", "tiny.yaml", "--json", "--device", "cpu", "--out", "here"]
    done = python("-m", "optkit_cli.main", *words, cwd=desk)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((desk / "here" / "scorecard.json").read_text(encoding="utf-8"))
    assert (document["verdict"], document["exit_status"]) == ("PASS", 0)
    assert "cast  0/" in done.stderr
    assert "\x1b" not in done.stderr


def test_a_failed_gate_is_exit_status_3(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = spoken(capsys, "run", "tiny.yaml", "--device", "cpu", "--set", "gates.size_bytes='<= 0.1x'", status=3)
    assert out.splitlines()[-1] == "FAIL  0 of 1 gates pass  artifacts/tiny"


def test_an_unclear_gate_is_exit_status_4(
    desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unclear(*_words: object, **_settings: object) -> Scorecard:
        return Scorecard(name="unclear", artifact_key="ab" * 32, created="now", recipe={})

    monkeypatch.setattr(pipeline, "run", unclear)
    monkeypatch.setattr(Scorecard, "verdict", property(lambda _self: Verdict.INCONCLUSIVE))
    spoken(capsys, "run", "tiny.yaml", status=4)


def test_json_of_plan_show_and_compare(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(spoken(capsys, "plan", "tiny.yaml", "--json", "--device", "cpu")[0])
    assert [step["kind"] for step in plan["steps"]] == ["model", "cast"]
    assert plan["recipe"]["model"]["revision"].startswith("sha256:")
    spoken(capsys, "run", "tiny.yaml", "--device", "cpu", "--quiet")
    shown = json.loads(spoken(capsys, "show", "artifacts/tiny", "--json")[0])
    compared = json.loads(spoken(capsys, "compare", "artifacts/tiny", "--json")[0])
    (entry,) = compared["entries"]
    assert (entry["artifact_key"], entry["created"]) == (shown["artifact_key"], shown["created"])
    assert {row["metric"]["name"] for row in shown["rows"]} >= {"perplexity", "size_bytes"}


def test_validate_names_every_problem_of_every_file_at_once(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (desk / "bad.yaml").write_text(
        "model: smollm2-135m\nstages:\n  - cats: {}\nevals: []\ngatse: {}\n", encoding="utf-8"
    )
    out, err = spoken(capsys, "validate", "bad.yaml", "tiny.yaml", "missing.yaml", status=2)
    assert out == "tiny.yaml: ok\n"
    lines = err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    assert any(line.startswith("error: bad.yaml:3:5: ") and "Did you mean 'cast'?" in line for line in lines)
    assert any(line.startswith("error: bad.yaml:5:1: ") and "gatse" in line for line in lines)
    assert any("missing.yaml" in line for line in lines)


def test_show_prints_the_card_and_then_says_that_files_were_changed(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoken(capsys, "run", "tiny.yaml", "--device", "cpu", "--quiet")
    (desk / "artifacts" / "tiny" / "config.json").unlink()
    out, err = spoken(capsys, "show", "artifacts/tiny", status=1)
    assert "size_bytes" in out
    assert err.startswith("error: artifacts/tiny: 1 of ")
    assert json.loads(spoken(capsys, "show", "artifacts/tiny", "--json", status=1)[0])["kind"] == "ArtifactError"


@pytest.mark.parametrize(
    "words", [["show", "nowhere"], ["compare", "nowhere"], ["eval", "nowhere", "--evals", "tiny.yaml"]]
)
def test_what_is_not_there_is_an_error(words: list[str], desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = spoken(capsys, *words, status=1)
    assert out == ""
    assert err.splitlines()[-1].startswith("error: nowhere: ")
    assert "bug in optkit" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.usefixtures("desk")
def test_a_plan_for_a_gpu_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = spoken(capsys, "plan", "tiny.yaml", "--device", "cuda")
    assert " · cuda, which is not here" in out
    assert "of GPU memory at most" in out.replace("\n", " ")


@pytest.mark.parametrize("words", [["run", "tiny.yaml"], ["eval", "artifacts", "--evals", "tiny.yaml"]])
def test_a_gpu_that_is_not_there(words: list[str], desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = spoken(capsys, *words, "--device", "cuda:99", status=2)
    assert err.startswith("error: device cuda:99: torch sees ")
    assert "Use cpu" in err
    assert not (desk / "artifacts").exists()
    with pytest.raises(UsageError, match="^device cuda:99: torch sees"):
        pipeline.open_artifact(desk, device="cuda:99")


def test_sequences_longer_than_the_model_are_refused_before_anything_runs(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("plan", "run"):
        _, err = spoken(
            capsys, command, "tiny.yaml", "--device", "cpu", "--set", "evals.1.perplexity.window=600", status=1
        )
        assert err.startswith("error: recipe tiny: the sequences of perplexity have 600 tokens, and ")
        assert "was built for 512" in err
        assert err.endswith("Set its `window` so that they have at most 512.\n")
    assert not (desk / "store" / "steps").exists()


def test_a_run_holds_its_steps_until_it_ends(
    desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    measure = evaluation.measure

    def measure_while_another_prunes(*words: Any, **settings: Any) -> Measurement:
        kept.extend(step.kind for step in prune(Store(desk / "store"), everything=True).in_use)
        return measure(*words, **settings)

    monkeypatch.setattr(evaluation, "measure", measure_while_another_prunes)
    spoken(capsys, "run", "tiny.yaml", "--device", "cpu", "--quiet")
    assert kept == ["cast"]
    assert spoken(capsys, "store", "prune", "--all")[0].splitlines()[-2].startswith("1 step and 4 measurements deleted")
    assert spoken(capsys, "show", "artifacts/tiny")[0]


def test_who_opens_an_artifact_hears_how_far_it_is(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = "stages=[{rtn: {group_size: 32}}]"
    spoken(capsys, "run", "tiny.yaml", "--device", "cpu", "--quiet", "--set", stage, "--set", "evals=[footprint]")
    heard = LineProgress(io.StringIO())
    pipeline.open_artifact("artifacts/tiny", device="cpu", progress=heard).close()
    assert heard.stream.getvalue() != ""  # type: ignore[attr-defined]


def test_eval_measures_timings_again_when_asked(
    desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def evaluate(*_words: object, retime: bool, **_settings: object) -> Scorecard:
        asked.append(retime)
        return Scorecard(name="x", artifact_key="ab" * 32, created="now", recipe={})

    monkeypatch.setattr(pipeline, "evaluate", evaluate)
    spoken(capsys, "eval", "m", "--evals", "tiny.yaml", "--retime")
    spoken(capsys, "eval", "m", "--evals", "tiny.yaml")
    assert asked == [True, False]


@pytest.mark.parametrize("change", ["another version", "another machine"])
def test_what_is_measured_of_an_artifact_is_never_said_of_other_weights(
    desk: Path,
    tiny_model: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    spoken(capsys, "run", "tiny.yaml", "--out", "old", "--device", "cpu", "--quiet")
    plain = Cast.run

    def other_weights(stage: Cast, source: Path, target: Path, context: Context) -> Report:
        report = plain(stage, source, target, context)
        weights = load_file(target / "model.safetensors")
        save_file(
            {name: 1.5 * tensor for name, tensor in weights.items()}, target / "model.safetensors", {"format": "pt"}
        )
        return report

    monkeypatch.setattr(Cast, "run", other_weights)
    monkeypatch.setattr(Cast, "version", Cast.version + (change == "another version"))
    monkeypatch.setenv("OPTKIT_STORE", str(desk / ("store" if change == "another version" else "empty")))
    (desk / "evals.yaml").write_text(
        (desk / "tiny.yaml").read_text().replace("windows: 4", "windows: 3"), encoding="utf-8"
    )

    def measured(*words: str) -> tuple[str, float]:
        found = json.loads(spoken(capsys, *words, "--device", "cpu", "--json")[0])
        row = next(row for row in found["rows"] if row["metric"]["name"] == "perplexity")
        return found["artifact_key"], row["metric"]["value"]

    there = ["--model", str(tiny_model("llama"))] if change == "another machine" else []  # which nobody has seen
    of_old = measured("eval", "old", "--evals", "evals.yaml", *there)
    of_new = measured("run", "tiny.yaml", "--out", "new", "--set", "evals.1.perplexity.windows=3")
    assert of_old[1] != of_new[1]
    assert measured("eval", "old", "--evals", "evals.yaml") == of_old  # the run has seen it
    assert of_old[0] == read_artifact(desk / "old").record.key


def test_an_output_that_holds_the_store_is_refused_before_anything_runs(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = spoken(capsys, "run", "tiny.yaml", "--store", "o/store", "--out", "o", "--device", "cpu", status=1)
    assert "o: holds the store" in err
    assert not (desk / "o").exists()
