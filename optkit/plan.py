"""What a run would do, known before it runs.
It has steps and measurements, their keys, and whether the store has them.

Nothing here imports torch or reaches for the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, SerializeAsAny

from optkit.common.frozen import Frozen
from optkit.environment import gpu_memory_bytes, memory
from optkit.errors import EvalError, StageError
from optkit.keys import Together, make_artifact_key, make_metric_key, make_step_key, settings_identity
from optkit.measure import Eval
from optkit.model.as_floats import unpacking
from optkit.model.cost import Cost
from optkit.model.mixed_dtypes import refuse_narrow
from optkit.model.packed_floats import float_shape, refuse_unopened, refuse_unsaid_codes
from optkit.model.session_memory import SessionMemory
from optkit.model.shape import ModelShape
from optkit.model.size_notes import notes_on_size
from optkit.model.task import Task
from optkit.model.unfound import refuse_unfound
from optkit.recipe.gates import foreseen_failures
from optkit.recipe.recipe import UNPACKING, EvalEntry, Recipe, SettingEntry, reads_floats
from optkit.recipe.rules import Start, broken_rules
from optkit.source.models import import_bytes, locate_model, model_key, model_shape, unpacking_note
from optkit.stage import Format, Transform
from optkit.store.durations import Durations
from optkit.store.store import Store


class Step(Frozen):
    """One directory of weights on the way to the artifact.
    The model itself is first, then comes what each transform leaves.
    """

    kind: str
    """Name of the stage; `model` for the model that the recipe starts from."""
    stage: SerializeAsAny[Transform] | None
    """None for the model."""
    key: str
    source_key: str | None
    """Key of the step that it reads; None for the model."""
    hit: bool
    """The store, or for a model the place that it comes from, has it already."""
    directory: Path | None
    """Its place, if it is on this machine."""
    remote: bool = False
    """It is a hit in the store that machines share, and not on this one."""
    format: Format
    cost: Cost
    """What it needs if it is no hit."""
    size_bytes: int
    """Bytes of the weights that it leaves."""
    unpacks: bool = False
    """It reads packed weights as floats."""
    shape: ModelShape = Field(exclude=True, repr=False)
    """Of the model that it leaves."""
    seconds: float | None = None
    """How long it will take, by what such steps took here; None if it is a hit, or none was made."""


class PlannedEval(Frozen):
    """One eval, of the artifact and of the unmodified model."""

    kind: str
    eval: SerializeAsAny[Eval]
    key: str
    """Key of the artifact's metrics."""
    baseline_key: str | None
    """Key of the unmodified model's metrics; None if there is one result of both or of it alone."""
    hit: bool
    """The store has the artifact's metrics, and for a timed eval also those of the model that was
    timed beside it.
    """
    baseline_hit: bool
    """The store has the unmodified model's metrics, or none are needed."""
    cost: Cost = Cost()
    """What measuring needs if it is no hit."""
    seconds: float | None = None
    """How long the artifact and the unmodified model will take to measure, as far as they are no
    hit; None if nobody knows.
    """

    def duration_of(self, key: str) -> str:
        """Return what its duration is remembered as, for the model whose metrics have a key."""
        whose = {self.baseline_key: "unmodified model", self.key: "artifact"}.get(key, "further model")
        return f"{self.kind} of the {whose}"

    @property
    def pending(self) -> bool:
        """Whether something has to be measured."""
        return not (self.hit and self.baseline_hit)


