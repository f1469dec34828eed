"""Time models in turns with each other, so that what changes on the machine costs all of them the same."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from optkit.common.atomic import write_text_atomically
from optkit.common.grouping import grouped
from optkit.common.spans import span
from optkit.errors import EvalError
from optkit.measure import Eval, Found
from optkit.measuring.bench import Bench, Subject, Wanted
from optkit.measuring.fresh_process import Answer, answers, measure_apart
from optkit.plan import PlannedEval
from optkit.processes import signals
from optkit.progress import Named, Progress

LOST = "the rounds of an earlier sitting were damaged, and were taken again"
NUMBER = re.compile(r"\d+ of \d+|\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class TimedModel:
    """A model that is timed in turns with others."""

    subject: Subject
    wanted: Wanted
    name: str = ""
    """What bars and warnings call it."""


@dataclass
class Rounds:
    """The rounds that are over, each with one turn of every model; kept in a file if there is one.

    A round that was cut off is taken again, because turns of one round are neighbours.
    """

    file: Path | None = None
    over: int = 0
    sittings: int = 1
    """How many processes took them."""
    runs: dict[str, list[Answer]] = field(default_factory=dict)
    """The key of an eval's numbers of one model -> what was measured in its turns."""
    left: dict[str, str] = field(default_factory=dict)
    """The keys of models that failed, and why: they take no more turns."""
    lost: bool = False
    """Earlier rounds could not be read, or were of other models."""

    @classmethod
    def kept(cls, file: Path | None, keys: Collection[str]) -> Rounds:
        """Return the rounds that a file holds of models with these keys.
        There are none if there is no such file, or it was changed.
        """
        if file is None or not file.exists():
            return cls(file)
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
            runs = {key: [*map(Answer.from_json, run)] for key, run in said["runs"].items()}
            left, lost = dict(said["left"]), bool(said.get("lost"))
            if {*keys} <= runs.keys() | left.keys():
                return cls(file, int(said["over"]), int(said["sittings"]) + 1, runs, left, lost)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return cls(file, lost=True)

    def keep(self) -> None:
        """Note that one more round is over."""
        self.over += 1
        if self.file:
            runs = {key: [answer.to_json() for answer in run] for key, run in self.runs.items()}
            said = {"over": self.over, "sittings": self.sittings, "runs": runs, "left": self.left, "lost": self.lost}
            write_text_atomically(self.file, json.dumps(said, allow_nan=False))

    def forget(self) -> None:
        """Delete the file and its folder: its numbers lie in the store."""
        if self.file and self.file.exists():
            self.file.unlink()
            with suppress(OSError):
                self.file.parent.rmdir()


def in_turns(models: Sequence[TimedModel], index: int) -> Iterator[TimedModel]:
    """Yield the models of a round in the order of their turns.
    That is first to last, then last to first, and so on.
    """
    yield from models if index % 2 == 0 else reversed(models)


def time_in_turns(
    bench: Bench,
    models: Sequence[TimedModel],
    *,
    kept: Path | None = None,
    failed: Callable[[TimedModel, Exception], None] | None = None,
) -> None:
    """Run timed evals of several models, the unmodified one first, and keep all numbers or none.
    Two take their turns as baseline, artifact, artifact, baseline, and so on.

    A machine that slows down steadily then costs all the same, and one that changes at once costs
    neighbours the same. Each turn opens its model anew, so that no two are in memory together: in
    a process of its own for evals that ask for it.

    `kept` is a file for the rounds that are over, from which a killed run goes on. `failed` hears
    of a model whose turn fails, and the others go on without it; of the first, and without
    `failed`, the error is raised.
    """
    rounds = Rounds.kept(kept, {key for model in models for key, _ in model.wanted})
    benches = {id(model): _warning_once(bench, model.name) for model in models}
    if rounds.lost:
        bench.context.progress.warn(f"timings: {LOST}")
    racing = list(models)
    for model in models:
        if failed and (why := [rounds.left[key] for key, _ in model.wanted if key in rounds.left]):
            racing.remove(model)
            failed(model, EvalError(why[0]))
    for index in range(rounds.over, max(each.eval.turns() for model in models for _, each in model.wanted)):
        for model in list(in_turns(racing, index)):
            try:
                _take(benches[id(model)], model, index, rounds.runs)
            except Exception as error:
                if failed is None or model is models[0]:
                    raise
                racing.remove(model)
                rounds.left |= {key: str(error) for key, _ in model.wanted}
                failed(model, error)
        rounds.keep()
    for model in racing:
        for key, each in model.wanted:
            _pool(benches[id(model)], key, each, rounds)
    rounds.forget()


