"""What runs and lists rely on of a step's record and of an eval's numbers.
Another optkit, or somebody else, may have written them: one that is none is as if it were not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, field_validator

from optkit.common.field_types import Form
from optkit.common.files import check_name_inside, shown
from optkit.devices.memory_watch import MemoryTrace
from optkit.errors import EvalError
from optkit.measure import Found

UNKNOWN = "1970-01-01T00:00+00:00"


class Machine(BaseModel):
    """What is relied on of the machine that a step was made on."""

    device: str | None = None
    cpu_threads: int | None = Field(default=None, ge=1, le=4096, strict=True)
    packages: tuple[str, ...] = ()


class _File(BaseModel):
    size_bytes: int = Field(ge=0, strict=True)
    sha256: Annotated[str, Form("^[0-9a-f]{64}$", "64 hexadecimal digits")]


class _Report(BaseModel):
    skipped: dict[str, str] | None = None
    details: dict[str, Any] | None = None
    calibrated_on: tuple[dict[str, str], ...] = ()


class _Outcome(BaseModel):
    kind: str
    seconds: float
    report: _Report
    memory: MemoryTrace | None = None
    environment: Machine | None = None


class _Earlier(_Outcome):
    key: str


class _Record(_Outcome):
    fields: dict[str, Any] | None = None
    source_key: str | None = None
    created: str = UNKNOWN
    earlier: tuple[_Earlier, ...] = ()
    files: dict[str, _File] = Field(min_length=1)

    @field_validator("files")
    @classmethod
    def _check_names(cls, files: dict[str, _File]) -> dict[str, _File]:
        for name in files:
            check_name_inside(name)
            if not Path(name).name:
                raise ValueError(f"{shown(name)} is no file")
        return files

    @field_validator("created")
    @classmethod
    def _check_time(cls, created: str) -> str:
        made_at({"created": created})
        return created


class _Measured(BaseModel):
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    memory: tuple[MemoryTrace, ...] = ()
    environment: dict[str, Any] = {}
    created: str = ""


def made_at(record: Mapping[str, Any]) -> float:
    """Return when a step was made, in seconds since 1970. Raises ValueError if its record has no such time."""
    try:
        return datetime.fromisoformat(record.get("created", UNKNOWN)).timestamp()
    except OverflowError as error:
        raise ValueError("no such year") from error


def is_record(found: Any) -> bool:
    """Say whether a value is the record of a step."""
    try:
        _Record.model_validate(found)
    except ValueError:
        return False
    return True


def is_measured(found: Any) -> bool:
    """Say whether a value is what an eval measured."""
    try:
        _Measured.model_validate(found)
        Found.from_json(found)
    except (ValueError, LookupError, TypeError, EvalError):
        return False
    return True
