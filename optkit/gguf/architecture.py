"""What llama.cpp calls a model's architecture, its tensors and its sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from optkit.errors import StageError
from optkit.model.task import architecture_of
from optkit.source.gguf_llama import LAYOUTS, OUTSIDE, Layout

EXPORTED = {layout.architecture: name for name, layout in LAYOUTS.items()} | {"MistralForCausalLM": "llama"}
"""Architecture of config.json -> that of GGUF."""
ROPE_TYPES = ("default", "linear", "llama3")


def gguf_architecture(config: Mapping[str, Any]) -> tuple[str, Layout]:
    """Return the name of GGUF and the layout. Raises StageError for another architecture."""
    if (name := EXPORTED.get(architecture := architecture_of(config))) is None:
        raise StageError(
            f"{architecture} cannot be written as GGUF", where="gguf", why=f"optkit writes {', '.join(EXPORTED)}"
        )
    return name, LAYOUTS[name]


def gguf_name(name: str, layout: Layout) -> str:
    """Return what GGUF calls a tensor of a checkpoint. Raises StageError for an unknown one.
    For example `model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`.
    """
    outside = {theirs: ours for ours, theirs in OUTSIDE.items()}
    block = {theirs: ours for ours, theirs in layout.block.items()}
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if found and found[2] in block:
        return f"blk.{found[1]}.{block[found[2]]}"
    if name in outside:
        return outside[name]
    raise StageError(
        f"llama.cpp has no such tensor in a plain {layout.architecture}",
        where=name,
        why="The file would compute another model",
    )


def hyperparameters(config: Any) -> dict[str, Any]:
    """Return key -> value of the architecture's own metadata, of a config of transformers.
    Raises StageError for what llama.cpp would compute otherwise.
    """
    heads, rope = config.num_attention_heads, config.rope_parameters
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    _refuse("hidden_act", config.hidden_act, ("silu",))
    _refuse("rope_type", rope["rope_type"], ROPE_TYPES)
    _refuse("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,))
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.get("factor", 1.0))}
    return {
        "block_count": config.num_hidden_layers,
        "context_length": positions(config),
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": width,
        "rope.freq_base": float(rope["rope_theta"]),
        **(linear if rope["rope_type"] == "linear" else {}),
    }


def positions(config: Any) -> int:
    """Return the longest sequence. llama.cpp has no sliding window for these architectures, and
    within one there is nothing to slide.
    """
    return int(min(config.max_position_embeddings, getattr(config, "sliding_window", None) or 1 << 31))


def _refuse(key: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        names = ", ".join(str(each) for each in known)
        raise StageError(f"{key} is {value}", where="gguf", why=f"optkit writes models with {names} as GGUF")
