"""What the parts of a model take on disk, whatever format they lie in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optkit.model.weight_files import holds_weights

NOT_DEPLOYED = frozenset({"scorecard.json", "scorecard.md", "loss_curve.svg"})


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
    """Return the bytes of a model directory: its weights and all files beside them, without scorecards and other formats' weights."""
    files = {path for path in root.rglob("*") if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)}
    beside = {path for path in files if not holds_weights(path) and path.name not in NOT_DEPLOYED}
    return sum(path.stat().st_size for path in beside | set(weights))
