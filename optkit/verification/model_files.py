"""What verification asks of the files of a model, whatever their format, and how it tells a check in a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from optkit.common.frozen import Frozen
from optkit.common.grouping import some
from optkit.errors import MissingPackageError, OptkitError
from optkit.model.adapter import Adapter
from optkit.model.formats.base import Format
from optkit.model.formats.registry import resolve
from optkit.model.task import Task, task_of


class Check(Frozen):
    """One thing that was checked."""

    name: str
    ok: bool
    detail: str
    """What was checked, or what is wrong."""


def check_of(name: str, problems: list[str], detail: str) -> Check:
    """Return a check that holds if there are no problems; `detail` is what was checked."""
    return Check(name=name, ok=not problems, detail=some(problems) if problems else detail)


@dataclass(frozen=True)
class Weights:
    """What decides which engines are asked, with which packages, and how near they have to come."""

    format: Format
    config: Mapping[str, Any]
    """The parsed config.json."""
    task: Task
    method: str = ""
    """`quant_method` of config.json; empty for float weights and for other formats."""
    activation_bits: int = 0
    """To how few bits layers round their inputs; 0 if they do not."""
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


class GgufFiles(ModelFiles):
    """model.gguf: llama.cpp rounds the inputs of quantized layers to 8 bits."""

    def weights(self) -> Weights:
        rounds = any(size.quantized for size in self.format.layer_sizes(self.directory))
        return replace(super().weights(), activation_bits=8 * rounds)
