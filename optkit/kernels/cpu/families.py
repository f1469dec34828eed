"""Which models a decode step in C++ is known for; no torch, so that a plan can ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optkit.model.config_defaults import defaults_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose step is: embed; norm, attend, add; norm, gated MLP, add; norm, head."""
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not change with the length of the text."""
DECODES = "decode: each step is one call of optkit's CPU kernels, in float32"
"""What a session says that decodes so."""


def why_not_family(model_type: object) -> str | None:
    """Return why the step of models of a `model_type` cannot be one call, None if it can."""
    known = ", ".join(FAMILIES)
    return None if model_type in FAMILIES else f"{model_type} is not of the families that it is known for ({known})"


def why_not_config(said: Mapping[str, Any]) -> str | None:
    """Return why the step of a model with this config.json cannot be one call, None if nothing there says so."""
    kind = said.get("model_type")
    if reason := why_not_family(kind):
        return reason
    config = {"use_sliding_window": True, **defaults_of(str(kind)), **said}
    if not config.get("is_causal", True):
        return "its attention sees the tokens that follow, too (is_causal: false)"
    if (activation := config.get("hidden_act", "silu")) != "silu":
        return f"the MLP's activation is {activation}, not silu"
    if "sliding_attention" in (config.get("layer_types") or ()) or (
        config.get("sliding_window") and config["use_sliding_window"]
    ):
        return "its attention has a sliding window"
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (rotation := rotary.get("rope_type", rotary.get("type", "default"))) not in ROTATIONS:
        return f"its rotary embeddings ({rotation}) change with the length of the text"
    return None
