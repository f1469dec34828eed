"""Bytes on disk, and bits per weight recounted from what the files of the weights say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from optkit.measure import Eval, EvalContext, Metric, Opened
from optkit.model.checkpoint import Checkpoint
from optkit.model.companions import files_beside
from optkit.model.formats.base import Format
from optkit.model.layer_sizes import bits_per_weight
from optkit.model.shape import ModelShape
from optkit.model.task import EVERY_TASK, Task
from optkit_evals.zeros import PLACES, ROWS, share_of_zeros

PRUNED = 0.2
"""The least share of zeros that is worth a row."""


class Footprint(Eval):
    """What the model takes on disk: bytes of all files and of weights.
    It also gives bits per weight, overall and of the quantized layers.

    Of a pruned float checkpoint also the share of zeros, which saves no bytes.
    """

    kind: ClassVar[str] = "footprint"
    example: ClassVar[str] = "- footprint"
    version: ClassVar[int] = 4
    draws: ClassVar[bool] = False
    for_tasks: ClassVar[frozenset[Task]] = EVERY_TASK
    metrics: ClassVar[Mapping[str, str]] = {
        "size_bytes": "bytes",
        "weights_bytes": "bytes",
        "bits_per_weight": "bits",
        "bits_per_quantized_weight": "bits",
        "zeros": "fraction",
    }

    def foresee(self, shape: ModelShape) -> Mapping[str, float]:
        """Return the bytes of the weights, which are nearly those of all files."""
        return {"weights_bytes": shape.size_bytes, "size_bytes": shape.size_bytes}

    def run(self, session: Opened, context: EvalContext) -> list[Metric]:
        """Count.
        Raises EvalError if the layout of quantized weights is not known, SourceError if a file is
        damaged.
        """
        directory = Path(session.directory)
        format = Format.of(directory)
        files, layers = set(format.check(directory)), format.layer_sizes(directory)
        quantized = [layer for layer in layers if layer.quantized]
        deployed = {*files_beside(directory).values(), *files}
        all_tensors = "all tensors (scales, zero points, embeddings), per weight"
        found = [
            _metric("size_bytes", _size(deployed), "weights and every file beside them that deploys"),
            _metric("weights_bytes", _size(files), "files that hold weights"),
            _metric("bits_per_weight", bits_per_weight(layers), all_tensors),
        ]
        if quantized:
            protocol = "tensors of the quantized layers (scales, zero points), per weight of theirs"
            found.append(_metric("bits_per_quantized_weight", bits_per_weight(quantized), protocol))
        zeros = share_of_zeros(Checkpoint(directory)) if format.is_checkpoint and not quantized else None
        if zeros is not None and zeros >= PRUNED:
            protocol = f"weights of the blocks' linear layers that are 0, in {ROWS} rows of each, {PLACES} runs"
            found.append(_metric("zeros", zeros, protocol))
        return found


def _size(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _metric(name: str, value: float, protocol: str) -> Metric:
    unit = Footprint.metrics[name]
    return Metric(name=name, value=value, unit=unit, higher_is_better=name == "zeros", protocol=protocol)
