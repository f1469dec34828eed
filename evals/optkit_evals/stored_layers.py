"""What the parts of a model take on disk, whatever format they lie in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optkit.source.directory import companions


@dataclass(frozen=True)
class StoredLayer:
    """What one module's tensors take, and how many weights they stand for; its bias belongs to it."""

    stored_bits: int
    weights: int
    quantized: bool


def bits_per_weight(layers: Sequence[StoredLayer]) -> float:
    """Return the bits stored over the weights that they stand for."""
    return sum(layer.stored_bits for layer in layers) / sum(layer.weights for layer in layers)


def deployed_bytes(root: Path, weights: Iterable[Path]) -> int:
    """Return the bytes of what deploys of a model directory.
    That is its weights and the files beside them, without optkit's own.
    """
    return sum(path.stat().st_size for path in {*companions(root).values(), *weights})