class Plan(Frozen):
    """Everything that a run of a recipe would do on a device."""

    recipe: Recipe
    """Pinned."""
    device: str
    steps: tuple[Step, ...]
    """The model first, then the transforms."""
    artifact_key: str
    """The weights together with the settings."""
    baseline_key: str
    """The unmodified model, without settings but for `baseline_settings`; equal to `artifact_key`
    if the recipe changes nothing.
    """
    evals: tuple[PlannedEval, ...]
    further: tuple[PlannedEval, ...] = ()
    """What is measured of further models, to tell where damage and speed come from."""
    together: Together = Field(exclude=True)
    """The models that are timed in turns."""
    baseline_settings: tuple[SettingEntry, ...] = ()
    """What the unmodified model is opened with too, because the device has no room for its weights
    alone.
    """
    doomed: tuple[str, ...] = ()
    """Gates of which it is known that they cannot pass, one sentence each."""
    forecasts: tuple[str, ...] = ()
    """What opening the artifact will need if a setting says where its weights lie, one line each."""

    @property
    def weights_key(self) -> str:
        """Key of the weights that the artifact holds."""
        return self.steps[-1].key

    @property
    def pending(self) -> tuple[Step, ...]:
        """The steps that have to run.
        They are the transforms after the last hit, and the model if it is missing.
        """
        last = max((index for index, step in enumerate(self.steps) if step.hit), default=-1)
        return tuple(step for index, step in enumerate(self.steps) if not step.hit and (index > last or index == 0))

    @property
    def fetched(self) -> tuple[Step, ...]:
        """The steps that come from the store that machines share: what the run begins with, and the
        unmodified model if something is measured.
        """
        needed = {max((index for index, step in enumerate(self.steps) if step.hit), default=0)}
        needed |= {0} if any(each.pending for each in self.evals) else set()
        return tuple(self.steps[index] for index in sorted(needed) if self.steps[index].remote)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the pending and the fetched steps will leave in the store."""
        return sum(step.cost.disk_bytes for step in self.pending) + sum(step.size_bytes for step in self.fetched)

    @property
    def ram_bytes(self) -> int:
        """Most bytes of main memory that a pending step or eval will need."""
        return max((each.cost.ram_bytes for each in self._pending), default=0)

    @property
    def gpu_bytes(self) -> int:
        """Most bytes of GPU memory that a pending step or eval will need."""
        return max((each.cost.gpu_bytes for each in self._pending), default=0)

    @property
    def _pending(self) -> tuple[Step | PlannedEval, ...]:
        return (*self.pending, *(each for each in (*self.evals, *self.further) if each.pending))


def make_plan(
    recipe: Recipe, store: Store, device: str, weights_key: str | None = None, others: Together | None = None
) -> Plan:
    """Return the plan of a pinned recipe.
    `weights_key` is that of its weights if they are there, whatever its stages leave today;
    `others` are models that its artifact is timed with beside the unmodified one.

    Raises StageError if a transform cannot read what the model or the stage before it is,
    EvalError if an eval needs longer sequences than the model was built for, SourceError if
    the model is gone, and what `Setting.check` raises.
    """
    key = model_key(recipe.model)
    directory = locate_model(recipe.model) or store.get(key)
    shape = model_shape(recipe.model, directory)
    format = _format_of(shape, directory)
    unpacks = format is Format.QUANTIZED and reads_floats(recipe.stages, shape.quant_method)
    given = Format.CHECKPOINT if unpacks else format
    _check_rules(recipe, Start.of(recipe.model.name, shape, given), device)
    if recipe.transforms and format in (Format.CHECKPOINT, Format.QUANTIZED):
        refuse_unsaid_codes(shape, recipe.model.name, recipe.transforms[0].kind == "cast")
    refuse_unfound(shape, next((entry.kind for entry in recipe.transforms if entry.value.finds_parts), ""))
    if recipe.evals:
        refuse_unopened(shape, recipe.model.name)
    steps, left = _plan_steps(recipe, store, device, key, directory, shape, unpacks)
    for setting in recipe.settings:
        setting.value.check(left, device, directory)
    for measured in recipe.evals:
        measured.value.check(device)
    weights_key = weights_key or steps[-1].key
    settings = settings_identity(recipe.settings)
    placing = (
        () if _has_room(shape, device) else tuple(entry for entry in recipe.settings if entry.value.places_weights)
    )
    beside = settings_identity(placing)
    told = [entry.value.forecast(left, device) for entry in recipe.settings]
    told += [f"{entry.kind}: for the unmodified model too, which has no room on {device} alone" for entry in placing]
    sessions = _session_memories(recipe, device, steps) if recipe.evals else None
    durations = Durations(store.root, device)
    opened = (weights_key, settings), (steps[0].key, beside)
    artifact_key, baseline_key = (make_artifact_key(*each) for each in opened)
    together = Together(frozenset({artifact_key, baseline_key}), frozenset({steps[0].format, steps[-1].format}))
    together = together | others if others else together
    planned = tuple(_plan_eval(entry, recipe.seed, store, device, *opened, together) for entry in recipe.evals)
    return Plan(
        recipe=recipe,
        device=device,
        steps=tuple(_timed_step(steps, index, recipe, durations) for index in range(len(steps))),
        artifact_key=artifact_key,
        baseline_key=baseline_key,
        together=together,
        evals=tuple(
            each.model_copy(update={"cost": cost, "seconds": durations.of_eval(each, shape.size_bytes)})
            for each, cost in zip(planned, _eval_costs(planned, sessions), strict=True)
        ),
        baseline_settings=placing,
        doomed=foreseen_failures(recipe.gates, [entry.value for entry in recipe.evals], device, left, shape),
        forecasts=tuple(filter(None, told)),
    )


def _check_rules(recipe: Recipe, start: Start, device: str) -> None:
    """Raise the first broken rule, as validation says it.
    It is for recipes made or changed in Python, and for what only the model tells.
    """
    for entry, message in broken_rules(recipe.stages, recipe.evals, start, (device,), lambda entry: ""):
        raise (EvalError if isinstance(entry, EvalEntry) else StageError)(message, where=f"recipe {recipe.name}")


def _has_room(shape: ModelShape, device: str) -> bool:
    """Whether the device could hold the weights; a GPU whose size nobody knows could."""
    size = memory().total_bytes if device == "cpu" else gpu_memory_bytes(device)
    return size is None or shape.size_bytes <= size


def _plan_steps(
    recipe: Recipe, store: Store, device: str, key: str, directory: Path | None, shape: ModelShape, unpacks: bool
) -> tuple[tuple[Step, ...], ModelShape]:
    """Return the steps, and the shape that the last of them leaves; `unpacks`: the first reads packed weights."""
    notes = tuple(filter(None, [unpacking_note(recipe.model, shape)]))
    cost = Cost(notes=notes)
    if directory is None:
        cost = Cost(disk_bytes=shape.size_bytes, ram_bytes=import_bytes(recipe.model, shape), notes=notes)
    model: dict[str, Any] = {"kind": "model", "stage": None, "key": key, "source_key": None}
    steps = [_step(store, directory, shape, **model, format=_format_of(shape, directory), cost=cost)]
    origin = shape
    for entry in recipe.transforms:
        before = steps[-1]
        key = make_step_key(entry, before.key, recipe.seed, unpacks)
        read, given = (float_shape(shape), Format.CHECKPOINT) if unpacks else (shape, before.format)
        cost, left = entry.value.predict_beside(read, device, origin)
        cost = unpacking(cost, shape, left, device) if unpacks else cost
        cost, shape = cost.noting(notes_on_size(steps[0].shape, read, left)), left
        made: dict[str, Any] = {"kind": entry.kind, "stage": entry.value, "key": key, "source_key": before.key}
        made |= {"format": entry.value.leaves(given), "cost": cost, "unpacks": unpacks}
        steps.append(_step(store, store.get(key), shape, **made))
        unpacks = False
        origin = shape if before is steps[0] and entry.kind == UNPACKING else origin
    return tuple(steps), shape


def _step(store: Store, directory: Path | None, shape: ModelShape, **fields: Any) -> Step:
    remote = directory is None and store.is_remote(fields["key"])
    hit = remote or directory is not None
    return Step(**fields, directory=directory, hit=hit, remote=remote, shape=shape, size_bytes=shape.size_bytes)


def _format_of(shape: ModelShape, directory: Path | None) -> Format:
    return (Format.of(directory) if directory else Format.CHECKPOINT).narrowed(shape.config, directory)


def _plan_eval(
    entry: EvalEntry,
    seed: int,
    store: Store,
    device: str,
    artifact: tuple[str, list[dict[str, Any]]],
    baseline: tuple[str, list[dict[str, Any]]],
    together: Together,
) -> PlannedEval:
    """Return an eval with its keys; each model is the key of its weights and what it is opened with."""
    measured = entry.value
    decisive = {"baseline": baseline[0]} if measured.compares else {}
    decisive |= {**(together.circumstances(device) if measured.timed else {}), **measured.circumstances(device)}

    def metric_key(weights: str, settings: list[dict[str, Any]]) -> str:
        beside = {"beside": together.beside(make_artifact_key(weights, settings))} if measured.timed else {}
        return make_metric_key(entry, seed, weights, settings, decisive | beside)

    key = metric_key(*(baseline if measured.of_unmodified else artifact))
    baseline_key = None if measured.compares or measured.of_unmodified else metric_key(*baseline)
    hit, baseline_hit = (each is None or store.get_json(each) is not None for each in (key, baseline_key))
    if measured.timed:
        hit = baseline_hit = hit and baseline_hit
    return PlannedEval(
        kind=entry.kind, eval=measured, key=key, baseline_key=baseline_key, hit=hit, baseline_hit=baseline_hit
    )


def session_memory(step: Step, settings: Sequence[SettingEntry], device: str) -> SessionMemory | None:
    """Return what opened weights take, None if a setting places them or nobody can; raises as `refuse_narrow`."""
    if step.shape.task is Task.UNKNOWN or any(entry.value.places_weights for entry in settings):
        return None
    dtype = next((name for entry in reversed(settings) if (name := entry.value.opened_dtype())), None)
    refuse_narrow(step.shape.config, step.format.computes_in or dtype, step.kind)
    graphs = any(entry.value.step_mode(device) == "cuda_graphs" for entry in settings)
    return SessionMemory(step.shape, device, dtype, step.format.computes_in, graphs)


def _session_memories(recipe: Recipe, device: str, steps: Sequence[Step]) -> tuple[SessionMemory, SessionMemory] | None:
    """Return what the artifact and the unmodified model take; None if a setting places the weights."""
    artifact, baseline = session_memory(steps[-1], recipe.settings, device), session_memory(steps[0], (), device)
    return (artifact, baseline) if artifact and baseline else None


def _eval_costs(planned: Sequence[PlannedEval], sessions: tuple[SessionMemory, SessionMemory] | None) -> Iterator[Cost]:
    """Yield what each eval needs if it has to be measured.
    The unmodified model stays open while others compare with it.
    """
    comparing = any(each.eval.compares and each.pending for each in planned)
    for each in planned:
        if sessions is None or not each.pending:
            yield Cost()
            continue
        artifact, baseline = sessions
        beside = baseline if comparing and not each.eval.timed else None
        costs = [each.eval.predict(baseline if each.eval.of_unmodified else artifact, beside)]
        if each.baseline_key and not each.baseline_hit:
            costs.append(each.eval.predict(baseline))
        yield Cost(ram_bytes=max(cost.ram_bytes for cost in costs), gpu_bytes=max(cost.gpu_bytes for cost in costs))


def _timed_step(steps: Sequence[Step], index: int, recipe: Recipe, durations: Durations) -> Step:
    """Return a step with how long it will take."""
    step = steps[index]
    if step.hit:
        return step
    seconds = durations.predict(step.kind, step.stage or recipe.model, steps[max(0, index - 1)].size_bytes)
    return step.model_copy(update={"seconds": seconds})
