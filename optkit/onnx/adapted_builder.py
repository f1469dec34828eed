"""What ONNX Runtime GenAI's model builder (0.14) is not left to do itself.
It is replaced in the process that exports and nowhere else.

It would load quantized weights by the names and layouts that it knows, and decides for a whole
model whether matrices are codes or floats. Those that are still float, lm_head among them, it
rounds to 4 bits. Here each layer is what it is in the source (`optkit.onnx.builder_input`).

What a model computes it reads from config.json, by names of transformers 4
(`optkit.onnx.adapted_builder`), and by rules of its own if transformers has others: which layers
have a sliding window and which no rotary embedding, and the angles of the rotary embedding. These
are taken from the config and the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from optkit.errors import StageError
from optkit.onnx.builder_input import handed_over
from optkit.onnx.finishing import drop_idle_zero_points, embed_by_head

REPLACED = (
    "has_lm_head", "load_weights", "make_attention", "make_matmul_float", "make_matmul_int4", "make_matmul_op",
    "make_packed_matmul", "make_packed_matmul_float", "make_packed_matmul_int4",
    "make_rotary_embedding_caches_from_scratch", "save_model", "save_processing",
)  # fmt: skip
"""Methods of its `Model` that are replaced, or that their replacements call."""
SAME_AT_ANY_LENGTH = ("default", "linear", "llama3", "yarn")
"""Types of rotary embedding whose angles do not depend on how long the sequence is."""


def adapt_(builder: ModuleType, order: dict[str, Any]) -> None:
    """Change the classes of `onnxruntime_genai.models.builder` so that it exports what is ordered.
    Its `create_model` is called.

    Raises StageError if that module is not the one that this was written for.
    """
    model = sys.modules["builders.base"].Model
    own = _methods(model)

    def load_weights(_self: Any, _path: str) -> Any:
        return handed_over(Path(order["source"]), order["head_bits"], order["trust_remote_code"])

    def has_lm_head(self: Any, module: Any) -> bool:
        return module is self.weights.get_output_embeddings()

    def save_model(self: Any, directory: str) -> None:
        drop_idle_zero_points(self.model)
        if order["shared_embedding"]:
            embed_by_head(self.model)
        own["save_model"](self, directory)

    def make_attention(self: Any, layer_id: int, *arguments: Any, **options: Any) -> None:
        _set_layer_(self, layer_id)
        own["make_attention"](self, layer_id, *arguments, **options)

    def make_angles(self: Any) -> Any:
        return _angles(self) or own["make_rotary_embedding_caches_from_scratch"](self)

    def save_processing(_self: Any, *_arguments: Any) -> None:
        """Write no tokenizer: the source's own files are copied."""

    for replaced in (load_weights, has_lm_head, save_model, make_attention, save_processing):
        setattr(model, replaced.__name__, replaced)
    model.make_rotary_embedding_caches_from_scratch = make_angles
    for name in ("make_matmul", "make_packed_matmul"):
        setattr(model, "make_matmul_op" if name == "make_matmul" else name, _by_layer(name))
    builder.AutoConfig = _Configs(builder.AutoConfig)  # type: ignore[attr-defined]


def _methods(model: type) -> dict[str, Any]:
    """Return the methods that are replaced."""
    if unknown := [name for name in REPLACED if not hasattr(model, name)]:
        raise StageError(
            f"the builder of the installed ONNX Runtime GenAI has no {', '.join(unknown)}",
            where="onnx: exporter genai",
            why="optkit changes how it works there, and knows version 0.14",
            remedy="Run: pip install 'onnxruntime-genai<0.15'",
        )
    return {name: getattr(model, name) for name in REPLACED}


class _Configs:
    """In the place of transformers' AutoConfig."""

    def __init__(self, automatic: Any) -> None:
        self._automatic = automatic

    def from_pretrained(self, *arguments: Any, **options: Any) -> Any:
        config = self._automatic.from_pretrained(*arguments, **options)
        older_names_(config)
        return config


def _by_layer(name: str) -> Callable[..., Any]:
    """Return the method that makes a matrix product of codes if the layer has them, else of floats."""

    def make(self: Any, matmul: Any, *arguments: Any, **options: Any) -> Any:
        kind = "int4" if hasattr(matmul, "qweight") else "float"
        return getattr(self, f"{name}_{kind}")(matmul, *arguments, **options)

    return make


def _set_layer_(builder: Any, layer: int) -> None:
    """Give a layer the window and the rotary embedding that the config says it has."""
    config = builder.weights.config
    if kinds := getattr(config, "layer_types", None):
        builder.window_size = config.sliding_window if kinds[layer] == "sliding_attention" else -1
    if (rotary := getattr(config, "no_rope_layers", None)) is not None:
        builder.attention_attrs["rope"] = bool(rotary[layer])


def _angles(builder: Any) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines, float [positions, size], as the model itself computes them.
    None if it has several sorts.
    """
    rotary = getattr(getattr(getattr(builder, "weights", None), "model", None), "rotary_emb", None)
    frequencies = getattr(rotary, "inv_freq", None)
    if rotary is None or frequencies is None or getattr(rotary, "rope_type", None) not in SAME_AT_ANY_LENGTH:
        return None
    angles = torch.outer(torch.arange(builder.rope_attrs["cache_length"]).float(), frequencies.float())
    both = torch.cat((angles, angles), dim=-1)
    return both.cos() * rotary.attention_scaling, both.sin() * rotary.attention_scaling


EPSILONS = ("layer_norm_eps", "norm_eps", "layer_norm_epsilon")


def older_names_(config: Any) -> None:
    """Add to a config of transformers 5, for the builder alone, the attributes that transformers 4 had.
    It takes what it does not find for the usual value, in silence: a partial rotary embedding would
    become a whole one.
    """
    rotary = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in rotary:
        rotary, local = dict(rotary["full_attention"]), rotary.get("sliding_attention") or {}
        config.rope_local_base_freq = local.get("rope_theta")
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rotary:
            setattr(config, name, rotary[name])
    if rotary:
        config.rope_scaling = {**rotary, "type": rotary.get("rope_type", "default")}
    if not hasattr(config, "rms_norm_eps"):
        config.rms_norm_eps = next((getattr(config, name) for name in EPSILONS if hasattr(config, name)), 1e-5)
