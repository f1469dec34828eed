"""The shape of an ONNX model, as plans want it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optkit.common.files import read_object, reading
from optkit.model.config_file import check_values, read_config
from optkit.model.onnx_file import SAFETENSORS_NAMES, all_initializers, read_graphs
from optkit.model.shape import ModelShape, TensorInfo

GENAI_CONFIG = "genai_config.json"


def onnx_shape(directory: Path) -> ModelShape:
    """Return config and tensors of an ONNX directory, its initializers.
    Without config.json, positions come from genai_config.json.

    Raises SourceError if the graph, its data or a config is damaged.
    """
    held = all_initializers(read_graphs(directory))
    known = {name: each for name, each in held.items() if each.dtype in SAFETENSORS_NAMES}
    tensors = {name: TensorInfo(SAFETENSORS_NAMES[each.dtype], each.shape) for name, each in known.items()}
    config = (
        read_config(directory / "config.json")
        if (directory / "config.json").is_file()
        else _config_of(read_genai_config(directory))
    )
    return ModelShape(config=config, tensors=tensors)


def read_genai_config(directory: Path) -> dict[str, Any]:
    """Return the genai_config.json of a directory, an empty one if there is none. Raises
    SourceError if it is damaged.
    """
    path = directory / GENAI_CONFIG
    if not path.is_file():
        return {}
    found = read_object(path, remedy="Export the model again")
    with reading(path, "is no configuration of ONNX Runtime GenAI", "Export the model again"):
        check_values(_config_of(found), str(path))
    return found


def _config_of(genai_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a genai_config.json says in the words of config.json."""
    model = genai_config.get("model") or {}
    names = {"max_position_embeddings": "context_length", "vocab_size": "vocab_size"}
    return {ours: model[theirs] for ours, theirs in names.items() if theirs in model}
