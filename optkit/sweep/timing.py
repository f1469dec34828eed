"""The timings of a sweep, apart from all computing: its artifacts and the unmodified model in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path

from optkit.artifact import read_finished
from optkit.common.frozen import canonical_json, described, digest
from optkit.execute import materialize
from optkit.keys import Together
from optkit.measure import EvalContext
from optkit.measuring.bench import Bench, Subject, Wanted, known
from optkit.measuring.evaluation import context_of
from optkit.measuring.measurement import leave_out
from optkit.measuring.speed import speed_rungs
from optkit.measuring.turns import TimedModel, time_in_turns
from optkit.plan import Plan, make_plan
from optkit.progress import Progress
from optkit.store.store import Store


@dataclass(frozen=True)
class Timed:
    """The artifacts that are timed in turns with one baseline."""

    plans: Mapping[str, Plan]
    """Name of a combination -> its plan, whose timings have the keys of the group."""
    together: Together

    @property
    def identity(self) -> str:
        """The digest of who takes turns."""
        return digest([sorted(self.together.keys), sorted(self.together.formats)])


def timed_groups(plans: Mapping[str, Plan], store: Store) -> tuple[Timed, ...]:
    """Return who takes turns with whom.
    They are artifacts of one model with the same timed evals; those that time nothing are in none.
    """
    groups: dict[str, dict[str, Plan]] = {}
    for name, plan in plans.items():
        timed = [described(each.eval) for each in plan.evals if each.eval.timed]
        if timed:
            groups.setdefault(canonical_json([plan.baseline_key, plan.recipe.seed, timed]), {})[name] = plan
    return tuple(_group(group, store) for group in groups.values())


def _group(plans: Mapping[str, Plan], store: Store) -> Timed:
    together = reduce(or_, (plan.together for plan in plans.values()))
    again = {name: make_plan(plan.recipe, store, plan.device, others=together) for name, plan in plans.items()}
    return Timed(again, together)


def take_turns(
    group: Timed,
    directories: Mapping[str, Path],
    store: Store,
    data: Path | None,
    progress: Progress,
    failed: Callable[[str, Exception], None],
    *,
    again: bool = False,
) -> None:
    """Time the artifacts in these directories that have no timings yet, if one has none all of them.
    `failed` hears of each that cannot be timed; the others go on. `again` begins with the first
    round, whatever was kept of an earlier run.

    Raises what the unmodified model's timings raise.
    """
    plans = {name: group.plans[name] for name in directories}
    first = next(iter(plans.values()))
    wanted = {name: [(each.key, each) for each in plan.evals if each.eval.timed] for name, plan in plans.items()}
    if not again and all(known(store, key) for each in wanted.values() for key, _ in each):
        return
    texts = [text for directory in directories.values() for text in read_finished(directory).record.calibrated_on]
    context = EvalContext(seed=first.recipe.seed, progress=progress, data=data, calibrated_on=tuple(texts))
    bench = Bench(store, first.device, context, first.steps[0].size_bytes)
    models = {each.artifact_key: _model(name, each, directories[name], wanted[name]) for name, each in plans.items()}
    models.pop(first.baseline_key, None)
    baseline = TimedModel(
        Subject(
            lambda: materialize(first, 0, store, context_of(first, progress, data), set()),
            [entry.value for entry in first.baseline_settings],
            first.recipe.model.trust_remote_code,
        ),
        [(each.baseline_key, each) for each in first.evals if each.eval.timed and each.baseline_key],
        "unmodified",
    )
    named = {id(model): [name for name in plans if plans[name].artifact_key == key] for key, model in models.items()}

    def leave(model: TimedModel, error: Exception) -> None:
        if id(model) not in named:
            leave_out(bench, model, error)
        for name in named.get(id(model), ()):
            failed(name, error)

    further = _further(plans, store, data, progress)
    with store.using({step.key for plan in plans.values() for step in plan.steps}):
        kept = store.workspace(group.identity) / "turns.json"
        if again:
            kept.unlink(missing_ok=True)
        time_in_turns(bench, [baseline, *further, *models.values()], kept=kept, failed=leave)


def _further(plans: Mapping[str, Plan], store: Store, data: Path | None, progress: Progress) -> list[TimedModel]:
    """Return what is timed to tell where speed comes from; several artifacts may share it."""
    found = {}
    for plan in plans.values():
        for each in speed_rungs(plan, stages=True).further(plan, store, context_of(plan, progress, data)):
            found[tuple(key for key, _ in each.wanted)] = each
    return list(found.values())


def _model(name: str, plan: Plan, directory: Path, wanted: Wanted) -> TimedModel:
    settings = [entry.value for entry in plan.recipe.settings]
    subject = Subject(lambda: directory, settings, plan.recipe.model.trust_remote_code)
    return TimedModel(subject, wanted, name)
