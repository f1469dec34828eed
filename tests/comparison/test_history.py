"""`optkit history`: what runs left records of, filtered, and what became of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from optkit.artifact import Artifact, ArtifactRecord
from optkit.comparison.history import history, remember_artifact
from tests.support.command_line import desk_with, spoken
from tests.support.scorecards import card, perplexity, size

LOSSES = [3.0 + 0.1 * (index % 4) for index in range(12)]
RECIPE = """\
name: {name}
model: {model}
stages: [bf16]
evals: [footprint]
gates: {{size_bytes: "<= {limit}x"}}
"""


def keep(store: Path, name: str, loss: float, model: str = "small", gate: str = "<= 9x") -> None:
    """Leave a record of an artifact that is not there."""
    made = card(
        name,
        [perplexity([each + loss for each in LOSSES]), size(250e6)],
        [perplexity(LOSSES), size(500e6)],
        gates={"perplexity": gate} if gate else {},
        model=model,
    )
    made = made.model_copy(update={"created": f"2026-01-{len(name):02}T00:00:00+00:00"})
    keys = dict.fromkeys(("weights_key", "baseline_key"), "0" * 64)
    record = ArtifactRecord(
        name=name,
        key=made.artifact_key,
        **keys,
        created=made.created,
        optkit="0",
        recipe={"model": {"name": model}},
        settings=(),
        steps=(),
        files={},
    )
    remember_artifact(Artifact(directory=store.parent / name, record=record), made, store)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with three records."""
    keep(tmp_path / "store", "good", 0.01)
    keep(tmp_path / "store", "better", 0.001, "org/large")
    keep(tmp_path / "store", "bad", 0.5, gate="<= 1.1x")
    return tmp_path / "store"


def names(store: Path, **wanted: object) -> list[str]:
    return [made.name for made in history(store, **wanted).made]


def test_newest_first_and_filtered_by_name_model_verdict_and_metric(store: Path) -> None:
    assert names(store) == ["better", "good", "bad"]
    assert names(store, recipe="B*") == ["better", "bad"]
    assert names(store, model="org/large") == ["better"]
    assert names(store, model="*") == ["better", "good", "bad"]
    assert names(store, verdict="FAIL") == ["bad"]
    assert names(store, where=["perplexity<=1.02x"]) == ["better", "good"]
    assert names(store, where=["perplexity<=1.02x", "size_bytes>1e9"]) == []


def test_no_samples_are_kept(store: Path) -> None:
    assert all(len(path.read_bytes()) < 3000 for path in (store / "history").iterdir())
    assert not any(row.metric.samples for made in history(store).made for row in made.rows)


def test_what_had_no_gates_did_not_pass_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path / "store", "good", 0.01)
    keep(tmp_path / "store", "ungated", 0.01, gate="")
    said = spoken(capsys, "history", "--store", str(tmp_path / "store"))[0]
    assert (said.count("no gates"), said.count("PASS")) == (1, 1)


def test_a_path_is_never_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / ("a deep place " * 9)
    keep(place / "store", "good", 0.01)
    said = spoken(capsys, "history", "--store", str(place / "store"))[0]
    assert f"{place / 'good'}  (gone)" in said


def test_a_damaged_record_is_counted_and_hides_no_other(store: Path) -> None:
    next((store / "history").iterdir()).write_text("{", encoding="utf-8")
    found = history(store)
    assert (len(found.made), found.unreadable) == (2, 1)


def test_a_store_that_cannot_be_written_forgets(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file", encoding="utf-8")
    keep(tmp_path / "store", "good", 0.01)
    assert names(tmp_path / "store") == []


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("perplexity", "--where: 'perplexity' is no limit. Write it as perplexity<=1.05x."),
        ("perplexty<2", "--where: no artifact has 'perplexty'. Did you mean 'perplexity'?"),
        ("speed<2", "--where: no artifact has 'speed'. Known: perplexity, size_bytes."),
    ],
)
def test_a_wrong_limit(store: Path, limit: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = spoken(capsys, "history", "--store", str(store), "--where", limit, status=2)
    assert err.splitlines()[0] == f"error: {said}"


def test_what_runs_made_and_what_became_of_it(
    tmp_path: Path,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tiny_model("llama")
    desk = desk_with(tmp_path, monkeypatch, "one.yaml", RECIPE.format(name="one", model=model, limit=0.9))
    (desk / "two.yaml").write_text(RECIPE.format(name="two", model=model, limit=0.1), encoding="utf-8")
    assert "nothing of this was made" in spoken(capsys, "history")[0]
    spoken(capsys, "run", "one.yaml", "--device", "cpu")
    spoken(capsys, "run", "one.yaml", "--device", "cpu")
    spoken(capsys, "run", "two.yaml", "--device", "cpu", status=3)
    spoken(capsys, "run", "two.yaml", "--device", "cpu", "--out", "artifacts/moved", status=3)
    shutil.move(desk / "artifacts" / "moved", desk / "elsewhere")

    found = json.loads(spoken(capsys, "history", "--json")[0])
    assert {(Path(made["directory"]).name, made["verdict"], made["state"]) for made in found["made"]} == {
        ("one", "PASS", "there"),
        ("two", "FAIL", "there"),
        ("moved", "FAIL", "gone"),
    }
    out, _ = spoken(capsys, "history", "--verdict", "fail", "--model", model.name)
    assert len(out.splitlines()) == 3
    assert "artifacts/moved  (gone)" in out
    assert "artifacts/two" in out

    spoken(capsys, "run", "two.yaml", "--device", "cpu", "--out", "artifacts/one", "--set", "seed=1", status=3)
    assert "artifacts/one  (replaced)" in spoken(capsys, "history", "--recipe", "one")[0]
