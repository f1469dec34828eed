"""Proof that a written model runs: ONNX Runtime opens it, and a few tokens give numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optkit.errors import StageError
from optkit.model.onnx_file import MODEL, OnnxFile, read_proto
from optkit.onnx.checker import problem_of_graph
from optkit.onnx.feeds import TOKENS, prompt_feeds
from optkit.onnx.opening import open_model, runtime_errors

LENGTH = 8


def run_it(directory: Path, stage: str) -> NDArray[Any] | None:
    """Open a directory's model on the CPU and return its first output; None without token ids.

    Raises SourceError if ONNX Runtime refuses it (no kernel for what it computes), StageError
    if onnx.checker does or if it gives NaN or Inf.
    """
    path = directory / MODEL
    if problem := problem_of_graph(read_proto(path)):
        raise StageError("the written graph is not valid ONNX", where=stage, why=f"onnx.checker says: {problem}")
    session = open_model(path).session
    inputs = OnnxFile(path).inputs
    if TOKENS not in inputs:
        return None
    with runtime_errors("on a few tokens", str(path)):
        found = session.run(None, prompt_feeds(inputs, np.arange(2 * LENGTH, dtype=np.int64).reshape(2, LENGTH)))
    wrong = [
        port.name for port, array in zip(session.get_outputs(), found, strict=True) if not np.isfinite(array).all()
    ]
    if wrong:
        raise StageError(
            f"the written model gives NaN or Inf in {wrong[0]}", where=stage, why="Some numbers do not fit its dtype"
        )
    return np.asarray(found[0])
