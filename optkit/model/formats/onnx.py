"""model.onnx, or the graphs of an encoder-decoder, and what belongs to them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

from optkit.model.formats.base import Format
from optkit.model.layer_sizes import LayerSize
from optkit.model.onnx_file import MODEL, PARTS, read_graphs
from optkit.model.onnx_layer_sizes import onnx_layer_sizes
from optkit.model.onnx_shape import onnx_shape
from optkit.model.shape import ModelShape

RUNTIME_BUILDS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino")
FILES = re.compile(r"\.onnx(?:$|[._])")
"""model.onnx and its external data: model.onnx.data, model.onnx_data, model.onnx_data_1, ..."""


class OnnxModel(Format):
    """model.onnx, its external data, configs and tokenizer."""

    kind: ClassVar[str] = "onnx"
    label: ClassVar[str] = "ONNX"
    phrase: ClassVar[str] = "an ONNX model"
    opened: ClassVar[str] = "an ONNX model"
    origin: ClassVar[str] = "the checkpoint that it was exported from"
    made_by: ClassVar[str] = "onnx"
    may_link: ClassVar[bool] = False  # onnx.load and onnx.checker refuse data files with several hard links
    computes_in: ClassVar[str | None] = "float32"
    libraries: ClassVar[Mapping[str, tuple[str, ...]]] = {"onnxruntime": RUNTIME_BUILDS}
    session: ClassVar[str] = "optkit.session.onnx_session:open_onnx"
    verification: ClassVar[str] = "optkit.verification.onnx_checks:OnnxFiles"

    def detects(self, names: Collection[str]) -> bool:
        return not {MODEL, *PARTS}.isdisjoint(names)

    def holds_weights(self, name: str) -> bool:
        return FILES.search(name) is not None

    def check(self, directory: Path) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(path for graph in read_graphs(directory) for path in graph.files))

    def shape(self, directory: Path) -> ModelShape:
        return onnx_shape(directory)

    def layer_sizes(self, directory: Path) -> list[LayerSize]:
        """Return the initializers, each with its scales."""
        found: dict[str, LayerSize] = {}
        for graph in read_graphs(directory):
            found |= onnx_layer_sizes(graph)
        return list(found.values())
