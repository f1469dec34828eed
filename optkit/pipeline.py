"""From a recipe to a scorecard: pin, plan, execute, publish, measure.
What is there is measured without making anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit import __version__
from optkit.artifact import Artifact, is_artifact, publish, read_finished, settings_of, standing, steps_of
from optkit.common.own_files import SCORECARD_HTML, SCORECARD_JSON, SCORECARD_MARKDOWN
from optkit.common.spans import span, tracing
from optkit.comparison.history import remember_artifact
from optkit.environment import planned_device, usable_device
from optkit.errors import ResourceError, StoreError, UnsoundError
from optkit.execute import Execution, check_texts, execute
from optkit.measuring.attribution import attribute, between
from optkit.measuring.earlier_release import earlier_release
from optkit.measuring.evaluation import context_of, measure_plan, metric_keys
from optkit.measuring.evaluation import evaluate as evaluate
from optkit.measuring.further import with_further
from optkit.measuring.measurement import Measurement
from optkit.measuring.speed import speed_rungs
from optkit.page import scorecard_page
from optkit.plan import Plan, make_plan
from optkit.progress import Progress, SilentProgress
from optkit.publishing.signing import Trusted, check_signature
from optkit.recipe.gate_places import require_earlier_release
from optkit.recipe.recipe import Recipe, load_recipe
from optkit.scorecard import Scorecard, file_lines, to_json, to_markdown
from optkit.scorecard.published import published_attachments, published_scorecard, without_places
from optkit.source.directory import left_out, without_processor
from optkit.source.lineage import models_in
from optkit.source.models import locate_model, places_of
from optkit.stage import Context
from optkit.store.out_directory import reserve, settle
from optkit.store.shared import open_store
from optkit.store.store import Store
from optkit.trust import allow_code, allow_directory, say_code
from optkit.verification.artifact_checks import check_artifact
from optkit.verification.registry import engine_names
from optkit.verification.result_file import keep_loading, read_loading, told_so_far
from optkit.verification.result_file import read_scorecard as read_scorecard
from optkit.verification.verify import Verified, verify_artifact

if TYPE_CHECKING:
    from optkit.session.opening import AnySession


def plan(
    recipe: Recipe | Path | str,
    *,
    model: str | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    store: Path | Store | None = None,
    data: Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Return what `run` would do; compute nothing.
    It has every step with its key, whether the store holds it, and what it will need.
    """
    wanted = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides=overrides, model=model)
    chosen = planned_device(device)
    shelf = open_store(store, progress)
    made = make_plan(wanted.pinned(data, progress=progress), shelf, chosen)
    check_texts(made, shelf, data)
    return with_further(made, shelf)


