"""A config of transformers 5 with the attributes that transformers 4 had.
ONNX Runtime GenAI's builder still looks for them.

It takes what it does not find for the usual value, in silence: a partial rotary embedding would
become a whole one.
"""

from __future__ import annotations

from typing import Any

EPSILONS = ("layer_norm_eps", "norm_eps", "layer_norm_epsilon")


def older_names_(config: Any) -> None:
    """Add them to a config that is shown to the builder alone."""
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
