"""A sweep on a tiny model: what runs once, what is kept, and where it goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optkit_evals.throughput import Throughput

from optkit.artifact import read_artifact
from optkit.errors import OptkitError, ResourceError, StageError, StoreError, UsageError
from optkit.execute import run_step
from optkit.measure import Eval
from optkit.measuring import turns
from optkit.pipeline import read_scorecard
from optkit.scorecard import Scorecard
from optkit.sweep import run as sweeping
from optkit.sweep.executors.base import Order
from optkit.sweep.keep import parse_keep, to_delete
from optkit.sweep.record import RECORD, Status, SweepRecord, read_record
from optkit.sweep.run import Sweep, exit_status, sweep
from tests.support.sweeps import MATRIX, NAMES, Here, quick_throughput, recipe

Model = Callable[[str], Path]


class Desk:
    """A directory in which one sweep is run again and again."""

    def __init__(self, home: Path, model: Path, text: Path) -> None:
        self.home, self.model, self.text = home, model, text

    def run(self, executor: Here | None = None, timed: bool = False, out: str = "s", **how: Any) -> Sweep:
        changed = how.pop("changed", {})
        (self.home / "s.json").write_text(json.dumps(recipe(self.model, self.text, timed, **changed)))
        places = {"out": self.home / out, "store": self.home / f"store-{out}", "device": "cpu"}
        return sweep(self.home / "s.json", executor=executor or Here(), **places, **how)

    def numbers(self, name: str, out: str = "s") -> list[tuple[str, float]]:
        rows = read_scorecard(self.home / out / name).rows
        return [(row.metric.name, row.metric.value) for row in rows if row.metric.pairing != "paired_turns"]


@pytest.fixture
def desk(tmp_path: Path, tiny_model: Model, letters: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(Throughput, "run", quick_throughput)
    monkeypatch.setattr(Throughput, "pool", Eval.pool)
    return Desk(tmp_path, tiny_model("llama"), letters)


def statuses(record: SweepRecord) -> list[str]:
    return [str(entry.status) for entry in record.entries]


def test_each_combination_is_an_artifact_and_what_they_share_is_made_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def counted(plan: Any, step: Any, *given: Any) -> Any:
        ran.append(step.kind)
        return run_step(plan, step, *given)

    monkeypatch.setattr("optkit.execute.run_step", counted)
    executor = Here()
    done = desk.run(executor)
    assert executor.made == NAMES
    assert ran == ["cast", "rtn", "rtn", "rtn", "rtn"]
    assert statuses(done.record) == ["done"] * 4
    assert exit_status(done.record) == 0
    for name in NAMES:
        artifact = read_artifact(desk.home / "s" / name)
        artifact.check()
        assert artifact.record.name == f"s-{name}"
        assert read_scorecard(artifact.directory).rows
    assert read_record(desk.home / "s") == done.record
    again = Here()
    assert desk.run(again).record == done.record
    assert again.made == []


def test_the_next_recipe_is_the_nearest(desk: Desk) -> None:
    axes = {"stages.1.rtn.bits": [4, 8], "stages.0": ["bf16", "fp16"]}
    executor = Here()
    desk.run(executor, changed={"matrix": axes})
    assert executor.made == ["bits4-bf16", "bits8-bf16", "bits4-fp16", "bits8-fp16"]


def test_timings_come_last_in_turns_with_one_baseline(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    take = turns._take

    def seen(bench: Any, model: Any, index: int, runs: Any) -> None:
        place = model.subject.weights()
        events.append(place.name if place.parent == desk.home / "s" else "unmodified")
        take(bench, model, index, runs)

    monkeypatch.setattr(turns, "_take", seen)
    desk.run(Here(lambda order: events.append("make")), timed=True)
    assert events[:4] == ["make"] * 4
    assert events[4] == events[-1] == "unmodified"
    assert [event for event in events[4:] if event in NAMES] == [*NAMES, *reversed(NAMES)]
    cards = [read_scorecard(desk.home / "s" / name) for name in NAMES]
    baselines = {tuple(speed(card).baseline.samples) for card in cards}
    assert len(baselines) == 1
    for card in cards:
        assert len(speed(card).metric.samples) == 2
        assert speed(card).ratio is not None
        assert not any("measured earlier" in note for note in (*card.notes, *card.baseline_notes))
    events.clear()
    desk.run(timed=True)
    assert events == []


def speed(card: Scorecard) -> Any:
    return next(row for row in card.rows if row.metric.name == "decode_tokens_per_s")


def test_an_artifact_has_its_numbers_before_the_timings_are_taken(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    limits = {"decode_tokens_per_s": ">= 0.001x", "size_bytes": "<= 0.9x"}
    with monkeypatch.context() as patched:
        patched.setattr("optkit.sweep.timing.time_in_turns", stopped)
        with pytest.raises(KeyboardInterrupt):
            desk.run(timed=True, changed={"gates": limits})
    record = read_record(desk.home / "s")
    assert record
    assert statuses(record) == ["made"] * 4
    card = read_scorecard(desk.home / "s" / NAMES[0])
    assert {gate.key for row in card.rows for gate in row.gates} == {"size_bytes"}
    executor = Here()
    done = desk.run(executor, timed=True, changed={"gates": limits})
    assert executor.made == []
    assert statuses(done.record) == ["done"] * 4
    card = read_scorecard(desk.home / "s" / NAMES[0])
    assert {gate.key for row in card.rows for gate in row.gates} == {"size_bytes", "decode_tokens_per_s"}


@pytest.mark.parametrize("stop", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_sweep_that_was_stopped_goes_on_and_gives_the_same_numbers(desk: Desk, stop: int) -> None:
    def stopping(order: Order) -> None:
        if order.name == NAMES[stop]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        desk.run(Here(stopping))
    record = read_record(desk.home / "s")
    assert record
    assert len(record.having(Status.DONE)) == stop
    executor = Here()
    desk.run(executor)
    assert executor.made == NAMES[stop:]
    desk.run(out="other")
    assert [desk.numbers(name) for name in NAMES] == [desk.numbers(name, "other") for name in NAMES]


def test_a_failure_is_kept_with_its_reason_and_the_rest_goes_on(desk: Desk) -> None:
    def failing(order: Order) -> None:
        if order.name == NAMES[1]:
            raise ResourceError("memory ran out", where="rtn")

    done = desk.run(Here(failing))
    assert statuses(done.record) == ["done", "failed", "done", "done"]
    assert done.record.entry(NAMES[1]).reason == "rtn: memory ran out."
    assert exit_status(done.record) == 1
    again = Here()
    assert desk.run(again).record == done.record
    assert again.made == []
    retried = desk.run(again, retry=True)
    assert again.made == [NAMES[1]]
    assert statuses(retried.record) == ["done"] * 4


def test_what_cannot_even_be_planned_is_a_failure_too(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sweeping.make_plan

    def refusing(wanted: Any, *given: Any) -> Any:
        if wanted.name == f"s-{NAMES[0]}":
            raise StageError("no such layout", where="rtn")
        return plan(wanted, *given)

    monkeypatch.setattr(sweeping, "make_plan", refusing)
    assert statuses(desk.run().record) == ["failed", "done", "done", "done"]


def test_one_that_cannot_be_timed_keeps_its_scorecard_and_the_others_are_timed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = turns._take

    def failing(bench: Any, model: Any, index: int, runs: Any) -> None:
        if model.subject.weights().name == NAMES[2] and index == 1:
            raise ResourceError("memory ran out", where="throughput")
        take(bench, model, index, runs)

    with monkeypatch.context() as patched:
        patched.setattr(turns, "_take", failing)
        done = desk.run(timed=True)
    assert statuses(done.record) == ["done", "done", "failed", "done"]
    assert done.record.entry(NAMES[2]).reason == "its timings failed: throughput: memory ran out."
    assert desk.numbers(NAMES[2])
    assert speed(read_scorecard(desk.home / "s" / NAMES[3])).ratio is not None
    assert desk.run(timed=True).record == done.record
    assert statuses(desk.run(timed=True, retry=True).record) == ["done"] * 4


def test_nothing_begins_when_the_time_is_over(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(sweeping.time, "monotonic", lambda: clock[0])

    def slow(order: Order) -> None:
        clock[0] += 3000

    executor = Here(slow)
    done = desk.run(executor, max_hours=1)
    assert executor.limits == [3600, 600]
    assert statuses(done.record) == ["done", "done", "waiting", "waiting"]
    assert exit_status(done.record) == 0


def test_a_combination_that_changed_is_made_again_and_one_that_is_gone_is_forgotten(desk: Desk) -> None:
    desk.run()
    executor = Here()
    changed = {"matrix": {**MATRIX, "exclude": [{"stages.1.rtn.bits": 8}]}, "seed": 1}
    done = desk.run(executor, changed=changed)
    assert executor.made == NAMES[:2]
    assert [entry.name for entry in done.record.entries] == NAMES[:2]


def test_an_artifact_that_was_deleted_is_made_again(desk: Desk) -> None:
    desk.run()
    (desk.home / "s" / NAMES[3] / "scorecard.json").unlink()
    (desk.home / "s" / NAMES[2] / "optkit.json").unlink()
    for file in (desk.home / "s" / NAMES[2]).iterdir():
        file.unlink()
    executor = Here()
    desk.run(executor)
    assert executor.made == NAMES[2:]


@pytest.mark.parametrize(
    ("verdicts", "status"), [(["PASS", "FAIL"], 0), (["FAIL", "INCONCLUSIVE"], 4), (["FAIL"], 3), ([], 0)]
)
def test_the_exit_status_says_whether_one_can_be_shipped(verdicts: list[str], status: int) -> None:
    fields = {"assignment": {}, "recipe": "", "status": "done"}
    entries = [{"name": str(index), "verdict": verdict, **fields} for index, verdict in enumerate(verdicts)]
    record = SweepRecord.model_validate({"name": "s", "created": "", "entries": entries})
    assert exit_status(record) == status


def refusal(desk: Desk, **how: Any) -> OptkitError:
    with pytest.raises(OptkitError) as error:
        desk.run(**how)
    return error.value


def test_one_recipe_is_no_sweep(desk: Desk) -> None:
    (desk.home / "one.yaml").write_text("model: smollm2-135m\nevals: [footprint]\n")
    with pytest.raises(UsageError, match=r"one\.yaml: this is one recipe\. A sweep has a `matrix:`, or .*optkit run"):
        sweep(desk.home / "one.yaml")


def test_a_place_that_is_something_else_is_refused(desk: Desk) -> None:
    (desk.home / "file").write_text("")
    assert str(refusal(desk, out="file")).endswith("file: is a file. Name another directory with --out.")
    desk.run()
    said = str(refusal(desk, out=f"s/{NAMES[0]}"))
    assert said.endswith(
        f"{NAMES[0]}: is an artifact. The artifacts of a sweep lie below its directory. Name another "
        "directory with --out."
    )


def test_no_sweep_writes_beside_the_weights_of_a_model(desk: Desk) -> None:
    """Its record there would make the model another one."""
    said = str(refusal(desk, out=str(desk.model / "s")))
    why = "A sweep writes files there, and a model or a store has to stay as it is"
    assert said == f"{desk.model}/s: lies in {desk.model}. {why}. Name another directory with --out."
    assert not (desk.model / "s").exists()


def test_two_sweeps_never_write_one_directory(desk: Desk) -> None:
    def second(order: Order) -> None:
        said = str(refusal(desk, executor=Here()))
        assert said.endswith("another sweep is at work there. Wait for it, or name another directory with --out.")

    desk.run(Here(second))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "sweep.json: "),
        ('{"optkit_sweep": 2}', "the sweep has schema 2, and this optkit reads schema 1. Delete it: the artifacts"),
        ('{"optkit_sweep": 1}', "the record is damaged"),
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(StoreError) as error:
        read_record(tmp_path)
    assert said in str(error.value)


def test_weights_of_what_is_dominated_go_and_scorecards_stay(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "to_delete", lambda places, count, axes: [NAMES[1], NAMES[3]])
    done = desk.run(keep="best:2")
    assert [entry.weights for entry in done.record.entries] == [True, False, True, False]
    for name, weights in zip(NAMES, (True, False, True, False), strict=True):
        assert bool([*(desk.home / "s" / name).glob("*.safetensors")]) is weights
        assert desk.numbers(name)
    store = desk.home / "store-s" / "steps"
    assert len([*store.iterdir()]) == 3
    executor = Here()
    assert desk.run(executor, keep="best:2").record == done.record
    assert executor.made == []


def test_what_is_on_the_front_or_among_the_best_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranked:
        def __init__(self, name: str, rank: int | None, front: bool) -> None:
            self.place, self.rank, self.front = str(tmp_path / name), rank, front
            self.dominated_by = () if front else ("a",)

    entries = [Ranked("a", 1, True), Ranked("b", 2, True), Ranked("c", 3, False), Ranked("d", 4, False)]
    found = type("Found", (), {"entries": (*entries, Ranked("e", None, False))})
    monkeypatch.setattr("optkit.sweep.keep.compare", lambda places, axes: found)
    assert to_delete([tmp_path], 1) == ["c", "d"]
    assert to_delete([tmp_path], 3) == ["d"]


@pytest.mark.parametrize("text", ["3", "best", "best:0", "best:x"])
def test_keep_says_how_many(text: str) -> None:
    with pytest.raises(UsageError, match=rf"^--keep: '{text}' is not best:N\. Write --keep best:3\.$"):
        parse_keep(text)
