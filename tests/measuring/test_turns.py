"""Several models in turns with the unmodified one: their order, their keys, rounds that outlive a kill."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optkit.common.frozen import digest
from optkit.errors import ResourceError
from optkit.keys import Together
from optkit.measure import EvalContext, Metric, TimedEval
from optkit.measuring.bench import Bench, Subject
from optkit.measuring.turns import TimedModel, time_in_turns
from optkit.plan import PlannedEval
from optkit.stage import Format
from optkit.store.store import Store
from tests.support.remembered import Lines

RAN: list[tuple[str, int]] = []


class Speed(TimedEval):
    """Counts its runs; a model named `broken` breaks, and one that is in `STOPPING` is as good as killed."""

    isolated: bool = False
    processes: int = 4

    def run(self, session: Any, context: EvalContext) -> list[Metric]:
        name = session.directory.name
        if name == "broken" and context.turn.index == 1:
            raise ResourceError("memory ran out", where="throughput")
        if (name, context.turn.index) == STOPPING:
            raise KeyboardInterrupt
        RAN.append((name, context.turn.index))
        context.progress.task("speed", 1)
        if name == "busy":
            context.notes.append(f"speed: {context.turn.index} runs in all")
            context.warn(f"speed, batch 1: others used 5% of the cores during {context.turn.index} of 3 repeats")
        return [
            Metric(name="speed", value=len(RAN), unit="", higher_is_better=True, protocol="p", pairing="paired_turns")
        ]


STOPPING: tuple[str, int] | None = None


class Session:
    notes = ()

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def close(self) -> None:
        """There is nothing to close."""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    RAN.clear()
    monkeypatch.setattr("optkit.session.open_session", lambda directory, *args, **kwargs: Session(directory))
    return Bench(Store(tmp_path / "store"), "cpu", EvalContext(), 1)


def models(*names: str) -> list[TimedModel]:
    def subject(name: str) -> Subject:
        return Subject(lambda: Path(name), ())

    def planned(name: str) -> PlannedEval:
        return PlannedEval(kind="speed", eval=Speed(), key=key(name), baseline_key=None, hit=False, baseline_hit=False)

    return [TimedModel(subject(name), [(key(name), planned(name))]) for name in names]


def key(name: str) -> str:
    return digest(name)


def samples(bench: Bench, name: str) -> list[float]:
    (metric,) = bench.store.take_json(key(name))["metrics"]
    return metric["samples"]


def warnings(said: Lines) -> list[str]:
    return [line for line in said.lines if line.startswith("warning")]


def test_a_round_goes_there_and_the_next_one_back(bench: Bench) -> None:
    time_in_turns(bench, models("unmodified", "a", "b"))
    there, back = ["unmodified", "a", "b"], ["b", "a", "unmodified"]
    assert [name for name, _ in RAN] == [*there, *back, *there, *back]
    assert [samples(bench, name) for name in there] == [[1, 6, 7, 12], [2, 5, 8, 11], [3, 4, 9, 10]]


def test_a_turn_says_whose_it_is(bench: Bench) -> None:
    said = Lines()
    named = [replace(model, name=name) for name, model in zip(("", "a"), models("unmodified", "a"), strict=True)]
    time_in_turns(replace(bench, context=EvalContext(progress=said)), named)
    assert said.lines == ["speed of 1", "a: speed of 1", "a: speed of 1", "speed of 1"] * 2


def test_a_warning_of_several_turns_comes_once_and_names_the_model(bench: Bench) -> None:
    said = Lines()
    named = [replace(model, name="the artifact") for model in models("busy")]
    time_in_turns(replace(bench, context=EvalContext(progress=said)), named)
    assert warnings(said) == [
        "warning: the artifact: speed, batch 1: others used 5% of the cores during 0 of 3 repeats"
    ]
    kept = bench.store.take_json(key("busy"))
    assert kept["warnings"] == [
        "speed, batch 1: others used 5% of the cores during 0 of 3, 1 of 3, 2 of 3, 3 of 3 repeats"
    ]
    assert kept["notes"] == ["speed: 0, 1, 2, 3 runs in all", *kept["warnings"]]


def test_a_round_that_was_cut_off_is_taken_again_and_no_other(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, seconds = tmp_path / "kept" / "turns.json", itertools.count()
    monkeypatch.setattr("optkit.measuring.turns.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    with monkeypatch.context() as patched:
        patched.setattr("tests.measuring.test_turns.STOPPING", ("a", 2), raising=True)
        with pytest.raises(KeyboardInterrupt):
            time_in_turns(bench, models("unmodified", "a"), kept=kept)
    assert len(RAN) == 5
    assert not (tmp_path / "store" / "metrics").exists()
    RAN.clear()
    time_in_turns(bench, models("unmodified", "a"), kept=kept)
    assert RAN == [("unmodified", 2), ("a", 2), ("a", 3), ("unmodified", 3)]
    entry = bench.store.take_json(key("a"))
    assert (entry["notes"], entry["seconds"]) == (["speed: its turns were taken in 2 sittings"], 4.0)
    assert samples(bench, "a") == [2, 3, 2, 3]
    assert not kept.exists()


@pytest.mark.parametrize("edit", ["{", "[]", '{"over": 3}', '{"over": 3, "sittings": 1, "runs": {"k": 4}}'])
def test_rounds_that_cannot_be_read_are_taken_again_and_it_is_said(bench: Bench, tmp_path: Path, edit: str) -> None:
    (tmp_path / "turns.json").write_text(edit)
    said = Lines()
    bench = replace(bench, context=EvalContext(progress=said))
    time_in_turns(bench, models("unmodified", "a"), kept=tmp_path / "turns.json")
    assert len(RAN) == 8
    assert warnings(said) == ["warning: timings: the rounds of an earlier sitting were damaged, and were taken again"]
    note = "speed: the rounds of an earlier sitting were damaged, and were taken again"
    assert bench.store.take_json(key("a"))["notes"] == [note]


def test_rounds_without_one_of_the_models_are_taken_again(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "turns.json").write_text(json.dumps({"over": 3, "sittings": 1, "runs": {}}))
    time_in_turns(bench, models("unmodified", "a"), kept=tmp_path / "turns.json")
    assert len(RAN) == 8


def test_the_others_go_on_without_one_that_fails(bench: Bench) -> None:
    said: list[str] = []
    time_in_turns(bench, models("unmodified", "broken", "a"), failed=lambda model, error: said.append(str(error)))
    assert said == ["throughput: memory ran out."]
    assert [name for name, _ in RAN].count("broken") == 1
    assert len(samples(bench, "a")) == len(samples(bench, "unmodified")) == 4
    assert bench.store.get_json(key("broken")) is None


def test_one_that_failed_takes_no_turn_after_a_kill_either(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    how = {"kept": tmp_path / "turns.json", "failed": lambda model, error: said.append(str(error))}
    with monkeypatch.context() as patched:
        patched.setattr("tests.measuring.test_turns.STOPPING", ("a", 2))
        with pytest.raises(KeyboardInterrupt):
            time_in_turns(bench, models("unmodified", "broken", "a"), **how)
    time_in_turns(bench, models("unmodified", "broken", "a"), **how)
    assert said == ["throughput: memory ran out."] * 2
    assert [name for name, _ in RAN].count("broken") == 1
    assert len(samples(bench, "a")) == 4


@pytest.mark.parametrize("names", [("broken", "a"), ("a", "broken")])
def test_without_the_unmodified_model_there_is_nothing_to_go_on_with(bench: Bench, names: tuple[str, str]) -> None:
    failed: Callable[..., None] | None = (lambda *_: None) if names[0] == "broken" else None
    with pytest.raises(ResourceError, match=r"^throughput: memory ran out\.$"):
        time_in_turns(bench, models(*names), failed=failed)
    assert not (bench.store.root / "metrics").exists()


def test_a_timing_names_the_others_that_took_turns_with_it() -> None:
    pair = Together(frozenset({"a", "u"}), frozenset({Format.CHECKPOINT}))
    assert (pair.beside("a"), pair.beside("u")) == ("u", "a")
    alone = Together(frozenset({"u"}), frozenset())
    assert alone.beside("u") == "u"
    more = pair | Together(frozenset({"b", "u"}), frozenset({Format.ONNX}))
    assert more.formats == {Format.CHECKPOINT, Format.ONNX}
    assert more.beside("a") == digest(["b", "u"])
    assert more.beside("u") == digest(["a", "b"])
