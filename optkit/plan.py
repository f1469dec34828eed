"""What a run would do, known before it runs: steps and measurements, their keys, and whether the store has them.

A key is the SHA-256 of the canonical JSON of everything that decides a result, and of nothing else:

    model      {schema, model: {revision: "sha256:..."} or {name, revision: commit}, dtype}
    step       {schema, kind, version, fields, source: key of the input, seed}
    artifact   {schema, weights: key of the last step, settings: [{kind, version, fields}]}
    metric     {schema, eval, version, fields, seed, weights, settings}
               + {baseline: key} where the eval compares
               + {beside: artifact key of the other model, device, torch, transformers} where it is timed

Nothing here imports torch or reaches for the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import SerializeAsAny

from optkit.environment import device_name, package_version
from optkit.errors import StageError
from optkit.frozen import Frozen, digest
from optkit.measure import Eval
from optkit.model.shape import ModelShape
from optkit.recipe import EvalEntry, Recipe, SettingEntry, TransformEntry
from optkit.source.models import ModelSource, locate_model, model_shape
from optkit.stage import Cost, Format, Transform
from optkit.store import Store

SCHEMA = 1
"""Raised when the meaning of keys, or of what lies under them, changes: then nothing that was stored is found again."""


class Step(Frozen):
    """One directory of weights on the way to the artifact: the model itself, then what each transform leaves."""

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
    """Where it lies, where it is a hit."""
    format: Format
    cost: Cost
    """What it needs where it is no hit."""
    size_bytes: int
    """Bytes of the weights that it leaves."""


class Measurement(Frozen):
    """One eval of one model."""

    kind: str
    value: SerializeAsAny[Eval]
    subject: Literal["artifact", "baseline"]
    key: str
    hit: bool
    """The store has its metrics, and for a timed eval those of the model that was timed beside it."""


class Plan(Frozen):
    """Everything that a run of a recipe would do on a device."""

    recipe: Recipe
    """Pinned."""
    device: str
    steps: tuple[Step, ...]
    """The model first, then the transforms."""
    artifact_key: str
    """The weights together with the settings."""
    evals: tuple[Measurement, ...]
    """For each eval of the recipe the artifact's, then the baseline's where there is one."""

    @property
    def baseline_key(self) -> str:
        """Key of the unmodified model."""
        return self.steps[0].key

    @property
    def weights_key(self) -> str:
        """Key of the weights that the artifact holds."""
        return self.steps[-1].key

    @property
    def pending(self) -> tuple[Step, ...]:
        """The steps that have to run: the transforms after the last hit, and the model where it is not there yet."""
        last = max((index for index, step in enumerate(self.steps) if step.hit), default=-1)
        return tuple(step for index, step in enumerate(self.steps) if not step.hit and (index > last or index == 0))

    @property
    def disk_bytes(self) -> int:
        """Bytes that the pending steps will leave in the store."""
        return sum(step.cost.disk_bytes for step in self.pending)

    @property
    def ram_bytes(self) -> int:
        """Most bytes of main memory that a pending step will need."""
        return max((step.cost.ram_bytes for step in self.pending), default=0)

    @property
    def gpu_bytes(self) -> int:
        """Most bytes of GPU memory that a pending step will need."""
        return max((step.cost.gpu_bytes for step in self.pending), default=0)


def make_plan(recipe: Recipe, store: Store, device: str) -> Plan:
    """Return the plan of a pinned recipe.

    Raises StageError where a transform cannot read what the model or the stage before it is, SourceError where the model is gone.
    """
    steps = _plan_steps(recipe, store, device)
    settings = settings_identity(recipe.settings)
    artifact_key = make_artifact_key(steps[-1].key, settings)
    evals = _plan_evals(recipe, store, device, steps[0].key, steps[-1].key, settings)
    return Plan(recipe=recipe, device=device, steps=steps, artifact_key=artifact_key, evals=evals)


def make_model_key(model: ModelSource) -> str:
    """Return the key of a pinned model: a digest of content stands for itself, a commit for itself in its repository."""
    revision = model.revision or ""
    identity = {"revision": revision} if revision.startswith("sha256:") else {"name": model.name, "revision": revision}
    return digest({"schema": SCHEMA, "model": identity, "dtype": model.dtype})


def make_step_key(entry: TransformEntry, source_key: str, seed: int) -> str:
    """Return the key of what a transform leaves."""
    return digest({"schema": SCHEMA, **_identity(entry), "source": source_key, "seed": seed})


def make_artifact_key(weights_key: str, settings: Sequence[dict[str, Any]]) -> str:
    """Return the key of weights opened with settings."""
    return digest({"schema": SCHEMA, "weights": weights_key, "settings": list(settings)})


def make_metric_key(
    entry: EvalEntry, seed: int, weights_key: str, settings: Sequence[dict[str, Any]], circumstances: dict[str, Any] | None = None
) -> str:
    """Return the key of an eval's metrics; `circumstances` are the further things that decide them."""
    return digest(
        {
            "schema": SCHEMA,
            "eval": entry.kind,
            "version": entry.value.version,
            "fields": entry.value.model_dump(mode="json"),
            "seed": seed,
            "weights": weights_key,
            "settings": list(settings),
            **(circumstances or {}),
        }
    )