def together(lines: Sequence[str]) -> list[str]:
    """Return what all turns said: of lines that differ in numbers alone one, with the numbers of all."""
    return [_with_all_numbers(each) for each in grouped(lines, _without_numbers).values()]


def _without_numbers(line: str) -> str:
    """Return a line without its numbers, but for those of the configuration in front of the first colon."""
    configuration, colon, said = line.partition(": ")
    return f"{configuration}{colon}{NUMBER.sub('#', said)}"


def _with_all_numbers(lines: Sequence[str]) -> str:
    configuration, colon, said = lines[0].partition(": ")
    found = zip(*(NUMBER.findall(line.partition(": ")[2]) for line in lines), strict=True)
    numbers = iter([", ".join(each if len({*each}) > 1 else each[:1]) for each in found])
    return f"{configuration}{colon}{NUMBER.sub(lambda _: next(numbers), said)}"


class _WarningOnce(Named):
    """Gives each warning once, whatever its numbers are."""

    def __init__(self, progress: Progress, name: str) -> None:
        super().__init__(progress, name)
        self._warned = set[str]()

    def warn(self, line: str) -> None:
        if (said := _without_numbers(line)) not in self._warned:
            self._warned.add(said)
            super().warn(line)


def _warning_once(bench: Bench, model: str) -> Bench:
    return replace(bench, context=replace(bench.context, progress=_WarningOnce(bench.context.progress, model)))


def _take(bench: Bench, model: TimedModel, index: int, runs: dict[str, list[Answer]]) -> None:
    """Take one turn of a model, and note what it said when all of it is done."""
    signals.check()
    said = list[tuple[str, Answer]]()
    for measured, apart in ((_apart, True), (_here, False)):
        some = [(key, each) for key, each in model.wanted if each.eval.apart() == apart and index < each.eval.turns()]
        if some:
            start = time.perf_counter()
            kinds, keys = (", ".join(words) for words in ([each.kind for _, each in some], [key for key, _ in some]))
            with span(f"eval {kinds}", kind=kinds, key=keys, turn=index + 1, status="measured") as told:
                found = measured(bench, model.subject, index, [each.eval for _, each in some])
                told(seconds=(seconds := time.perf_counter() - start))
            shares = (replace(answer, seconds=seconds / len(some)) for answer in found)
            said += zip((key for key, _ in some), shares, strict=True)
    for key, answer in said:
        runs.setdefault(key, []).append(answer)


def _pool(bench: Bench, key: str, planned: PlannedEval, rounds: Rounds) -> None:
    """Keep the numbers of all turns of a model as those of one measurement."""
    run = rounds.runs[key]
    context = replace(
        bench.context,
        notes=together([line for each in run for line in each.notes]),
        warnings=together([line for each in run for line in each.warnings]),
    )
    pooled = Found(tuple(planned.eval.pool([each.found.metrics for each in run], context)), run[-1].found.attachments)
    stopped = [f"{planned.kind}: its turns were taken in {rounds.sittings} sittings"] if rounds.sittings > 1 else []
    lost = [f"{planned.kind}: {LOST}"] if rounds.lost else []
    of_sessions = dict.fromkeys(note for each in run for note in each.session_notes)
    said = [*of_sessions, *context.notes, *stopped, *lost]
    seconds, first = sum(each.seconds for each in run), run[0]
    bench.keep(key, planned, pooled, said, seconds, first.environment, context.warnings, first.memory)


def _apart(bench: Bench, subject: Subject, index: int, evals: Sequence[Eval]) -> list[Answer]:
    """Run a turn of timed evals in a fresh process."""
    return measure_apart(
        subject.weights(), subject.settings, evals, bench.device, subject.trust_remote_code, bench.context, index
    )


def _here(bench: Bench, subject: Subject, index: int, evals: Sequence[Eval]) -> list[Answer]:
    """Run a turn of timed evals in this process."""
    with bench.opened(subject) as session:
        return answers(session, evals, bench.context, bench.device, index)