def run(
    recipe: Recipe | Path | str,
    *,
    model: str | None = None,
    overrides: Sequence[str] = (),
    out: Path | str | None = None,
    device: str | None = None,
    store: Path | Store | None = None,
    data: Path | None = None,
    retime: bool = False,
    verified: bool = False,
    against: Path | str | None = None,
    timings: bool = True,
    since: str | None = None,
    progress: Progress | None = None,
) -> Scorecard:
    """Make a recipe's artifact in `out` (`artifacts/NAME`) and return its scorecard.
    The artifact is measured beside the unmodified model.

    `model` takes the place of the recipe's, `overrides` are like `stages.0.gptq.group_size=32`,
    `data` is a directory with local copies of data sets. What the store holds is not done again,
    but for timings if `retime` is true. `verified`: every engine that is installed opens the
    artifact at the end; UnsoundError if its files do not pass the checks. `against` is an earlier
    release that gates are relative to: its artifact or scorecard.json, or `none` if there is none
    yet. Without `timings` the timed evals and their gates are left for `add_timings`. What was measured
    before `since`, the beginning of this run, is noted. Raises an OptkitError for everything that a
    user can cause.
    """
    progress = progress or SilentProgress()
    wanted = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides=overrides, model=model)
    require_earlier_release(wanted.gates, against)
    previous = earlier_release(against)
    chosen = usable_device(device)
    target = settle(Path(out) if out is not None else Path("artifacts") / wanted.name)
    shelf = open_store(store, progress)
    with (
        tracing(progress),
        span(f"run {wanted.name}", recipe=wanted.name, model=wanted.model.name, device=chosen) as told,
        reserve(target, shelf.root, places_of(models_in(wanted))),
        ExitStack() as held,
    ):
        whole = wanted.pinned(data, progress=progress)
        todo = make_plan(whole if timings else whole.untimed(), shelf, chosen)
        steps_between = [each for rung in between(todo) for each in rung.evals]
        speed = speed_rungs(todo, stages=True)
        keys = [*(step.key for step in todo.steps), *metric_keys(*todo.evals, *steps_between), *speed.keys]
        held.enter_context(shelf.using(keys))
        if known := standing(target, todo.artifact_key):
            read_loading(known)  # raises before anything is measured
        say_code(todo.recipe, progress)
        for gate in todo.doomed:
            progress.warn(gate)
        context = context_of(todo, progress, data)
        execution = execute(todo, shelf, context)
        record = _record(todo, execution, whole)
        artifact = publish(execution.weights, target, record, execution.stored)
        scorecard, measured = measure_plan(
            todo,
            shelf,
            context,
            artifact.directory,
            alone=todo.artifact_key == todo.baseline_key,
            steps=execution.steps,
            calibrated_on=execution.calibrated_on,
            retime=retime,
            previous=previous,
            speed=speed,
            since=since,
        )
        added = attribute(todo, measured, shelf, context, execution.calibrated_on)
        scorecard = _finish(artifact, todo, scorecard.model_copy(update={"attribution": added}), measured, shelf)
        told(key=todo.artifact_key, verdict=scorecard.verdict)
        if verified:
            _refuse_damaged(
                verify(target, device=chosen, trust_remote_code=wanted.model.trust_remote_code, progress=progress)
            )
            return read_scorecard(target)
    return scorecard


def add_timings(
    artifact: Artifact, todo: Plan, store: Store, context: Context, since: str, previous: Scorecard | None = None
) -> Scorecard:
    """Return the scorecard of an artifact with the timings of a plan, which the store holds by now.
    The artifact was made by `run` without `timings`; what was measured before `since` is noted.
    `previous` is the scorecard of an earlier release.
    """
    scorecard, measured = measure_plan(
        todo,
        store,
        context,
        artifact.directory,
        alone=todo.artifact_key == todo.baseline_key,
        steps=steps_of(artifact),
        calibrated_on=artifact.record.calibrated_on,
        since=since,
        previous=previous,
        speed=speed_rungs(todo, stages=True).known(store),
    )
    added = read_scorecard(artifact.directory).attribution
    return _finish(artifact, todo, scorecard.model_copy(update={"attribution": added}), measured, store)


