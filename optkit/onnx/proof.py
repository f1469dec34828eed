"""Proof that a written model runs: ONNX Runtime opens it, and a few tokens give numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from optkit.errors import StageError
from optkit.model.onnx_file import MODEL, OnnxFile
from optkit.onnx.feeds import TOKENS, prompt_feeds
from optkit.onnx.opening import open_model, runtime_errors

LENGTH = 8


def prove_it_runs(directory: Path, stage: str) -> None:
    """Open the model of a directory on the CPU and run it; a graph without token ids is opened alone.

    Raises SourceError where ONNX Runtime refuses it (no kernel for what it computes), StageError where it gives NaN or Inf.
    """
    path = directory / MODEL
    session = open_model(path).session
    inputs = OnnxFile(path).inputs
    if TOKENS not in inputs:
        return
    with runtime_errors("on a few tokens", str(path), "cpu", "Use a machine with more memory"):
        found = session.run(None, prompt_feeds(inputs, np.arange(2 * LENGTH, dtype=np.int64).reshape(2, LENGTH)))
    wrong = [port.name for port, array in zip(session.get_outputs(), found, strict=True) if not np.isfinite(array).all()]
    if wrong:
        raise StageError(f"the written model gives NaN or Inf in {wrong[0]}", where=stage, why="Some weights lost their values on the way")
