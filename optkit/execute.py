"""Run the steps of a plan that are not in the store yet.
Each reads one directory and fills another.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optkit.artifact import is_artifact, read_artifact
from optkit.common.byte_sizes import size_text
from optkit.common.files import object_if_any
from optkit.common.finite import refuse_not_finite
from optkit.common.grouping import some
from optkit.common.spans import mark, span
from optkit.devices.cpu_watch import make_room
from optkit.devices.memory_watch import MemoryWatch
from optkit.environment import describe_environment, package_version, unmet
from optkit.errors import MissingPackageError, ResourceError, StageError
from optkit.model.as_floats import as_floats, notes
from optkit.model.checkpoint import Checkpoint
from optkit.model.formats.base import Format
from optkit.model.inventory import extra_heads, take_inventory
from optkit.model.size_notes import notes_on_size
from optkit.plan import Plan, Step
from optkit.processes import signals
from optkit.recipe.recipe import UNPACKING
from optkit.source.lineage import DRAFT, Reader, models_in, texts_in, with_sketches, without_sketches
from optkit.source.models import IMPORT_VERSION, ModelSource, import_model, locate_model
from optkit.source.text_place import TextPlace
from optkit.stage import Context, Report, Transform
from optkit.store.durations import Durations
from optkit.store.store import Store


@dataclass(frozen=True)
class StepOutcome:
    """One transform as the scorecard tells it."""

    kind: str
    key: str
    cached: bool
    """It lay in the store; `seconds` is what it took when it was made."""
    seconds: float
    report: Mapping[str, Any]
    memory: Mapping[str, Any] | None = None
    """The `MemoryTrace` of when it was made; None if it was not read."""
    environment: Mapping[str, Any] | None = None
    """Versions and the machine that made it."""
    sha256: Mapping[str, str] | None = None
    """Digest of each file that it left."""


@dataclass(frozen=True)
class Execution:
    """The weights that a plan asked for."""

    weights: Path
    stored: Mapping[str, dict[str, Any]] | None
    """Files of the store's record; None if no stage made them: they are the user's own, or links
    into the hub's cache.
    """
    steps: tuple[StepOutcome, ...]
    calibrated_on: tuple[dict[str, str], ...]
    """The texts that shaped the weights: those of the model that the recipe starts from, then those
    of its steps.
    """
    imported: StepOutcome | None = None
    """How the model that the recipe starts from came into the store; None of one that is used where
    it lies.
    """


def execute(plan: Plan, store: Store, context: Context) -> Execution:
    """Return the weights of the last transform, running only what the store does not hold.

    Raises MissingPackageError, ResourceError and StageError before anything runs, StageError and
    SourceError from the stages.
    """
    for missing in missing_packages(plan):
        raise missing
    check_disk(plan, store)
    made: set[str] = set()
    last = len(plan.steps) - 1
    first = next(
        (index for index, step in enumerate(plan.steps) if step.stage and step in plan.pending), len(plan.steps)
    )
    check_texts(plan, store, context.data, materialize(plan, first - 1, store, context, made))
    inherited = _lineage(plan.recipe.model)
    drafts = [{**text, DRAFT: DRAFT} for entry in plan.recipe.settings for text in _lineage(*models_in(entry.value))]
    weights = materialize(plan, last, store, context, made)
    outcomes = _outcomes(plan.steps[1:], store, made)
    for step in outcomes:
        if step.cached:
            mark(f"step {step.kind}", kind=step.kind, key=step.key, status="stored")
    texts = [*inherited, *(text for step in outcomes for text in step.report.get("calibrated_on", ())), *drafts]
    return Execution(
        weights,
        store.record(plan.steps[last].key)["files"] if last else None,
        tuple(replace(step, report=without_sketches(step.report)) for step in outcomes),
        tuple(text for index, text in enumerate(texts) if text not in texts[:index]),
        next(iter(_outcomes(plan.steps[:1], store, made)), None),
    )


def materialize(plan: Plan, index: int, store: Store, context: Context, made: set[str]) -> Path:
    """Return the directory that step `index` leaves.
    The step and what it stands on run if the store does not hold it.

    The keys of the steps that ran are added to `made`.
    """
    signals.check()
    step = plan.steps[index]
    if index == 0 and (there := locate_model(plan.recipe.model)):
        return there
    if found := store.get(step.key) or store.fetch(step.key):
        store.forget_work(step.key)
        return found
    source = materialize(plan, index - 1, store, context, made) if index else None
    with store.lock(
        step.key,
        waiting=lambda: context.progress.say(f"{step.kind}: another run is at work on this step; waiting for it"),
    ):
        if found := store.get(step.key):
            return found
        if store.is_damaged(step.key):
            context.progress.warn(f"{step.kind}: its files in the store were changed or lost; they are made again")
        with (
            span(f"step {step.kind}", kind=step.kind, key=step.key, status="made") as told,
            store.write(step.key) as draft,
        ):
            make_room(context.progress)
            start = time.perf_counter()
            origin = (
                materialize(plan, _origin(plan), store, context, made)
                if step.stage and step.stage.reads_origin
                else None
            )
            its = replace(context, origin=origin, workspace=store.workspace(step.key), may_link=index > 1)
            with MemoryWatch(step.kind, context.device) as memory:
                report = run_step(plan, step, source, draft.model, its)
            draft.record.update(
                kind=step.kind,
                fields=step.stage.model_dump(mode="json") if step.stage else plan.recipe.model.model_dump(mode="json"),
                source_key=step.source_key,
                model=plan.recipe.model.name,
                seconds=(seconds := round(time.perf_counter() - start, 3)),
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                environment={**describe_environment(context.device), **_made_with(step)},
                report=asdict(report),
                memory=memory.traces[0].model_dump(mode="json"),
                earlier=[asdict(each) for each in _outcomes(plan.steps[:index], store, set())],
            )
            told(seconds=seconds, bytes=sum(path.stat().st_size for path in draft.model.rglob("*") if path.is_file()))
        # Only now: a kill before the step lies in the store leaves it unfinished, however many of its
        # blocks were done.
        context.progress.say(f"{step.kind}: kept in the store")
        read = plan.steps[max(0, index - 1)].size_bytes
        Durations(store.root, plan.device).note(step.kind, step.stage or plan.recipe.model, read, seconds)
        made.add(step.key)
        shutil.rmtree(store.workspace(step.key), ignore_errors=True)
    store.push(step.key)
    if left := store.get(step.key):
        return left
    raise StageError("what the step left is gone again", where=step.kind, why="Its files changed since it was made")


def run_step(plan: Plan, step: Step, source: Path | None, target: Path, context: Context) -> Report:
    """Run one step into `target`; something must have changed, and what was written can be read."""
    if step.stage is None or source is None:
        details = import_model(plan.recipe.model, target, context.progress)
        return Report(changed=len(Checkpoint(target).tensors), details=details)
    floats = as_floats(source, context.trust_remote_code, context.device) if step.unpacks else nullcontext(source)
    with floats as given:
        report = _transform(plan, step, step.stage, given, target, context)
    return replace(report, notes=(*notes(Checkpoint(source).shape), *report.notes)) if step.unpacks else report


def _transform(plan: Plan, step: Step, stage: Transform, source: Path, target: Path, context: Context) -> Report:
    """Return what a stage did, with the notes on its size and the fate of each tensor."""
    try:
        report = stage.run(source, target, context)
    except MemoryError as error:
        remedy = "Lower the samples or the sequence length"
        raise ResourceError("memory ran out", where=step.kind, remedy=remedy) from error
    if report.changed == 0:
        choosing = " and ".join(name for name in ("include", "exclude") if name in type(stage).model_fields)
        why, remedy = f"{len(report.skipped)} modules were skipped", "Take it out"
        remedy += choosing and f", or change its {choosing}"
        raise StageError("the stage changed nothing", where=step.kind, why=why, remedy=remedy)
    refuse_not_finite(report.details, step.kind)
    step.format.check(target)
    reader = Reader(source, context.data, context.trust_remote_code)
    read = with_sketches(report.calibrated_on, stage, reader)
    told = (*report.notes, *_blindness(step, source)) if read else report.notes
    if step.format is Format.QUANTIZED:
        left = (Checkpoint(each).shape for each in (source, target))
        told = (*told, *notes_on_size(plan.steps[0].shape, *left))
    report = replace(report, notes=told, calibrated_on=(*read, *_lineage(*models_in(stage))))
    return check_inventory(step, source, target, report)


def check_inventory(step: Step, source: Path, target: Path, report: Report) -> Report:
    """Return the report with what became of each tensor of the source: counts, and what was dropped.
    Of an export, whose tensors have other names, the heads that it cannot hold are told.

    Raises StageError for tensors that are lost.
    """
    if not Format.of(source).is_checkpoint:
        return report
    given = Checkpoint(source)
    heads = extra_heads(given.shape)
    if not step.format.is_checkpoint:
        why = f"{step.format.phrase} has no place for a head that proposes tokens"
        return replace(report, dropped={**dict.fromkeys(heads, why), **report.dropped})
    found = take_inventory(given.shape, Checkpoint(target).shape, report.dropped)
    if found.lost:
        raise StageError(
            f"{len(found.lost):,} of {len(given.tensors):,} tensors of the model are lost: {some(found.lost)}",
            where=step.kind,
            why="They are neither in what the stage left nor named as dropped",
            remedy="A stage that leaves tensors out says so in `Report.dropped`",
        )
    unnamed = dict.fromkeys(given.unnamed, "a file of weights that the index does not name")
    dropped = {**found.dropped, **given.left_out, **unnamed}
    kept = [head for head in heads if head not in dropped]
    notes = [f"not in what it leaves: {some([f'{name} ({why})' for name, why in dropped.items()])}"] if dropped else []
    notes += [f"{some(kept)}: of no decoder block that config.json counts; it travels unchanged"] if kept else []
    details = {**report.details, "tensors": dict(found.counts)}
    return replace(report, dropped=dropped, details=details, notes=(*report.notes, *notes))


def _origin(plan: Plan) -> int:
    """Return the place of the step whose model others learn from: the model, or its float weights."""
    return int([step.kind for step in plan.steps[1:2]] == [UNPACKING])


def check_texts(plan: Plan, store: Store, data: Path | None, directory: Path | None = None) -> None:
    """Let the stages and evals that will run refuse what they cannot read.
    Only texts and tokenizers that are here already are read.

    `directory` is what the first of them reads, in a run, which imports transformers; left out, it
    is looked for. Raises StageError, EvalError, SourceError.
    """
    running = directory is not None
    there = [step.directory for step in plan.steps if step.directory]
    directory = directory or (there[-1] if there else None)
    if directory is None:
        return
    place = TextPlace(directory, data, store.root / "counts", plan.recipe.model.trust_remote_code, running)
    for step in plan.pending:
        if step.stage:
            step.stage.check_texts(place)
    for each in plan.evals:
        if not (each.hit and each.baseline_hit):
            each.eval.check_texts(place)


def missing_packages(plan: Plan) -> Iterator[MissingPackageError]:
    """Yield an error for each package that a stage or an eval needs, not installed or too old."""
    wanted = [(step.kind, need) for step in plan.steps if step.stage for need in step.stage.needs()]
    rest, made = (*plan.recipe.settings, *plan.recipe.evals), plan.steps[-1].format
    wanted += [(entry.kind, need) for entry in rest for need in entry.value.requires]
    if any(not each.hit for each in plan.evals):
        wanted += [(f"evals of {made.kind}", " | ".join(each)) for each in made.libraries.values()]
    for kind, need in dict.fromkeys(wanted):
        yield from (MissingPackageError(missing, where=kind) for missing in unmet([need]))


def check_disk(plan: Plan, store: Store) -> None:
    """Raise ResourceError if what the missing steps will leave does not fit on the store's disk."""
    needed = plan.disk_bytes
    place = next(path for path in (store.root, *store.root.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ResourceError(
            f"the steps will write {size_text(needed)} and {size_text(free)} are free",
            where=str(store.root),
            remedy=f"Free some space, or {store.elsewhere}",
        )


def _blindness(step: Step, source: Path) -> tuple[str, ...]:
    """Return a note if a stage read text alone, and the model sees images."""
    sees = object_if_any(source / "config.json").get("vision_config")
    if not sees or any(getattr(text, "images", None) for text in texts_in(step.stage)):
        return ()
    can = isinstance(step.stage, Transform) and step.stage.sees_images
    advice = "; name some by `images`" if can else ""
    return (f"it read text alone and saw no image, which the model does in use{advice}",)


def _lineage(*models: ModelSource) -> tuple[dict[str, str], ...]:
    """Return the texts that shaped models before the recipe begins: of artifacts, those that they
    remember, without those of their drafts.
    """
    places = [place for place in map(locate_model, models) if place and is_artifact(place)]
    return tuple(text for place in places for text in read_artifact(place).record.calibrated_on if DRAFT not in text)


def _outcomes(steps: Sequence[Step], store: Store, made: set[str]) -> list[StepOutcome]:
    """Return what the transforms did.
    Of one that was pruned, it is what the record of a step after it says.
    """
    told: dict[str, Mapping[str, Any]] = {}
    for step in reversed(steps):
        if store.get(step.key):
            record = store.record(step.key)
            left = {name: facts["sha256"] for name, facts in record["files"].items()}
            told[step.key] = {**record, "sha256": left}
            told |= {each["key"]: each for each in record.get("earlier", ()) if each["key"] not in told}
    return [
        StepOutcome(
            step.kind,
            step.key,
            step.key not in made,
            its["seconds"],
            its["report"],
            *map(its.get, ("memory", "environment", "sha256")),
        )
        for step in steps
        if step.stage or step.key in told
        for its in (told[step.key],)
    ]


def _made_with(step: Step) -> dict[str, Any]:
    """Return what decides the bytes that a step leaves beside the machine and optkit's own packages."""
    import torch

    needs = step.stage.needs() if step.stage else ("gguf",)
    names = (re.split(r"[^\w-]", need)[0] for choice in needs for need in choice.split(" | "))
    packages = [f"{name}=={version}" for name in names if (version := package_version(name))]
    if step.stage:
        packages += step.stage.made_with().get("packages", ())
    return {
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "version of the step": step.stage.version if step.stage else IMPORT_VERSION,
        "packages": packages,
    }
