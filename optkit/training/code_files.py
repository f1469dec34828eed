"""Quantized layers in a safetensors file, for processes to hand on.
They are the codes that a training begins with and ends with.

NAME.codes   uint8 [out, in]
NAME.scales  float32 [out, groups]
NAME.zeros   uint8 [out, groups]
metadata     `grids`: {NAME: [bits, group_size, symmetric, dtype of the scales in the artifact]},
             and `facts`, both JSON
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from optkit.algorithms.grid import Grid, QuantizedWeight
from optkit.training.checkpoints import write_tensors

PARTS = {"codes": torch.uint8, "scales": torch.float32, "zeros": torch.uint8}


def write_codes(
    path: Path, layers: Mapping[str, QuantizedWeight], grids: Mapping[str, Grid], facts: Mapping[str, Any]
) -> None:
    """Write layers, whole or not at all. Raises ResourceError on a full disk."""
    tensors = {
        f"{name}.{part}": getattr(layer, part).to("cpu", dtype)
        for name, layer in layers.items()
        for part, dtype in PARTS.items()
    }
    told = {name: (grid.bits, grid.group_size, grid.symmetric, str(grid.scale_dtype)) for name, grid in grids.items()}
    write_tensors(path, tensors, {"grids": json.dumps(told), "facts": json.dumps(facts)})


def read_codes(path: Path) -> tuple[dict[str, QuantizedWeight], dict[str, Grid], dict[str, Any]]:
    """Return the layers, their grids, and the facts."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        grids = {
            name: Grid(bits, group_size, symmetric, getattr(torch, dtype.removeprefix("torch.")))
            for name, (bits, group_size, symmetric, dtype) in json.loads(metadata["grids"]).items()
        }
        layers = {
            name: QuantizedWeight(**{part: file.get_tensor(f"{name}.{part}") for part in PARTS}, bits=grid.bits)
            for name, grid in grids.items()
        }
    return layers, grids, json.loads(metadata["facts"])
