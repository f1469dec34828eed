"""What verification asks of the files of a model, whatever their format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from optkit.errors import MissingPackageError, OptkitError
from optkit.model.adapter import Adapter
from optkit.model.formats.base import Format
from optkit.model.formats.registry import resolve
from optkit.model.task import Task, task_of
from optkit.verification.check_result import Check


@dataclass(frozen=True)
class Weights:
    """What decides which engines are asked, with which packages, and how near they have to come."""

    format: Format
    config: Mapping[str, Any]
    """The parsed config.json."""
    task: Task
    method: str = ""
    """`quant_method` of config.json; empty for float weights and for other formats."""
    rounds_activations: bool = False
    adapter: Adapter | None = None
    """What lies beside packed weights."""


class ModelFiles:
    """The files of a model in a format that says of itself no more than that they are whole."""

    def __init__(self, format: Format, directory: Path) -> None:
        self.format = format
        self.directory = directory

    def checks(self) -> tuple[Check, ...]:
        """Check the files. Raises MissingPackageError for a format that cannot be read without."""
        try:
            files = self.format.check(self.directory)
        except MissingPackageError:
            raise
        except OptkitError as error:
            return (Check(name="weights", ok=False, detail=str(error)),)
        return (Check(name="weights", ok=True, detail=f"whole, in {' and '.join(path.name for path in files)}"),)

    def weights(self) -> Weights:
        """Return what is known of the weights; call it only if the checks hold."""
        config = self.format.shape(self.directory).config
        return Weights(self.format, config, task_of(config) or Task.GENERATION)


def model_files(format: Format, directory: Path) -> ModelFiles:
    """Return how the files of a format are verified."""
    return cast(ModelFiles, resolve(format.verification)(format, directory))
