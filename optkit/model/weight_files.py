"""Which files of a model directory hold weights, by their names."""

from __future__ import annotations

from pathlib import PurePath

from optkit.model.formats.base import Format

FOREIGN = frozenset({".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".npz", ".mlmodel"})
"""Suffixes of weights in formats that optkit knows by name alone."""


def holds_weights(path: PurePath) -> bool:
    """Say whether a file holds weights, in whatever format."""
    return path.suffix in FOREIGN or any(format.holds_weights(path.name) for format in Format)
