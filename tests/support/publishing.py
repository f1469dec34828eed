"""Artifacts of weights that no recipe made."""

from pathlib import Path

from optkit.artifact import Artifact, publish, read_artifact
from optkit.store.out_directory import reserve

RECORD = {
    "name": "tiny",
    "key": "a" * 64,
    "weights_key": "b" * 64,
    "baseline_key": "c" * 64,
    "created": "2025-01-01T00:00:00+00:00",
    "optkit": "0.1.0",
    "recipe": {"model": {"name": "tiny"}},
    "settings": (),
    "steps": (),
}


def published(weights: Path, out: Path) -> Artifact:
    """Publish a directory of weights."""
    with reserve(out, out.parent / "store"):
        publish(weights, out, RECORD).finish()
    return read_artifact(out)
