"""Proof that a written model runs: ONNX Runtime opens it, and a few tokens give numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optkit.errors import StageError
from optkit.model.onnx_file import MODEL, OnnxFile, graph_names, read_proto
from optkit.onnx.checker import problem_of_graph
from optkit.onnx.feeds import TOKENS, prompt_feeds
from optkit.onnx.opening import open_model, runtime_errors

LENGTH = 8


def run_it(directory: Path, stage: str) -> NDArray[Any] | None:
    """Open a directory's model on the CPU and return its first output; None without token ids.

    Raises SourceError if ONNX Runtime refuses it (no kernel for what it computes), StageError
    if onnx.checker does or if it gives NaN or Inf.
    """
    names = graph_names(directory)
    for name in names:
        if problem := problem_of_graph(read_proto(directory / name)):
            raise StageError("the written graph is not valid ONNX", where=stage, why=f"onnx.checker says: {problem}")
    found = _of_one(directory / MODEL) if names == (MODEL,) else _of_parts(directory)
    if wrong := [name for name, array in found.items() if not np.isfinite(array).all()]:
        raise StageError(
            f"the written model gives NaN or Inf in {wrong[0]}", where=stage, why="Some numbers do not fit its dtype"
        )
    return next(iter(found.values()), None)


def _of_one(path: Path) -> dict[str, NDArray[Any]]:
    session, inputs = open_model(path).session, OnnxFile(path).inputs
    if TOKENS not in inputs:
        return {}
    with runtime_errors("on a few tokens", str(path)):
        found = session.run(None, prompt_feeds(inputs, _tokens()))
    return {port.name: np.asarray(array) for port, array in zip(session.get_outputs(), found, strict=True)}


def _of_parts(directory: Path) -> dict[str, NDArray[Any]]:
    import torch

    from optkit.onnx.encoder_decoder import OnnxParts

    parts, tokens = OnnxParts(directory), torch.from_numpy(_tokens())
    name, port = next(iter(parts.encoder.file.inputs.items()))
    hidden = parts.encode({name: tokens if name == TOKENS else torch.zeros(2, *map(int, port.shape[1:]))})
    past: dict[str, torch.Tensor] = {}
    logits = [parts.read(each, hidden, None, past).numpy() for each in (tokens, tokens[:, :1])]
    return {"last_hidden_state": hidden.numpy(), "logits": logits[0], "logits behind the KV cache": logits[1]}


def _tokens() -> NDArray[np.int64]:
    return np.arange(2 * LENGTH, dtype=np.int64).reshape(2, LENGTH)
