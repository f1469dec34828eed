"""Bytes on disk, and bits per weight recounted from what the files of the weights say.
How much of them is 0 is told by some rows: reading all weights of a large model would take minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from optkit.common.grouping import grouped
from optkit.measure import Eval, EvalContext, Metric, Opened
from optkit.model.checkpoint import Checkpoint
from optkit.model.companions import files_beside
from optkit.model.formats.base import Format
from optkit.model.layer_sizes import bits_per_weight
from optkit.model.linear_layers import layers_of
from optkit.model.shape import ModelShape
from optkit.model.task import EVERY_TASK, Task
from optkit_evals.meanings import row

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
        """Return the bytes of the weights, which are nearly those of all files, and that floats are not quantized."""
        none = {} if shape.quant_method else {"bits_per_quantized_weight": 0.0}
        return {"weights_bytes": shape.size_bytes, "size_bytes": shape.size_bytes, **none}

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
            row(self, "size_bytes", _size(deployed), "weights and every file beside them that deploys"),
            row(self, "weights_bytes", _size(files), "files that hold weights"),
            row(self, "bits_per_weight", bits_per_weight(layers), all_tensors),
        ]
        if quantized:
            protocol = "tensors of the quantized layers (scales, zero points), per weight of theirs"
            found.append(row(self, "bits_per_quantized_weight", bits_per_weight(quantized), protocol))
        zeros = share_of_zeros(Checkpoint(directory)) if format.is_checkpoint and not quantized else None
        if zeros is not None and zeros >= PRUNED:
            protocol = f"weights of the blocks' linear layers that are 0, in {ROWS} rows of each, {PLACES} runs"
            found.append(row(self, "zeros", zeros, protocol))
        return found


def _size(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


ROWS = 64
"""Rows of a stored weight that are looked at, in PLACES runs that lie evenly spread over it."""
PLACES = 4


def share_of_zeros(checkpoint: Checkpoint) -> float | None:
    """Return the share of weights of the decoder blocks' linear layers that are 0.
    None if none of them is stored as floats.
    """
    from safetensors import safe_open

    zeros = weights = 0
    names = [f"{layer}.weight" for layer in layers_of(checkpoint.shape)]
    for path, inside in grouped(names, checkpoint.files.__getitem__).items():
        with safe_open(path, framework="pt") as file:
            for name in inside:
                stored = file.get_slice(name)
                for start, end in _runs(checkpoint.tensors[name].shape[0]):
                    part = stored[start:end]
                    if not part.is_floating_point():
                        break
                    zeros += part.numel() - int(part.float().count_nonzero())
                    weights += part.numel()
    return zeros / weights if weights else None


def _runs(rows: int) -> list[tuple[int, int]]:
    if rows <= ROWS:
        return [(0, rows)]
    length = ROWS // PLACES
    return [(start, start + length) for start in (place * (rows - length) // (PLACES - 1) for place in range(PLACES))]
