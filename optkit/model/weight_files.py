"""Which files of a model directory hold weights, by their names."""

from __future__ import annotations

import re
from pathlib import PurePath

SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".npz", ".mlmodel"}
)
ONNX = re.compile(r"\.onnx(?:$|[._])")
"""model.onnx and its external data: model.onnx.data, model.onnx_data, model.onnx_data_1, ..."""


def holds_weights(path: PurePath) -> bool:
    """Say whether a file holds weights, in whatever format."""
    return path.suffix in SUFFIXES or ONNX.search(path.name) is not None