def verify(
    artifact: Path | str,
    *,
    engines: Sequence[str] = (),
    pythons: Mapping[str, str] | None = None,
    device: str | None = None,
    tokens: int = 128,
    timeout_s: float = 1800,
    trust_remote_code: bool = False,
    signed_by: Trusted | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Check an artifact's files and what each engine makes of it beside optkit's own session.
    The result is kept in its scorecard, if that can be written.

    Without `engines` all are asked; with `signed_by`, which checks the signature first, none is.
    `pythons` says in which interpreter an engine is installed, if
    it is not our own. The logits after `tokens` tokens of a fixed text are compared. Raises
    UsageError for an interpreter that is not there, ArtifactError if the directory is no artifact
    or its run did not finish, SourceError if opening it would run code of others without
    `trust_remote_code`.
    """
    progress = progress or SilentProgress()
    found = read_finished(Path(artifact))
    signature = (check_signature(found, signed_by),) if signed_by else ()
    if signature and not (signature[0].ok and engines):
        checks = (*signature, *(check_artifact(found) if signature[0].ok else ()))
        return Verified(artifact=found.directory, artifact_key=found.record.key, checks=checks)
    trusted = allow_code(found, (), trust_remote_code, progress)
    told_so_far(found)  # raises before engines take minutes for what could not be kept
    done = verify_artifact(
        found,
        engines=engines or engine_names(),
        pythons=pythons or {},
        device=usable_device(device),
        tokens=tokens,
        timeout_s=timeout_s,
        trust_remote_code=trusted,
        progress=progress,
    )
    if done.loading:
        try:
            keep_loading(found, done.loading)
            if scorecard := told_so_far(found):
                _attach(found, scorecard)
        except (ResourceError, StoreError) as error:
            progress.warn(f"the result is kept nowhere: {error}")
    return done.model_copy(update={"checks": (*signature, *done.checks)})


def open_artifact(
    directory: Path | str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> AnySession:
    """Open an artifact, or a plain model directory, as it was measured.
    Its settings are applied and its packed weights used as they are.

    `progress` hears how far the reading of packed weights is. Raises ArtifactError if files of
    the artifact were lost or changed, or its run did not finish, SourceError if opening it would
    run code of others without `trust_remote_code`.
    """
    from optkit.session import open_session

    directory = Path(directory)
    if not is_artifact(directory):
        trusted = allow_directory(directory, trust_remote_code, progress or SilentProgress())
        return open_session(directory, (), usable_device(device), dtype, progress, trusted)
    artifact = read_finished(directory)
    artifact.check()
    settings = settings_of(artifact)
    trusted = allow_code(artifact, settings, trust_remote_code, progress or SilentProgress())
    return open_session(directory, settings, usable_device(device), dtype, progress, trusted)


def _finish(artifact: Artifact, todo: Plan, scorecard: Scorecard, measured: Measurement, store: Store) -> Scorecard:
    """Return the scorecard as it is published. Leave it beside the weights with its files, and a
    record of both in the store.
    """
    notes = (*scorecard.notes, *_left_out(todo))
    scorecard = scorecard.model_copy(update={"loading": read_loading(artifact), "notes": notes})
    files = published_attachments(measured.attachments, todo.recipe)
    scorecard = published_scorecard(scorecard, todo.recipe).model_copy(update={"files": file_lines(files)})
    artifact = artifact.replace_attachments({place: file.content for place, file in files.items()})
    _attach(artifact, scorecard)
    artifact.finish()
    remember_artifact(artifact, scorecard, store.root)
    return scorecard


def _attach(artifact: Artifact, scorecard: Scorecard) -> None:
    artifact.attach(SCORECARD_JSON, to_json(scorecard))
    artifact.attach(SCORECARD_MARKDOWN, to_markdown(scorecard))
    artifact.attach(SCORECARD_HTML, scorecard_page(scorecard, artifact.directory))


def _refuse_damaged(done: Verified) -> None:
    wrong = [f"{check.name}: {check.detail}" for check in done.checks if not check.ok]
    if wrong:
        raise UnsoundError(f"it was made, and it is not sound: {'; '.join(wrong)}", where=str(done.artifact))


def _left_out(todo: Plan) -> list[str]:
    """Return notes on the files of the user's own model directory that the artifact does not have."""
    directory = locate_model(todo.recipe.model)
    if not directory:
        return []
    notes = (left_out(directory, todo.recipe.model.trust_remote_code), without_processor(directory))
    return [note for note in notes if note]


def _record(todo: Plan, execution: Execution, recipe: Recipe) -> dict[str, Any]:
    said = {
        "name": recipe.name,
        "key": todo.artifact_key,
        "weights_key": todo.weights_key,
        "baseline_key": todo.baseline_key,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "optkit": __version__,
        "recipe": recipe.resolved(),
        "settings": tuple({entry.kind: entry.value.model_dump(mode="json")} for entry in recipe.settings),
        "steps": tuple(asdict(step) for step in execution.steps),
        "imported": asdict(replace(model, report={}, memory=None)) if (model := execution.imported) else None,
        "calibrated_on": execution.calibrated_on,
    }
    return dict(without_places(said, recipe))
