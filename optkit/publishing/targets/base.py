"""The contract of a target: its address, which files it would hold, and the upload.

Everything but `upload` is pure: it needs no network and no package of an extra.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from optkit.artifact import Artifact
from optkit.common.files import sha256_of
from optkit.errors import UsageError
from optkit.progress import Progress
from optkit.scorecard import Scorecard
from optkit.scorecard.gate_lines import gate_lines


@dataclass(frozen=True)
class Upload:
    """One file as a target will hold it."""

    name: str
    """Its place there, with `/` between folders."""
    size_bytes: int
    sha256: str
    """64 hexadecimal digits."""
    source: Path | bytes
    """Where it lies here, or what it holds."""

    @classmethod
    def of(cls, name: str, source: Path | bytes, sha256: str = "") -> Upload:
        """Return the upload of a file or of bytes; a digest that is known is not computed again."""
        if isinstance(source, bytes):
            return cls(name, len(source), hashlib.sha256(source).hexdigest(), source)
        return cls(name, source.stat().st_size, sha256 or sha256_of(source), source)


@dataclass(frozen=True)
class Shipment:
    """An artifact that is whole, and what is handed over of it."""

    artifact: Artifact
    scorecard: Scorecard
    files: tuple[Upload, ...]
    """The model, its card, its record and its scorecard."""

    def lineage(self) -> dict[str, str]:
        """Return where the artifact comes from and what its gates say, as texts `optkit.*`."""
        record, source = self.artifact.record, self.artifact.record.recipe["model"]
        previous = self.scorecard.previous
        said = {
            "artifact_key": record.key,
            "weights_key": record.weights_key,
            "baseline": f"{source['name']}@{source.get('revision') or ''}".rstrip("@"),
            "baseline_key": record.baseline_key,
            "parents": json.dumps([{"stage": step["kind"], "key": step["key"]} for step in record.steps]),
            "previous": previous.artifact_key if previous else "",
            "version": record.optkit,
            "verdict": str(self.scorecard.verdict) if list(gate_lines(self.scorecard)) else "no gates",
        }
        return {f"optkit.{name}": value for name, value in said.items() if value}


class Target(ABC):
    """A place that an address names; nothing is looked up before `upload`."""

    scheme: ClassVar[str]
    """What stands before `://`."""
    form: ClassVar[str]
    """What stands behind it, e.g. `owner/name[@revision]`."""
    secret_variables: ClassVar[tuple[str, ...]] = ()
    """Variables of the environment that hold its passwords and tokens, from nowhere else."""

    def __init__(self, address: str) -> None:
        """Parse what stands behind `://`. Raises UsageError: `self.refusal(what)`."""
        self.address = address

    def __str__(self) -> str:
        """Return the whole address."""
        return f"{self.scheme}://{self.address}"

    def refusal(self, what: str) -> UsageError:
        """Return the error for an address that cannot be followed."""
        return UsageError(what, where=str(self), remedy=f"Write it as {self.scheme}://{self.form}")

    @property
    @abstractmethod
    def place(self) -> str:
        """What the address means here and now, with the server: one line, without secrets."""

    @property
    def opened_as(self) -> str:
        """How programs name what lies there, for the card's examples; empty if they cannot."""
        return ""

    def uploads(self, shipment: Shipment) -> tuple[Upload, ...]:
        """Return every file that would be uploaded; without network."""
        return shipment.files

    @abstractmethod
    def upload(self, shipment: Shipment, files: tuple[Upload, ...], progress: Progress) -> dict[str, str]:
        """Upload the files and return what is known of them now, e.g. `url`.

        Raises PushError if the place refuses or cannot be reached, MissingPackageError without the
        package of its extra. A second call after a break goes on if the place can.
        """

    def secrets(self) -> tuple[str, ...]:
        """Return the values that no text may hold."""
        return tuple(filter(None, map(os.environ.get, self.secret_variables)))
