"""Which evals run on which model, with sessions that only count."""

import json
import math
from pathlib import Path
from typing import ClassVar

import pytest

from optkit.errors import EvalError, StoreError
from optkit.measure import Eval, Metric, TimedEval, Turn
from optkit.measuring.bench import Subject
from optkit.measuring.measurement import measure
from optkit.plan import make_plan
from optkit.progress import SilentProgress, SilentTask, ToActOn
from optkit.recipe import registry
from optkit.recipe.recipe import load_recipe
from optkit.store.store import Store

RAN: list[tuple[str, str]] = []
OPEN: list[str] = []
SAID: list[str] = []
IN_TURNS = [("timed", name) for name in ("baseline", "artifact", "artifact", "baseline") * 2]


class Plain(Eval):
    """Count the calls."""

    metrics: ClassVar[dict[str, str]] = {"plain": ""}
    field: int = 0

    def run(self, session, context):
        RAN.append((type(self).__name__.lower(), session.directory.name))
        return [Metric(name=type(self).__name__.lower(), value=len(RAN), unit="", higher_is_better=True, protocol="p")]


class Timed(Plain, TimedEval):
    """Count the calls of a timed eval."""

    isolated: bool = False


class Pair(Plain):
    """Count the calls of an eval that compares."""

    compares: ClassVar[bool] = True

    def run(self, session, context):
        assert context.baseline.directory.name == "baseline"
        assert OPEN == ["baseline", "artifact"]
        return super().run(session, context)


class Said(SilentProgress):
    def warn(self, line):
        SAID.append(line)


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
    eval_class = registry.eval_class
    for module in ("registry", "checks"):
        monkeypatch.setattr(f"optkit.recipe.{module}.eval_class", lambda kind: evals.get(kind) or eval_class(kind))
    monkeypatch.setattr("optkit.session.open_session", lambda directory, *args, **kwargs: FakeSession(directory))


@pytest.fixture
def measured(tiny_model, tmp_path):
    store = Store(tmp_path / "store")

    def run(*evals, stages=("bf16",), forget=(), gates=None, retime=False):
        recipe = load_recipe(
            {"model": str(tiny_model("llama")), "stages": list(stages), "evals": list(evals), "gates": gates or {}}
        )
        plan = make_plan(recipe.pinned(None), store, "cpu")
        for index, key in forget:
            (store.root / "metrics" / f"{getattr(plan.evals[index], key)}.json").unlink()
        RAN.clear()
        subjects = [Subject(lambda name=name: Path(name), ()) for name in ("artifact", "baseline")]
        if plan.artifact_key == plan.baseline_key:
            subjects[1] = None  # type: ignore[call-overload]
        return measure(plan, *subjects, store, data=None, progress=Said(), retime=retime)

    return run


def test_timings_come_first_in_turns_then_each_model_then_both(measured):
    found = measured("plain", "pair", "timed")
    assert [*IN_TURNS, ("plain", "baseline"), ("plain", "artifact"), ("pair", "artifact")] == RAN
    assert [metric.name for metric in found.metrics] == ["plain", "pair", "timed"]
    assert [metric.name for metric in found.baseline] == ["plain", "timed"]
    assert found.notes == found.baseline_notes == ("said by the session",)
    assert found.environment["device"] == "cpu"
    assert OPEN == []
    of = [(trace.of, trace.name) for trace in found.memory]
    unmodified, artifact = ["open", "plain"], ["open", "plain", "pair"]
    assert of == [*(("unmodified", name) for name in unmodified), *(("artifact", name) for name in artifact)]
    again = measured("plain", "pair", "timed")  # it is in the store
    assert (again.metrics, again.baseline, again.memory) == (found.metrics, found.baseline, found.memory)
    assert RAN == []


def test_without_a_pair_the_two_models_are_never_open_together(measured, monkeypatch):
    together = []
    monkeypatch.setattr(
        FakeSession, "close", lambda self: (together.append(len(OPEN)), OPEN.remove(self.directory.name))
    )
    measured("plain", "timed")
    assert together == [1] * 10


