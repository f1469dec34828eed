"""What leaves each decoder block of a graph.

In one that ONNX Runtime GenAI's builder made these are the inputs of the norm behind it. In others,
whose nodes are named after modules (`/model/layers.3/mlp/down_proj/MatMul`), it is what nodes
behind a block read of it, in the shape of hidden states.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.model.onnx_file import MODEL, OnnxFile
from optkit.onnx.feeds import prompt_feeds
from optkit.onnx.model_file import ModelFile
from optkit.onnx.opening import open_model, runtime_errors

OUTSIDE = -1
BLOCK = re.compile(r"/(?:[^/.]+/)*[^/.]+\.(\d+)(?:/|$)")
NORM = re.compile(r"/model/layers\.(\d+)/(input|final_norm)_layernorm/(Skip)?LayerNorm$")


def block_outputs(model: ModelFile) -> list[tuple[str, ...]]:
    """Return, for what enters the first block and leaves each of them, the values whose sum it is."""
    norms = {
        int(found[1]): (node, bool(found[3])) for node in model.proto.graph.node if (found := NORM.match(node.name))
    }
    return [tuple(node.input[: 2 if skip else 1]) for _, (node, skip) in sorted(norms.items())]


def crossing_values(model: ModelFile) -> list[list[str]]:
    """Return, for what enters the first block and leaves each of them, the values that cross there.

    Several cross beside the hidden states: masks, angles, and keys and values that are given out.
    """
    makers = {output: _block(node.name) for node in model.proto.graph.node for output in node.output}
    crossing: list[list[str]] = [[] for _ in range(max(makers.values(), default=OUTSIDE) + 2)]
    for node in model.proto.graph.node:
        reader = _block(node.name)
        for name in node.input:
            maker = makers.get(name, reader)
            if maker != reader and (maker != OUTSIDE or reader == 0) and name not in crossing[maker + 1]:
                crossing[maker + 1].append(name)
    return crossing if len(crossing) > 1 else []


def _block(node: str) -> int:
    """Return the index of the block that a node is in, `OUTSIDE` for none."""
    found = BLOCK.match(node)
    return int(found[1]) if found else OUTSIDE


def states(directory: Path, tokens: Tensor, work: Path, device: str, width: int) -> list[Tensor]:
    """Return what enters the first block of a graph and leaves each of them, float32 [b, s, width].
    The list is empty if that cannot be told.

    `work` is an empty directory on the disk of the graph, which gets the graph with these as
    outputs.
    """
    from onnx import helper

    model = ModelFile(directory)
    wanted = block_outputs(model)
    candidates = [] if wanted else crossing_values(model)
    names = sorted({name for parts in (*wanted, *candidates) for name in parts})
    known = {output.name for output in model.proto.graph.output}
    model.proto.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in known)
    (work / MODEL).write_bytes(model.proto.SerializeToString())
    for path in OnnxFile(directory / MODEL).data_files:
        (work / path.name).hardlink_to(path)
    session: Any = open_model(work / MODEL, device).session
    with runtime_errors("on a few tokens", str(directory), device):
        arrays = session.run(names, prompt_feeds(OnnxFile(work / MODEL).inputs, tokens.numpy()))
    found = {name: torch.from_numpy(array).float() for name, array in zip(names, arrays, strict=True)}
    fitting = [[name for name in parts if found[name].shape == (*tokens.shape, width)] for parts in candidates]
    if any(len(parts) != 1 for parts in fitting):
        return []
    return [torch.stack([found[name] for name in parts]).sum(0) for parts in (*wanted, *fitting)]
