"""Which evals run on which model, with sessions that only count."""

from pathlib import Path
from typing import ClassVar

import pytest

from optkit import registry
from optkit.errors import EvalError, StoreError
from optkit.measure import Eval, Metric
from optkit.measuring import Subject, measure
from optkit.plan import make_plan
from optkit.progress import SilentProgress
from optkit.recipe import load_recipe
from optkit.store import Store

RAN: list[tuple[str, str]] = []
OPEN: list[str] = []


class Plain(Eval):
    """Count the calls."""

    metrics: ClassVar[tuple[str, ...]] = ("plain",)
    field: int = 0

    def run(self, session, context):
        RAN.append((type(self).__name__.lower(), session.directory.name))
        return [Metric(name=type(self).__name__.lower(), value=len(RAN), unit="", higher_is_better=True, protocol="p")]


class Timed(Plain):
    """Count the calls of a timed eval."""

    timed: ClassVar[bool] = True


class Pair(Plain):
    """Count the calls of an eval that compares."""

    compares: ClassVar[bool] = True

    def run(self, session, context):
        assert context.baseline.directory.name == "baseline"
        assert OPEN == ["baseline", "artifact"]
        return super().run(session, context)


class FakeSession:
    notes = ("said by the session",)

    def __init__(self, directory):
        self.directory = directory
        OPEN.append(directory.name)

    def close(self):
        OPEN.remove(self.directory.name)


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    RAN.clear()
    OPEN.clear()
    evals = {"plain": Plain, "timed": Timed, "pair": Pair}
    for kind in evals:
        monkeypatch.setitem(registry.EVALS, kind, "here")
    for module in ("entries", "recipe_check"):
        monkeypatch.setattr(f"optkit.{module}.eval_class", lambda kind: evals.get(kind) or registry.eval_class(kind))
    monkeypatch.setattr("optkit.session.open_session", lambda directory, *args, **kwargs: FakeSession(directory))


@pytest.fixture
def measured(tiny_model, tmp_path):
    store = Store(tmp_path / "store")

    def run(*evals, stages=("bf16",), forget=(), gates=None, retime=False):
        recipe = load_recipe({"model": str(tiny_model("llama")), "stages": list(stages), "evals": list(evals), "gates": gates or {}})
        plan = make_plan(recipe.pinned(None), store, "cpu")
        for index, key in forget:
            (store.root / "metrics" / f"{getattr(plan.evals[index], key)}.json").unlink()
        RAN.clear()
        subjects = [Subject(lambda name=name: Path(name), ()) for name in ("artifact", "baseline")]
        if plan.artifact_key == plan.baseline_key:
            subjects[1] = None
        return measure(plan, *subjects, store, data=None, progress=SilentProgress(), retime=retime)

    return run


def test_the_artifact_is_measured_first_then_the_baseline_then_both(measured):
    found = measured("plain", "pair", "timed")
    assert RAN == [("plain", "artifact"), ("timed", "artifact"), ("plain", "baseline"), ("timed", "baseline"), ("pair", "artifact")]
    assert [metric.name for metric in found.metrics] == ["plain", "pair", "timed"]
    assert [metric.name for metric in found.baseline] == ["plain", "timed"]
    assert found.notes == found.baseline_notes == ("said by the session",)
    assert found.environment["device"] == "cpu"
    assert OPEN == []


def test_what_is_known_is_not_measured_again(measured):
    first = measured("plain", "pair", "timed")
    second = measured("plain", "pair", "timed")
    assert RAN == []
    assert second == first


def test_another_recipe_measures_the_baseline_again_only_for_timings(measured):
    measured("plain", "timed")
    measured("plain", "timed", stages=("fp16",))
    assert RAN == [("plain", "artifact"), ("timed", "artifact"), ("timed", "baseline")]


def test_timings_of_both_models_are_of_one_run(measured):
    measured("timed")
    measured("timed", forget=[(0, "key")])
    assert RAN == [("timed", "artifact"), ("timed", "baseline")]
    measured("timed", forget=[(0, "baseline_key")])
    assert RAN == [("timed", "artifact"), ("timed", "baseline")]


def test_an_unmodified_model_is_measured_once(measured):
    found = measured("plain", "timed", stages=())
    assert RAN == [("plain", "artifact"), ("timed", "artifact")]
    assert found.baseline == ()


def test_a_session_is_closed_when_an_eval_fails(measured, monkeypatch):
    monkeypatch.setattr(Plain, "run", lambda self, session, context: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measured("plain")
    assert OPEN == []


def test_an_unmodified_model_has_nothing_to_compare_with(measured):
    with pytest.raises(EvalError, match=r"pair: there is nothing to compare with\. Nothing was done to .*its own baseline"):
        measured("pair", stages=())
    assert RAN == []


def test_an_unmodified_model_has_no_ratio_to_limit(measured):
    with pytest.raises(EvalError, match=r"gate plain: the limit is relative to the baseline\..*Set an absolute limit, without x"):
        measured("plain", stages=(), gates={"plain": "<= 1.1x"})
    assert RAN == []


def test_nothing_is_measured_where_it_could_not_be_kept(measured, tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreError, match="store: cannot write the metrics"):
        measured("plain")
    assert RAN == []


def test_timings_alone_are_measured_again_when_asked(measured):
    measured("plain", "timed")
    measured("plain", "timed", retime=True)
    assert RAN == [("timed", "artifact"), ("timed", "baseline")]
