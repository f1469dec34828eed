"""What scorecard.json holds; `schema` is raised when its meaning changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, computed_field, field_validator, model_validator

from optkit.common.attachment import Attachment
from optkit.common.files import read_object, reading, shown, texts_of
from optkit.common.frozen import Frozen, canonical_json
from optkit.common.grouping import by_key
from optkit.common.own_files import ATTACHMENTS
from optkit.common.statistics import Estimate
from optkit.devices.memory_watch import MemoryTrace
from optkit.errors import ArtifactError
from optkit.measure import Metric
from optkit.recipe.gates import Of, Other, Verdict, overall, parse_gate
from optkit.scorecard.loading import Loading
from optkit.training.training_record import KEY, TrainingRecord

SCHEMA = 1
REMEDY = "Run its recipe again"
NAME_ONE = "Name a scorecard.json that `optkit run` wrote"
FEW = 3
"""Names, or reasons, that are told one by one."""
EXIT_STATUS = {Verdict.PASS: 0, Verdict.FAIL: 3, Verdict.INCONCLUSIVE: 4, Verdict.SKIPPED: 0}


class StepLine(Frozen):
    """One transform that made the weights."""

    model_config = ConfigDict(from_attributes=True)

    kind: str
    """Kind of the stage."""
    key: str
    """SHA-256 under which the store has it."""
    cached: bool
    """It lay in the store already."""
    seconds: float
    """What it took when it was made."""
    report: dict[str, Any] = {}
    """Its `Report`: changed, skipped, details, calibrated_on."""
    memory: MemoryTrace | None = None
    """What it needed when it was made; None if an earlier optkit made it."""

    @field_validator("report")
    @classmethod
    def _check_report(cls, report: dict[str, Any]) -> dict[str, Any]:
        read = report.get("calibrated_on") or ()
        if not isinstance(read, list | tuple):
            raise ValueError(f"it is calibrated on {shown(read)}")
        for texts in (report.get("skipped") or {}, *read):
            texts_of(texts)
        details = report.get("details") or {}
        if not isinstance(details, Mapping):
            raise ValueError(f"its details are {shown(details)}")
        if details.get(KEY) and not TrainingRecord.model_validate(details[KEY]).points:
            raise ValueError("its training has no loss")
        return report

    @property
    def changed(self) -> str:
        """How many it changed, and into what forms if there are several; empty for none."""
        if not (count := self.report.get("changed")):
            return ""
        forms = (self.report.get("details") or {}).get("formats")
        if not isinstance(forms, Mapping) or len(forms) < 2:
            return f"{count} changed"
        return f"{count} changed ({'; '.join(f'{each} to {form}' for form, each in forms.items())})"

    @property
    def skipped(self) -> str:
        """What the stage left alone and why; empty for nothing.
        It is told by name if it is little, else counted for each reason.
        """
        names = by_key((reason, name) for name, reason in (self.report.get("skipped") or {}).items())
        count = sum(map(len, names.values()))
        if not count or (count > FEW and len(names) > FEW):
            return f"{count} skipped" if count else ""
        if count > FEW and len(names) == 1:
            return f"{count} skipped ({next(iter(names))})"
        told = (f"{', '.join(its) if count <= FEW else len(its)} ({reason})" for reason, its in names.items())
        return f"{count} skipped: {', '.join(told)}"

    @property
    def did(self) -> str:
        """What it changed, what it skipped and what it was calibrated on, in one line."""
        texts = self.report.get("calibrated_on") or ()
        read = [f"calibrated on {text.get('dataset')} {text.get('split')}" for text in texts]
        return ", ".join(filter(None, [self.changed, self.skipped, *read]))


class GateResult(Frozen):
    """One limit of the recipe and whether this number keeps it."""

    key: str
    """The metric as the recipe names it, e.g. `decode_tokens_per_s[batch=1]`."""
    limit: str
    """Operator and number, e.g. `<= 1.10x`."""
    of: Of = ""
    """What the limit is relative to."""
    verdict: Verdict
    """The whole interval keeps the limit, breaks it, or the limit lies inside."""
    why: str = ""
    """Why the number, or that of the other model, could not be measured or compared."""

    @model_validator(mode="after")
    def _is_a_gate(self) -> Self:
        parse_gate(self.key, self.limit)
        return self


class Beside(Frozen):
    """The same number of another model than the unmodified one."""

    of: Other
    """Which model."""
    metric: Metric
    """Its number, by the same protocol."""
    ratio: float | None = None
    """Of the artifact's number to this one."""
    ratio_interval: tuple[float, float] | None = None
    """95%; None if the ratio has no error."""


class Measured(Frozen):
    """One number of the artifact beside the baseline's."""

    model_config = ConfigDict(allow_inf_nan=False)

    metric: Metric
    """The artifact's number."""
    baseline: Metric | None = None
    """None if the baseline has no such number, or one of another protocol."""
    ratio: float | None = None
    """Of the artifact's number to the baseline's."""
    ratio_interval: tuple[float, float] | None = None
    """95%; None if there is no ratio, or it has no error."""
    beside: tuple[Beside, ...] = ()
    """The number of further models, as far as it was measured by the same protocol."""
    gates: tuple[GateResult, ...] = ()
    """The recipe's limits to this number."""

    def number(self, of: Of) -> Estimate | None:
        """Return what a limit is set to: the artifact's number, or its ratio to another model's.
        None if there is none.
        """
        if not of:
            return None if self.metric.failure else Estimate(self.metric.value, self.metric.interval)
        found = self if of == "baseline" else next((each for each in self.beside if each.of == of), None)
        return None if found is None or found.ratio is None else Estimate(found.ratio, found.ratio_interval)


