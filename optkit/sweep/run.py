"""A sweep from its recipes to their scorecards; what is on the disk says where it goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from optkit.artifact import is_artifact, read_artifact, read_finished
from optkit.common.frozen import digest
from optkit.common.own_files import SCORECARD_JSON
from optkit.environment import usable_device
from optkit.errors import ArtifactError, OptkitError
from optkit.measuring.earlier_release import earlier_release
from optkit.measuring.evaluation import context_of
from optkit.pipeline import add_timings, read_scorecard
from optkit.plan import Plan, make_plan
from optkit.progress import Progress, SilentProgress
from optkit.recipe.gate_places import require_earlier_release
from optkit.recipe.matrix import Combination
from optkit.recipe.matrix_reading import load_matrix
from optkit.scorecard import Scorecard
from optkit.source.lineage import models_in
from optkit.source.models import places_of
from optkit.store.out_directory import refuse_models
from optkit.store.shared import open_store
from optkit.store.store import Store
from optkit.sweep.executors.base import Executor, Needs, Order, Outcome, reason_of
from optkit.sweep.executors.local import LocalExecutor
from optkit.sweep.keep import delete_weights, parse_keep, to_delete
from optkit.sweep.order import nearest, ready
from optkit.sweep.record import Entry, Status, SweepRecord, Watcher, held, new_record, read_record, unwatched
from optkit.sweep.search import Search, chosen
from optkit.sweep.timing import Timed, take_turns, timed_groups

LOOK_S = 5.0
"""How often is looked whether a step is there that others wait for."""


@dataclass
class Sweep:
    """One run of a sweep."""

    name: str
    combinations: Sequence[Combination]
    directory: Path
    device: str
    store: Store
    progress: Progress
    data: Path | None = None
    executor: Executor = field(default_factory=LocalExecutor)
    watcher: Watcher = unwatched
    against: str | None = None
    """An earlier release, its artifact or scorecard.json, that gates are relative to."""
    retry: bool = False
    """Try again what failed."""
    retime: bool = False
    """Take all timings again."""
    keep: int | None = None
    """How many artifacts at least keep their weights; None: all."""
    axes: Sequence[str] = ()
    """The metrics by which they are compared for that."""
    until: float = float("inf")
    """Of the monotonic clock; no recipe is at work after it."""
    search: Search | None = None
    """Who proposes further combinations, one after another."""
    trusted: bool = False
    """The code of the model may run."""
    known: dict[str, Entry] = field(init=False, default_factory=dict)
    """What earlier runs left."""
    record: SweepRecord = field(init=False)
    plans: dict[str, Plan] = field(init=False, default_factory=dict)

    def run(self) -> SweepRecord:
        """Make and measure what is not there yet, then time all of it in turns.

        Raises StoreError if the directory cannot be used, and what timing the unmodified model
        raises.
        """
        kept = (self.store.root, *places_of(models_in([each.recipe for each in self.combinations])))
        with held(self.directory, kept):
            self._begin()
            with self.executor:
                self._make()
                self._search()
            self.record.write(self.directory)
            self._time()
            self._delete_weights()
            self.watcher(self.record, ())
            return self.record

    def place(self, name: str) -> Path:
        """Return the directory of a combination's artifact."""
        return self.directory / name

    def _begin(self) -> None:
        """Begin with the record of before and the combinations of now; each is planned."""
        before = read_record(self.directory) or new_record(self.name)
        self.known = {entry.name: entry for entry in before.entries}
        trials = len(self.combinations) + self.search.trials if self.search else 0
        self.record = before.model_copy(update={"name": self.name, "trials": trials, "entries": ()})
        for each in self.combinations:
            self._add(each)
        if not self.search:
            self.record.write(self.directory)

    def _add(self, combination: Combination) -> None:
        combination = combination.trusting(self.trusted)
        recipe = digest(combination.recipe.resolved())
        entry = self.known.get(combination.name)
        if entry is None or entry.recipe != recipe:
            entry = Entry(name=combination.name, assignment=dict(combination.assignment), recipe=recipe)
        entries = (*self.record.entries, self._standing(entry, combination))
        self.record = self.record.model_copy(update={"entries": entries})

    def _standing(self, entry: Entry, combination: Combination) -> Entry:
        """Return an entry as it is: its plan is made, and its artifact is looked for."""
        if entry.status is Status.FAILED and not self.retry and entry.artifact_key is None:
            return entry
        try:
            refuse_models(self.place(entry.name), places_of(models_in(combination.recipe)))
            plan = make_plan(combination.recipe.pinned(self.data, progress=self.progress), self.store, self.device)
        except OptkitError as error:
            return entry.model_copy(update={"status": Status.FAILED, "reason": reason_of(error)})
        self.plans[entry.name] = plan
        fresh = {"status": Status.WAITING, "reason": "", "timed_with": None, "weights": True}
        if entry.status is Status.FAILED and self.retry:
            entry = entry.model_copy(update=fresh)
        there = entry.status is not Status.WAITING and self._is_there(entry, plan)
        return entry if there else entry.model_copy(update={**fresh, "artifact_key": None})

    def _is_there(self, entry: Entry, plan: Plan) -> bool:
        directory = self.place(entry.name)
        if entry.artifact_key != plan.artifact_key or not (directory / SCORECARD_JSON).is_file():
            return False
        try:
            return is_artifact(directory) and read_finished(directory).record.key == plan.artifact_key
        except ArtifactError:
            return False

    def _make(self) -> None:
        """Make the artifacts that wait, the nearest first."""
        at_work: list[str] = []
        while waiting := {entry.name: self.plans[entry.name] for entry in self.record.having(Status.WAITING)}:
            left = self.until - time.monotonic()
            if left <= 0:
                self.executor.stop()
                self.progress.say(f"the time is over: {len(waiting)} combinations wait for the same command")
                return
            for name in self._next(waiting, at_work):
                at_work.append(name)
                self.watcher(self.record, at_work)
                self.executor.begin(self._order(name))
            limit_s = min(left, LOOK_S) if self.executor.together and len(at_work) < len(waiting) else left
            for name, outcome in self.executor.ended(
                self.progress, limit_s if limit_s < float("inf") else None
            ).items():
                at_work.remove(name)
                self._note(name, outcome)
                self.watcher(self.record, at_work)

    def _next(self, waiting: Mapping[str, Plan], at_work: Collection[str]) -> list[str]:
        """Return the combinations to begin now."""
        if self.executor.together:
            return ready(waiting, at_work, lambda key: bool(self.store.get(key)) or self.store.is_remote(key))
        done = self.record.having(Status.MADE, Status.DONE)
        return [nearest(waiting, {step.key for entry in done for step in self.plans[entry.name].steps})]

    def _search(self) -> None:
        """Make what the search proposes, one after another."""
        if self.search is None or self.record.having(Status.WAITING):
            return
        for each in self.search.proposed(self._measured, self.progress):
            self._add(each)
            self._make()
            if self.record.having(Status.WAITING):
                return
        if (found := len(self.record.entries)) < self.record.trials:
            self.progress.say(f"the search ends: there are no other combinations than these {found}")
            self.record = self.record.model_copy(update={"trials": found})

    def _measured(self, combination: Combination) -> Scorecard | None:
        return (
            read_scorecard(self.place(combination.name)) if self.record.entry(combination.name).artifact_key else None
        )

    def _order(self, name: str) -> Order:
        plan = self.plans[name]
        return Order(
            name,
            plan.recipe,
            self.place(name),
            self.device,
            self.store.root,
            self.data,
            self.against,
            self.record.created,
            Needs.of(plan),
        )

    def _note(self, name: str, outcome: Outcome) -> None:
        if outcome.verdict is None and not outcome.reason:
            return  # the time was over
        plan = self.plans[name]
        timed = any(each.eval.timed for each in plan.evals)
        status = Status.FAILED if outcome.reason else Status.MADE if timed else Status.DONE
        key = None if outcome.reason else plan.artifact_key
        self._change(
            name,
            status=status,
            reason=outcome.reason,
            artifact_key=key,
            seconds=outcome.seconds,
            verdict=outcome.verdict,
        )

    def _change(self, name: str, **changes: object) -> None:
        self.record = self.record.with_entry(self.record.entry(name).model_copy(update=changes))
        self.record.write(self.directory)

    def _time(self) -> None:
        """Take the timings of what is made, and complete the scorecards with them."""
        there = [entry for entry in self.record.entries if entry.artifact_key]
        groups = self._groups(there)
        if any(self._lacks_timings(name, group) for group in groups for name in group.plans):
            # Those without weights cannot take turns with new ones; their old timings stay.
            groups = self._groups([entry for entry in there if entry.weights])
        for group in groups:
            if any(self._lacks_timings(name, group) for name in group.plans):
                self.watcher(self.record, ("timings",))
                self._time_group(group)

    def _groups(self, entries: Sequence[Entry]) -> tuple[Timed, ...]:
        return timed_groups({entry.name: self.plans[entry.name] for entry in entries}, self.store)

    def _lacks_timings(self, name: str, group: Timed) -> bool:
        entry = self.record.entry(name)
        return self._is_sound(name) and entry.weights and (self.retime or entry.timed_with != group.identity)

    def _time_group(self, group: Timed) -> None:
        racing = {name: self.place(name) for name in group.plans if self._is_sound(name)}
        again = self.retry or self.retime
        take_turns(group, racing, self.store, self.data, self.progress, self._failed_timing, again=again)
        earlier = earlier_release(self.against)
        for name in filter(self._is_sound, racing):
            self._complete(name, group, earlier)

    def _is_sound(self, name: str) -> bool:
        return self.record.entry(name).status is not Status.FAILED

    def _delete_weights(self) -> None:
        """Delete the weights of what is dominated, as far as `keep` allows it."""
        there = [entry.name for entry in self.record.having(Status.DONE)]
        if self.keep is None or len(there) <= self.keep:
            return
        for name in to_delete([self.place(name) for name in there], self.keep, self.axes):
            self._change(name, weights=False)
        kept = {entry.name: self.plans[entry.name] for entry in self.record.having(Status.DONE) if entry.weights}
        for name in set(there) - set(kept):
            delete_weights(self.place(name), self.plans[name], kept, self.store)

    def _failed_timing(self, name: str, error: Exception) -> None:
        self._change(name, status=Status.FAILED, reason=f"its timings failed: {reason_of(error)}")
        self.watcher(self.record, ("timings",))

    def _complete(self, name: str, group: Timed, earlier: Scorecard | None) -> None:
        plan = group.plans[name]
        context = context_of(plan, self.progress, self.data)
        artifact = read_artifact(self.place(name))
        scorecard = add_timings(artifact, plan, self.store, context, self.record.created, earlier)
        self._change(name, status=Status.DONE, timed_with=group.identity, verdict=str(scorecard.verdict))


