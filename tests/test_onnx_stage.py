"""The stage `onnx`: what it leaves, that it says what its source says, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optkit.stage import Context, Report
from optkit.stages.onnx import Onnx

for package in ("onnx", "onnxruntime", "onnxruntime_genai", "onnxscript"):
    pytest.importorskip(package)

TinyModel = Callable[[str], Path]


def export(source: Path, target: Path, **fields: Any) -> Report:
    target.mkdir()
    return Onnx(**fields).run(source, target, Context())


def test_a_float_model_says_what_its_source_says(tiny_model: TinyModel, tmp_path: Path) -> None:
    report = export(tiny_model("llama"), tmp_path / "onnx")
    assert max(report.details["logits_apart"].values()) < 1e-5
    assert set(report.details["logits_apart"]) == {"1 x 1", "1 x 7", "2 x 33", "3 x 64", "1 x 256", "10 steps"}
