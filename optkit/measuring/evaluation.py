"""Measure the models of a plan and form their scorecard, for a run or an existing model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optkit.artifact import Artifact, is_artifact, measured_weights, read_finished, settings_of, steps_of
from optkit.common.spans import span, tracing
from optkit.environment import usable_device
from optkit.errors import UsageError
from optkit.execute import materialize
from optkit.measuring.bench import Subject
from optkit.measuring.earlier_release import earlier_release
from optkit.measuring.measurement import Measurement, measure
from optkit.measuring.speed import SpeedRungs, speed_rungs
from optkit.plan import Plan, PlannedEval, make_plan
from optkit.progress import Progress, SilentProgress
from optkit.recipe.gate_places import gate_places, require_earlier_release
from optkit.recipe.recipe import load_recipe
from optkit.scorecard import Scorecard, build_scorecard
from optkit.scorecard.published import located, published_scorecard
from optkit.stage import Context
from optkit.store.shared import open_store
from optkit.store.store import Store
from optkit.trust import allow_code, say_code


def evaluate(
    model: str,
    evals: Path | str,
    *,
    device: str | None = None,
    store: Path | None = None,
    data: Path | None = None,
    retime: bool = False,
    unmodified: str | None = None,
    against: Path | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Scorecard:
    """Measure a model, or an artifact beside its unmodified model; change nothing.
    The evals and gates are those of a YAML file.

    What the store holds is not measured again, but for timings if `retime` is true. `unmodified`
    is the place of the model that the artifact was made from, which its record does not say;
    SourceError if it is neither named nor found. `against` is as for `run`.

    Code that comes with the model is run only with `trust_remote_code`, whatever an artifact says
    of itself; SourceError if it needs that.
    """
    progress = progress or SilentProgress()
    shelf = open_store(store, progress)
    chosen = usable_device(device)
    previous = earlier_release(against)
    if is_artifact(Path(model)):
        artifact = read_finished(Path(model))
        artifact.check()
        allow_code(artifact, settings_of(artifact), trust_remote_code, progress)
        todo = _plan_of_artifact(artifact, evals, unmodified, data, shelf, chosen)
        alone = artifact.record.key == artifact.record.baseline_key
        steps, calibrated_on = steps_of(artifact), artifact.record.calibrated_on
        directory: Path | None = artifact.directory
    else:
        if unmodified is not None:
            raise UsageError(
                f"{model} is no artifact", where="--model", why="It is measured alone", remedy="Leave --model out"
            )
        asked = load_recipe(evals, model=model).trusting(trust_remote_code)
        todo = make_plan(asked.model_copy(update={"stages": ()}).pinned(data, progress=progress), shelf, chosen)
        if asked.stages:
            progress.say(f"{evals}: its stages are not applied; {model} is measured as it is")
        say_code(todo.recipe, progress)
        directory, alone, steps, calibrated_on = None, True, [], ()
    require_earlier_release(todo.recipe.gates, against, gate_places(evals))
    context = context_of(todo, progress, data)
    speed = SpeedRungs() if alone else speed_rungs(todo, stages=False)
    with (
        tracing(progress),
        span(f"eval {todo.recipe.name}", recipe=todo.recipe.name, model=todo.recipe.model.name, device=chosen),
        shelf.using([todo.steps[0].key, *metric_keys(*todo.evals), *speed.keys]),
    ):
        scorecard, _ = measure_plan(
            todo,
            shelf,
            context,
            directory,
            alone=alone,
            steps=steps,
            calibrated_on=calibrated_on,
            retime=retime,
            previous=previous,
            speed=speed,
        )
    return published_scorecard(scorecard, todo.recipe)


def measure_plan(
    todo: Plan,
    store: Store,
    context: Context,
    directory: Path | None,
    *,
    alone: bool,
    steps: Sequence[Any] = (),
    calibrated_on: tuple[dict[str, str], ...] = (),
    retime: bool = False,
    previous: Scorecard | None = None,
    speed: SpeedRungs | None = None,
    since: str | None = None,
) -> tuple[Scorecard, Measurement]:
    """Return the scorecard of an artifact's directory, and what was measured.
    Without a directory it is that of the unmodified model. `alone`: nothing was changed, so that
    there is no baseline.

    `steps` made the artifact; `previous` is the scorecard of an earlier release; `speed` has what
    is timed further; nothing is without it. What was measured before `since`, the beginning of this
    run, is noted. Raises what `measure` does.
    """
    trusted = todo.recipe.model.trust_remote_code
    unmodified = Subject(
        lambda: materialize(todo, 0, store, context, set()), [entry.value for entry in todo.baseline_settings], trusted
    )
    settings = [entry.value for entry in todo.recipe.settings]
    speed = speed or replace(speed_rungs(todo, stages=False), rungs=())
    measured = measure(
        todo,
        Subject(lambda: directory, settings, trusted) if directory else unmodified,
        None if alone else unmodified,
        store,
        data=context.data,
        progress=context.progress,
        calibrated_on=calibrated_on,
        retime=retime,
        further=speed.further(todo, store, context),
        since=since,
    )
    scorecard = build_scorecard(
        name=todo.recipe.name,
        artifact_key=todo.artifact_key,
        recipe=todo.recipe.resolved(),
        metrics=measured.metrics,
        baseline=measured.baseline,
        gates=todo.recipe.gates,
        steps=steps,
        memory=measured.memory,
        settings=[setting.describe(todo.device) for setting in settings],
        notes=[*todo.steps[0].cost.notes, *measured.notes],
        baseline_notes=measured.baseline_notes,
        warnings=measured.warnings,
        environment=measured.environment,
        previous=previous,
        same_engine=speed.same_engine(measured),
        speed=speed.waterfall(todo, measured),
        comparing={
            name for each in todo.evals for name in (each.eval.metrics if each.eval.compares else each.eval.contrasted)
        },
    )
    return scorecard, measured


def context_of(todo: Plan, progress: Progress, data: Path | None) -> Context:
    """Return what the stages of a plan get from outside."""
    trusted = todo.recipe.model.trust_remote_code
    return Context(device=todo.device, seed=todo.recipe.seed, progress=progress, data=data, trust_remote_code=trusted)


def metric_keys(*evals: PlannedEval) -> Iterator[str]:
    """Yield the keys of what evals measure of the artifact and of the unmodified model."""
    for each in evals:
        yield each.key
        if each.baseline_key is not None:
            yield each.baseline_key


def _plan_of_artifact(
    artifact: Artifact, evals: Path | str, unmodified: str | None, data: Path | None, store: Store, device: str
) -> Plan:
    """Return the plan of an artifact's recipe with other evals and gates."""
    made = located(load_recipe(artifact.record.recipe), artifact.directory.parent, unmodified)
    asked = load_recipe(evals, model=made.model.name)
    asked = asked.model_copy(update={"model": made.model, "stages": ()}).pinned(data)
    wanted = made.model_copy(update={"evals": asked.evals, "gates": asked.gates})
    todo = make_plan(wanted, store, device, measured_weights(artifact, store))
    return todo.model_copy(update={"artifact_key": artifact.record.key})