def exit_status(record: SweepRecord) -> int:
    """Return 1 if a combination failed; else 0 if one passes its gates, 4 if one may, 3 if none does."""
    verdicts = {entry.verdict for entry in record.entries if entry.verdict}
    if record.having(Status.FAILED):
        return OptkitError.exit_status
    return 0 if "PASS" in verdicts or not verdicts else 4 if "INCONCLUSIVE" in verdicts else 3


def sweep(
    recipe: Path | str,
    *,
    overrides: Sequence[str] = (),
    model: str | None = None,
    trust_remote_code: bool = False,
    out: Path | None = None,
    device: str | None = None,
    store: Path | None = None,
    data: Path | None = None,
    max_hours: float | None = None,
    against: Path | str | None = None,
    retry: bool = False,
    retime: bool = False,
    keep: str | None = None,
    axes: Sequence[str] = (),
    require: Sequence[str] = (),
    best: str | None = None,
    trials: int | None = None,
    sampler: str | None = None,
    seed: int = 0,
    executor: Executor | None = None,
    watcher: Watcher = unwatched,
    progress: Progress | None = None,
) -> Sweep:
    """Make, measure and time every combination of a recipe's matrix below `out` (`artifacts/NAME`).

    `overrides` are those of `run`; one with several values, `stages.0.gptq.bits=3,4`, is an axis.
    `against` is that of `run`. The same call goes on with what is not finished; what failed is
    tried again with `retry`, timings with `retime`. Of more combinations than can be made, `trials`
    are chosen by the `sampler` with `seed`: `grid` takes the first, `random` draws, `tpe` searches
    for what is `best` and `nsga2` for the front along `axes`, both within the gates and what `require`
    says. `keep`: as in `best:3`, the weights of others are deleted if they are dominated by `axes`.
    No recipe is at work after `max_hours`; the timings of what is made come then. Raises RecipeError
    with every problem of any combination, UsageError if there is but one recipe, and what `chosen` does.
    """
    began = time.monotonic()
    matrix = load_matrix(recipe, overrides, model)
    matrix.require_varied(recipe, "Run it with `optkit run`")
    progress = progress or SilentProgress()
    combinations, search = chosen(
        matrix, sampler, trials, seed, best=best, axes=axes, require=require, progress=progress
    )
    for each in combinations or matrix.first(1):
        require_earlier_release(each.recipe.gates, against)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", matrix.name).strip("-.") or "sweep"
    found = Sweep(
        name=name,
        combinations=combinations,
        directory=out or Path("artifacts") / name,
        device=usable_device(device),
        store=open_store(store, progress),
        progress=progress,
        data=data,
        against=None if against is None else str(against),
        executor=executor or LocalExecutor(),
        watcher=watcher,
        retry=retry,
        retime=retime,
        keep=None if keep is None else parse_keep(keep),
        axes=axes,
        until=began + max_hours * 3600 if max_hours else float("inf"),
        search=search,
        trusted=trust_remote_code,
    )
    found.run()
    return found
