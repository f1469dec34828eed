"""Which models a decode step in one CUDA graph is known for; no torch, so that a plan can ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose step is: embed; norm, attend, add; norm, gated MLP, add; norm, head."""
HEAD_SIZES = (16, 32, 64, 128, 256)
"""Channels of a head that the attention kernel knows."""
MOST_GROUPED = 8
"""Queries that share a head of keys."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that do not change with the length of the text."""

REMEDY = "Take cuda_graphs out of the recipe, or use compile"
"""For a model that the graph cannot decode."""


def why_not_family(config: Mapping[str, Any]) -> str | None:
    """Return why the decode step of a model with this config.json cannot be one graph, None where nothing there speaks against it."""
    if config.get("model_type") not in FAMILIES:
        return f"{config.get('model_type')} is not of the families that it is known for ({', '.join(FAMILIES)})"
    heads = int(config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // heads
    if size not in HEAD_SIZES:
        return f"heads of {size} channels are none of {', '.join(map(str, HEAD_SIZES))}"
    if heads // int(config.get("num_key_value_heads") or heads) > MOST_GROUPED:
        return f"more than {MOST_GROUPED} queries share a head of keys"
    if config.get("hidden_act", "silu") != "silu":
        return f"the MLP's activation is {config['hidden_act']}, not silu"
    if "sliding_attention" in (config.get("layer_types") or ()) or (
        config.get("sliding_window") and config.get("use_sliding_window", True)
    ):
        return "its attention has a sliding window"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return None if kind in ROPES else f"its rotary embeddings ({kind}) change with the length of the text"