def settings_identity(settings: Sequence[SettingEntry]) -> list[dict[str, Any]]:
    """Return what keys and artifacts say about settings, in their order."""
    return [_identity(entry) for entry in settings]


def _identity(entry: TransformEntry | SettingEntry) -> dict[str, Any]:
    return {"kind": entry.kind, "version": entry.value.version, "fields": entry.value.model_dump(mode="json")}


def _plan_steps(recipe: Recipe, store: Store, device: str) -> tuple[Step, ...]:
    key = make_model_key(recipe.model)
    directory = locate_model(recipe.model) or store.get(key)
    shape = model_shape(recipe.model, directory)
    cost = Cost() if directory else Cost(disk_bytes=shape.size_bytes, ram_bytes=shape.block_bytes + shape.outside_bytes)
    steps = [_step("model", None, key, None, directory, _format_of(shape), cost, shape)]
    for entry in recipe.transforms:
        before = steps[-1]
        if before.format not in entry.value.accepts:
            raise StageError(
                f"reads {' or '.join(sorted(entry.value.accepts))} and gets {before.format}",
                where=entry.kind,
                why=f"{recipe.model.name if before.stage is None else before.kind} has no float weights any more",
                remedy="Start from the model's float weights",
            )
        key = make_step_key(entry, before.key, recipe.seed)
        cost, shape = entry.value.predict(shape, device)
        steps.append(_step(entry.kind, entry.value, key, before.key, store.get(key), entry.value.produces, cost, shape))
    return tuple(steps)


def _step(
    kind: str,
    stage: Transform | None,
    key: str,
    source_key: str | None,
    directory: Path | None,
    format: Format,
    cost: Cost,
    shape: ModelShape,
) -> Step:
    return Step(
        kind=kind,
        stage=stage,
        key=key,
        source_key=source_key,
        hit=directory is not None,
        directory=directory,
        format=format,
        cost=cost,
        size_bytes=shape.size_bytes,
    )


def _format_of(shape: ModelShape) -> Format:
    return Format.QUANTIZED if shape.config.get("quantization_config") else Format.CHECKPOINT


def _plan_evals(
    recipe: Recipe, store: Store, device: str, baseline: str, weights: str, settings: list[dict[str, Any]]
) -> tuple[Measurement, ...]:
    subjects: dict[Literal["artifact", "baseline"], tuple[str, list[dict[str, Any]]]] = {
        "artifact": (weights, settings),
        "baseline": (baseline, []),
    }
    opened = {subject: make_artifact_key(*of) for subject, of in subjects.items()}
    planned: list[Measurement] = []
    for entry in recipe.evals:
        keys: dict[Literal["artifact", "baseline"], str] = {}
        for subject, (key, applied) in subjects.items():
            circumstances: dict[str, Any] = {"baseline": baseline} if entry.value.compares else {}
            if entry.value.timed:
                circumstances |= {"beside": opened["baseline" if subject == "artifact" else "artifact"], **_machine(device)}
            if subject == "artifact" or not entry.value.compares:
                keys[subject] = make_metric_key(entry, recipe.seed, key, applied, circumstances)
        hits = {subject: store.get_json(key) is not None for subject, key in keys.items()}
        planned += [
            Measurement(
                kind=entry.kind,
                value=entry.value,
                subject=subject,
                key=key,
                hit=all(hits.values()) if entry.value.timed else hits[subject],
            )
            for subject, key in keys.items()
        ]
    return tuple(planned)


def _machine(device: str) -> dict[str, str | None]:
    return {"device": device_name(device), "torch": package_version("torch"), "transformers": package_version("transformers")}
