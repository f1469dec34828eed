"""Which models a decode step in one CUDA graph is known for; no torch, so that a plan can ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose step is: embed; norm, attend, add; norm, gated MLP, add; norm, head."""
HEAD_STEP, LARGEST_HEAD = 16, 256
"""Channels of a head that the attention kernel knows: multiples of the one up to the other."""
MOST_GROUPED = 16
"""Queries that share a head of keys."""
MOST_CHANNELS = 2048
"""Of those queries together: their sums lie in the shared memory of a block."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that do not change with the length of the text."""

REMEDY = "Take cuda_graphs out of the recipe, or use compile"
"""For a model that the graph cannot decode."""


def why_not_family(config: Mapping[str, Any]) -> str | None:
    """Return why the decode step of such a config.json cannot be one graph, None if it can."""
    if config.get("model_type") not in FAMILIES:
        return f"{config.get('model_type')} is not of the families that it is known for ({', '.join(FAMILIES)})"
    heads = int(config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // heads
    if size % HEAD_STEP or size > LARGEST_HEAD:
        return f"{size} channels a head are no multiple of {HEAD_STEP} up to {LARGEST_HEAD}"
    grouped = heads // int(config.get("num_key_value_heads") or heads)
    if grouped > MOST_GROUPED or grouped * size > MOST_CHANNELS:
        return (
            f"{grouped} queries of {size} channels share a head of keys (at most {MOST_GROUPED}, "
            f"and {MOST_CHANNELS:,} channels)"
        )
    if config.get("hidden_act", "silu") != "silu":
        return f"the MLP's activation is {config['hidden_act']}, not silu"
    if "sliding_attention" in (config.get("layer_types") or ()) or (
        config.get("sliding_window") and config.get("use_sliding_window", True)
    ):
        return "its attention has a sliding window"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return None if kind in ROPES else f"its rotary embeddings ({kind}) change with the length of the text"
