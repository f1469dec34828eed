"""The unmodified model beside itself: measured once, and what is smaller is no difference."""

import random
from pathlib import Path

import pytest
import torch
from optkit_evals.noise_floor import NoiseFloor

from optkit import pipeline
from optkit.comparison import compare
from optkit.errors import EvalError
from optkit.measure import EvalContext
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from tests.conftest import TinyModel
from tests.support.bigram_session import BigramSession

LETTERS = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz ", k=300))


def test_each_variation_is_measured_beside_one_window_at_a_time(tiny_model: TinyModel, text: str) -> None:
    session = open_session(tiny_model("llama"))
    found = list(NoiseFloor(dataset=text, window=32, windows=3).run(session, EvalContext()))
    assert [metric.labels["against"] for metric in found[::3]] == ["batch 2", "attention eager", "dtype bfloat16"]
    kl = {metric.labels["against"]: metric for metric in found if metric.name == "noise_kl_divergence"}
    assert kl["dtype bfloat16"].value > 10 * max(kl["batch 2"].value, kl["attention eager"].value)
    windows = NoiseFloor(dataset=text, window=32, windows=3).cut(session, EvalContext()).tokens
    other = open_session(tiny_model("llama"), dtype="bfloat16")
    expected = [
        torch.nn.functional.kl_div(
            other.logits(window[None])[0, :-1].float().log_softmax(-1),
            session.logits(window[None])[0, :-1].float().log_softmax(-1),
            log_target=True,
            reduction="batchmean",
        ).item()
        for window in windows
    ]
    assert kl["dtype bfloat16"].samples == pytest.approx(expected, rel=1e-4)


def test_what_cannot_be_opened_is_left_out_and_nothing_at_all_is_an_error(text: str, tmp_path: Path) -> None:
    session = BigramSession()
    session.directory = tmp_path
    (tmp_path / "config.json").write_text("{}")
    context = EvalContext()
    wanted = NoiseFloor(dataset=text, window=32, windows=2, dtype=None)
    assert [metric.value for metric in wanted.run(session, context)] == [0.0, 0.0, 0.0]
    assert len(context.notes) == 1
    assert context.notes[0].startswith("noise_floor: eager is left out: ")
    with pytest.raises(EvalError, match="noise_floor: there is nothing to vary. Set batch to 2 or more"):
        list(NoiseFloor(dataset=text, window=32, windows=2, batch=1, attention=None, dtype=None).run(session, context))


def test_it_is_measured_once_for_all_artifacts_of_a_model(
    tiny_model: TinyModel, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = f"{{dataset: {text}, window: 32, windows: 3}}"
    for bits in (8, 4):
        recipe = (
            f"name: b{bits}\nmodel: {tiny_model('llama')}\nstages: [{{rtn: {{bits: {bits}, group_size: 16}}}}]\n"
            f"evals: [footprint, {{perplexity: {asked}}}, {{divergence: {asked}}}, {{noise_floor: {asked}}}]\n"
        )
        card = pipeline.run(load_recipe(recipe), out=tmp_path / f"b{bits}", store=tmp_path / "store", device="cpu")
        rows = [row for row in card.rows if row.metric.name.startswith("noise_")]
        assert len(rows) == 9
        assert all(row.baseline is None for row in rows)
        monkeypatch.setattr(NoiseFloor, "run", lambda *_: pytest.fail("its numbers are in the store"))
    found = compare([tmp_path])
    floors = {floor.column: floor for floor in found.floors}
    assert set(floors) == {"perplexity", "kl_divergence", "top1_agreement"}
    assert floors["perplexity"].relative
    assert not floors["kl_divergence"].relative
    assert floors["kl_divergence"].source == "batch 2, attention eager, dtype bfloat16"
    assert 0 < floors["kl_divergence"].value < 0.01
