"""Changes to the files of an ONNX directory, in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def change_graph(directory: Path, change: Callable[[Any], object]) -> None:
    """Change the graph; its external data stays as it is."""
    import onnx

    model = onnx.load(directory / "model.onnx", load_external_data=False)
    change(model)
    (directory / "model.onnx").write_bytes(model.SerializeToString())
