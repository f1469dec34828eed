"""What each stage added: which directories are measured, that numbers are shared with shorter
recipes, and the table.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import optkit
from optkit.errors import ResourceError
from optkit.measure import Metric
from optkit.measuring.bench import Bench
from optkit.scorecard import Rung, read_json, to_json, to_markdown, waterfall
from optkit.store.contents import prune
from optkit.store.store import Store
from tests.conftest import TinyModel
from tests.support.scorecards import metric

TEXT = "the quick brown fox jumps over the lazy dog and runs away from it all. "


def recipe(model: Path, text: Path, stages: list[object], **more: object) -> dict[str, object]:
    evals = [{name: {"dataset": str(text), "window": 32, "windows": 4}} for name in ("perplexity", "divergence")]
    return {"name": "tiny", "model": {"name": str(model)}, "stages": stages, "evals": evals, **more}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    place = tmp_path / "text.txt"
    place.write_text(TEXT * 100)
    return place


def test_a_recipe_of_two_stages_says_what_each_added(tiny_model: TinyModel, tmp_path: Path, text: Path) -> None:
    model, store = tiny_model("llama"), tmp_path / "store"
    cast: object = {"cast": {"dtype": "bfloat16"}}
    stages = [cast, {"rtn": {"bits": 2, "group_size": 16}}]
    scorecard = optkit.run(recipe(model, text, stages), out=tmp_path / "both", store=store, device="cpu")
    assert [rung.stage for rung in scorecard.attribution] == ["unmodified", "cast", "rtn"]
    unmodified, after_cast, after_rtn = scorecard.attribution
    by_name = {row.metric.name: row for row in scorecard.rows}
    assert unmodified.metrics == (by_name["perplexity"].baseline,)
    assert [metric.name for metric in after_cast.metrics] == ["perplexity", "kl_divergence"]
    assert after_rtn.metrics == (by_name["perplexity"].metric, by_name["kl_divergence"].metric)
    alone = optkit.run(recipe(model, text, [cast]), out=tmp_path / "cast", store=store, device="cpu")
    assert alone.attribution == ()
    unasked = recipe(model, text, stages, attribution=False)
    assert optkit.run(unasked, out=tmp_path / "unasked", store=store, device="cpu").attribution == ()
    assert {row.metric.name: row.metric.value for row in alone.rows}["kl_divergence"] == after_cast.metrics[1].value
    assert 0 < after_cast.metrics[1].value < 0.1 * after_rtn.metrics[1].value
    saved = tmp_path / "scorecard.json"
    saved.write_text(to_json(scorecard))
    assert read_json(saved).attribution == scorecard.attribution
    assert "## What each stage added" in to_markdown(scorecard)
    assert "## What each stage added" not in to_markdown(alone)


def test_what_was_measured_once_is_not_measured_again_and_a_pruned_step_is_told_of_by_the_one_after_it(
    tiny_model: TinyModel, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [{"cast": {"dtype": "bfloat16"}}, {"rtn": {"group_size": 16}}]
    wanted = recipe(tiny_model("llama"), text, stages)
    first = optkit.run(wanted, out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    monkeypatch.setattr("optkit.session.open_session", lambda *_, **__: pytest.fail("a model was opened"))
    for pruned in (False, True):
        if pruned:
            Store(tmp_path / "store").delete(first.steps[0].key)
        again = optkit.run(wanted, out=tmp_path / "out", store=tmp_path / "store", device="cpu")
        assert [(step.kind, step.report) for step in again.steps] == [(step.kind, step.report) for step in first.steps]
        assert again.attribution == first.attribution


def test_without_memory_it_is_left_out_and_the_scorecard_stands(
    tiny_model: TinyModel, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise ResourceError("the main memory is full", where="x")

    monkeypatch.setattr("optkit.measuring.attribution._measure", full)
    stages = [{"cast": {"dtype": "bfloat16"}}, {"rtn": {"group_size": 16}}]
    scorecard = optkit.run(
        recipe(tiny_model("llama"), text, stages), out=tmp_path / "out", store=tmp_path / "store", device="cpu"
    )
    assert scorecard.attribution == ()
    assert scorecard.rows


def test_numbers_stay_while_others_prune(
    tiny_model: TinyModel, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, store, evals = Bench.keep, Store(tmp_path / "store"), tmp_path / "evals.yaml"

    def keep_while_another_prunes(bench: Bench, *given: Any, **named: Any) -> None:
        keep(bench, *given, **named)
        assert prune(store, everything=True).metrics == 0

    monkeypatch.setattr(Bench, "keep", keep_while_another_prunes)
    stages = [{"cast": {"dtype": "bfloat16"}}, {"rtn": {"group_size": 16}}]
    wanted = recipe(tiny_model("llama"), text, stages)
    made = optkit.run(wanted, out=tmp_path / "out", store=store.root, device="cpu")
    assert [len(rung.metrics) for rung in made.attribution] == [1, 2, 2]
    assert prune(store, everything=True).metrics == 5
    evals.write_text(json.dumps({"evals": wanted["evals"]}))
    assert len(optkit.evaluate(str(tmp_path / "out"), evals, store=store.root, device="cpu").rows) == len(made.rows)


def losses(*values: float) -> Metric:
    mean = math.exp(sum(values) / len(values))
    return metric("perplexity", mean, "perplexity", "p", samples=values, pairing="paired_log")


def moved(value: float) -> Metric:
    return metric("kl_divergence", value, "nats/token", "p")


def test_the_table_has_ratios_of_paired_numbers_and_differences_of_others() -> None:
    rungs = [
        Rung(stage="unmodified", metrics=(losses(3.0, 3.2),)),
        Rung(stage="rotate", metrics=(losses(3.0, 3.2), moved(0.001))),
        Rung(stage="gptq", metrics=(losses(3.1, 3.3), moved(0.051))),
    ]
    table = waterfall(rungs)
    assert table is not None
    assert table.columns == ("after", "perplexity", "change [95%]", "kl_divergence", "change [95%]")
    assert table.rows[0] == ("unmodified", "22.20", "-", "-", "-")
    assert table.rows[1] == ("rotate", "22.20", "1.000x [1.000, 1.000]", "0.001000 nats/token", "+0.00100")
    assert table.rows[2][2].startswith("1.105x [1.105, 1.105]")
    assert table.rows[2][4] == "+0.0500"
    assert waterfall([]) is None