class Release(Frozen):
    """An artifact of before, whose scorecard this one is judged by."""

    name: str
    """Name of its recipe."""
    artifact_key: str
    """SHA-256 of its weights' key and settings."""
    created: str
    """ISO 8601, UTC."""


class Rung(Frozen):
    """The accuracy, or the speed, of the model after one stage."""

    stage: str
    """Kind of the stage; `unmodified` for the model, `settings` for what the settings add. Of
    speed also `engine` and `same engine`: the unmodified weights in the artifact's engine, without
    and with its other settings."""
    metrics: tuple[Metric, ...]
    """The first metric of each eval of accuracy; the divergence of the unmodified model from itself
    is left out. Of speed the tokens per second.
    """


class FileLine(Frozen):
    """A file beside the scorecard."""

    path: str
    """Below the artifact's directory."""
    media_type: str
    """Media type, e.g. `application/x-ndjson`."""
    size_bytes: int
    """Bytes of the file."""
    sha256: str
    """Digest of its bytes."""


class Scorecard(Frozen):
    """What an artifact cost and bought."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    """Version of the meaning of these fields."""
    name: str
    """Name of the recipe."""
    artifact_key: str
    """SHA-256 of the weights' key and the settings."""
    created: str
    """ISO 8601, UTC."""
    recipe: dict[str, Any]
    """As resolved and pinned."""
    steps: tuple[StepLine, ...] = ()
    """The transforms that made the weights, in order."""
    attribution: tuple[Rung, ...] = ()
    """The model, then after each stage, in order; empty if one stage alone changed the numbers."""
    speed: tuple[Rung, ...] = ()
    """The same of the speed; empty if engine and settings are those of the unmodified model."""
    memory: tuple[MemoryTrace, ...] = ()
    """What opening and measuring the models needed; with the steps' about 300 readings at most."""
    settings: tuple[str, ...] = ()
    """One line for each setting: what is in force on this device."""
    notes: tuple[str, ...] = ()
    """What the artifact's session said: what is in force, what fell back."""
    baseline_notes: tuple[str, ...] = ()
    """What the baseline's session said."""
    warnings: tuple[str, ...] = ()
    """Those of the notes that ask someone to act: what stages tell whoever deploys the artifact, and
    what evals warn of. `baseline: ` stands before those about it.
    """
    environment: dict[str, Any] = {}
    """Versions, device, driver and cores of the machine."""
    previous: Release | None = None
    """The earlier release, if the run was told of one (`--against`)."""
    rows: tuple[Measured, ...] = ()
    """The numbers, each beside the baseline's."""
    files: tuple[FileLine, ...] = ()
    """What evals and trainings left beside their numbers."""
    loading: tuple[Loading, ...] = ()
    """What other programs made of the artifact (`optkit verify`)."""

    @field_validator("recipe")
    @classmethod
    def _check_recipe(cls, recipe: dict[str, Any]) -> dict[str, Any]:
        for part in ("stages", "evals"):
            for entry in recipe.get(part) or ():
                if not isinstance(entry, Mapping) or not all(isinstance(fields, Mapping) for fields in entry.values()):
                    raise ValueError(f"{part}: {shown(entry)} is no kind with its fields")
        return recipe

    @model_validator(mode="before")
    @classmethod
    def _without_computed(cls, value: Any) -> Any:
        return (
            {key: each for key, each in value.items() if key not in {"verdict", "exit_status"}}
            if isinstance(value, Mapping)
            else value
        )

    @property
    def model_name(self) -> str:
        """How the recipe calls the model; empty if it does not."""
        model = self.recipe.get("model") or ""
        return str(model.get("name", "") if isinstance(model, Mapping) else model)

    @property
    def device(self) -> str:
        """Where it was measured, e.g. `cuda NVIDIA H200`."""
        return " ".join(str(told) for key in ("device", "device_name") if (told := self.environment.get(key)))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        """The worst verdict of any gate; PASS if there are none."""
        return overall([gate.verdict for row in self.rows for gate in row.gates])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_status(self) -> int:
        """0 pass, 3 a gate failed, 4 inconclusive."""
        return EXIT_STATUS[self.verdict]


def file_lines(files: Mapping[str, Attachment]) -> tuple[FileLine, ...]:
    """Return the lines of files, each with its place below the folder of attachments."""
    return tuple(
        FileLine(
            path=f"{ATTACHMENTS}/{place}",
            media_type=file.media_type,
            size_bytes=len(file.content),
            sha256=hashlib.sha256(file.content).hexdigest(),
        )
        for place, file in files.items()
    )


def to_json(scorecard: Scorecard) -> str:
    """Return the text of scorecard.json: the record with its verdict and exit status."""
    return json.dumps(scorecard.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path) -> Scorecard:
    """Return the scorecard in a file.
    Raises ArtifactError if it cannot be read, is damaged or of another schema.
    """
    record = read_object(path, ArtifactError, REMEDY)
    if "schema" not in record:
        raise ArtifactError("is JSON and no scorecard", where=str(path), why="There is no `schema`", remedy=NAME_ONE)
    if record["schema"] != SCHEMA:
        raise ArtifactError(
            f"the scorecard has schema {record['schema']}, and this optkit reads schema {SCHEMA}",
            where=str(path),
            remedy="Open it with the optkit that wrote it, or run its recipe again",
        )
    with reading(path, "the scorecard is damaged", REMEDY, ArtifactError):
        canonical_json(record)  # raises ValueError for infinity, which no JSON holds
        return Scorecard.model_validate(record)