def test_the_models_take_turns_and_each_turn_is_one_sample(measured, monkeypatch):
    turns = []

    def run(self, session, context):
        turns.append((session.directory.name, context.turn))
        context.warn(f"noise in turn {len(turns)}")
        fields = {
            "unit": "s",
            "higher_is_better": False,
            "protocol": "p",
            "value": len(turns),
            "pairing": "paired_turns",
        }
        return [
            Metric(name="t", samples=(len(turns) - 0.5, len(turns) + 0.5), **fields),
            Metric(name="memory", **fields),
        ]

    monkeypatch.setattr(Timed, "run", run)
    found = measured({"timed": {"processes": 3}})
    names = ["baseline", "artifact", "artifact", "baseline", "baseline", "artifact"]
    assert turns == [(name, Turn(place // 2, 3)) for place, name in enumerate(names)]
    for ours, theirs in zip(found.metrics, found.baseline, strict=True):
        assert (ours.samples, theirs.samples) == ((2, 3, 6), (1, 4, 5))
        assert ours.value == pytest.approx(11 / 3)
        assert ours.interval == pytest.approx((0.0, 11 / 3 + 4.3027 * math.sqrt(13 / 3 / 3)), rel=1e-4)
    assert found.metrics[0].repeats == ((1.5, 2.5), (2.5, 3.5), (5.5, 6.5))
    assert found.metrics[1].repeats == ()
    assert found.notes == ("said by the session", "noise in turn 2", "noise in turn 3", "noise in turn 6")
    assert found.warnings == (
        *(f"noise in turn {index}" for index in (2, 3, 6)),
        *(f"baseline: noise in turn {index}" for index in (1, 4, 5)),
    )
    assert measured({"timed": {"processes": 3}}).warnings == found.warnings


@pytest.mark.parametrize("kind", ["plain", "timed"])
def test_notes_of_a_session_that_ask_someone_to_act_are_warnings(measured, monkeypatch, kind):
    slow = ToActOn("mxfp4: 3 of 3 layers are dequantized at each call")
    monkeypatch.setattr(FakeSession, "notes", ("said by the session", slow))
    found = measured({kind: {}})
    assert found.notes[:2] == ("said by the session", slow)
    assert found.warnings == (slow, f"baseline: {slow}")


def test_bars_of_the_baseline_name_it(measured, monkeypatch):
    said = []

    def task(self, label, total, unit=""):
        said.append(label)
        return SilentTask()

    def run(self, session, context):
        with context.progress.task("plain", 1):
            return [Metric(name="plain", value=1, unit="", higher_is_better=True, protocol="p")]

    monkeypatch.setattr(Said, "task", task)
    monkeypatch.setattr(Plain, "run", run)
    measured({"plain": {}})
    assert said == ["the baseline: plain", "plain"]


def test_evals_of_fewer_turns_leave_the_later_ones_out(measured):
    measured({"timed": {"processes": 2}}, {"timed": {"processes": 3, "field": 1}}, stages=())
    assert len(RAN) == 5


def test_shares_of_all_turns_are_one_share_and_limits_have_no_error(measured, monkeypatch):
    def run(self, session, context):
        fields = {"unit": "fraction", "higher_is_better": True, "protocol": "p", "value": 1.0}
        return [
            Metric(name="agreement", samples=(1.0, 1.0), trials=(1, 1), **fields, pairing="independent"),
            Metric(name="limit", **fields),
        ]

    monkeypatch.setattr(Timed, "run", run)
    agreement, limit = measured("timed").metrics
    assert (agreement.samples, agreement.trials, agreement.value) == ((1.0,) * 8, (1,) * 8, 1.0)
    assert agreement.interval == pytest.approx((0.025 ** (1 / 8), 1.0))
    assert (limit.value, limit.interval, limit.samples) == (1.0, None, ())


def test_what_failed_in_one_turn_has_failed(measured, monkeypatch):
    def run(self, session, context):
        failure = "memory ran out" if context.turn.index == 1 else ""
        return [
            Metric(name="t", value=1, unit="s", higher_is_better=False, protocol="p", samples=(1,), failure=failure)
        ]

    monkeypatch.setattr(Timed, "run", run)
    (metric,) = measured("timed").metrics
    assert metric.failure == "memory ran out"


@pytest.mark.parametrize("kind", ["plain", "timed"])
def test_what_falls_back_while_it_is_measured_is_told(measured, monkeypatch, kind):
    eval_class = {"plain": Plain, "timed": Timed}[kind]
    run = eval_class.run

    def fall_back(self, session, context):
        session.notes = ("fell back",)
        return run(self, session, context)

    monkeypatch.setattr(eval_class, "run", fall_back)
    found = measured(kind)
    assert found.notes == found.baseline_notes == ("fell back",)


def test_numbers_of_timings_are_kept_together_and_rounds_outlive_a_failure(measured, monkeypatch, tmp_path):
    def fail_at_the_end(self, session, context):
        if context.turn == Turn(3, 4):
            raise EvalError("memory ran out")
        return Plain.run(self, session, context)

    with monkeypatch.context() as patched:
        patched.setattr(Timed, "run", fail_at_the_end)
        with pytest.raises(EvalError, match="memory ran out"):
            measured("timed")
    assert not [*(tmp_path / "store").glob("metrics/*.json")]
    assert "timed: its turns were taken in 2 sittings" in measured("timed").notes
    assert IN_TURNS[6:] == RAN
    assert not [*(tmp_path / "store" / "work").iterdir()]


@pytest.mark.parametrize("edit", ["{}", '{"metrics": 4}', "[1", '{"digest": "0", "value": {"metrics": []}}'])
def test_numbers_that_were_edited_in_the_store_are_measured_again(measured, tmp_path, edit):
    first = measured("plain")
    (path,) = [path for path in (tmp_path / "store" / "metrics").iterdir() if '"value": 2.0' in path.read_text()]
    path.write_text(edit)
    SAID.clear()
    second = measured("plain")
    assert len(RAN) == 1
    assert SAID == ["plain: its numbers in the store were changed or cut off; they are measured again"]
    assert first.metrics[0].name == second.metrics[0].name


def test_what_was_measured_before_this_run_says_so_and_the_environment_is_this_runs(measured, tmp_path):
    first = measured("plain", "timed")
    assert first.notes == first.baseline_notes == ("said by the session",)
    for path in (tmp_path / "store" / "metrics").iterdir():
        entry = json.loads(path.read_text())["value"]
        entry |= {
            "created": "2001-01-01T00:00:00+00:00",
            "environment": {**entry["environment"], "torch": "0.1", "device_name": "Abacus"},
        }
        Store(tmp_path / "store").put_json(path.stem, entry)
    then = "2001-01-01T00:00:00+00:00, with device_name Abacus, torch 0.1"
    again = measured("plain", "timed")
    assert again.notes == (
        "said by the session",
        f"plain: measured earlier, {then}",
        f"timed: measured earlier, {then}",
    )
    assert again.baseline_notes == again.notes
    assert again.environment == first.environment
    assert measured("plain", "timed", retime=True).notes == ("said by the session", f"plain: measured earlier, {then}")
    assert RAN == IN_TURNS


def test_another_recipe_measures_the_baseline_again_only_for_timings(measured):
    measured("plain", "timed")
    measured("plain", "timed", stages=("fp16",))
    assert [*IN_TURNS, ("plain", "artifact")] == RAN


def test_timings_of_both_models_are_of_one_run(measured):
    measured("timed")
    measured("timed", forget=[(0, "key")])
    assert RAN == IN_TURNS
    measured("timed", forget=[(0, "baseline_key")])
    assert RAN == IN_TURNS


def test_an_unmodified_model_is_measured_once(measured):
    found = measured("plain", "timed", stages=())
    assert [*[("timed", "artifact")] * 4, ("plain", "artifact")] == RAN
    assert found.baseline == ()


def test_a_session_is_closed_when_an_eval_fails(measured, monkeypatch):
    monkeypatch.setattr(Plain, "run", lambda self, session, context: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measured("plain")
    assert OPEN == []


def test_an_unmodified_model_has_nothing_to_compare_with(measured):
    with pytest.raises(
        EvalError, match=r"pair: there is nothing to compare with\. Nothing was done to .*its own baseline"
    ):
        measured("pair", stages=())
    assert RAN == []


def test_an_unmodified_model_has_no_ratio_to_limit(measured):
    with pytest.raises(
        EvalError, match=r"gate plain: the limit is relative to the baseline\..*Set an absolute limit, without x"
    ):
        measured("plain", stages=(), gates={"plain": "<= 1.1x"})
    assert RAN == []


def test_nothing_is_measured_where_it_could_not_be_kept(measured, tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreError, match="store: cannot write the metrics"):
        measured("plain")
    assert RAN == []
