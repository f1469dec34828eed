"""What the metadata of a GGUF file says that changes what its model computes.
It is carried into config.json, or refused.

llama.cpp reads these keys in `llama_model_base::load_hparams` (src/llama-model.cpp). Nothing is
left out in silence: a key that is not known here is refused too.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from optkit.errors import SourceError
from optkit.model.gguf_file import Gguf

CARRIED = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.factor",
})  # fmt: skip
"""Keys that `gguf_llama.checkpoint_config` reads, whatever their value."""
NEUTRAL = frozenset({
    "vocab_size", "tensor_data_layout", "attention.layer_norm_epsilon", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
})  # fmt: skip
"""Keys that nothing computes with: `vocab_size` is the embedding's, and the others are read of
other families or with yarn alone.
"""
PLAIN: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none", "linear"),
    "attention.causal": (True,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (0, 1),
}
"""Key -> the values at which a plain model computes the same as one without it. Those of other keys
are 0, false and nothing.
"""
LARGEST = 3e38
"""Below the largest float32."""
WORDS = {"attention.sliding_window": "sliding-window attention", "rope.scaling.type": "rope scaling '{value}'"}


def lost_metadata(gguf: Gguf) -> list[str]:
    """Return what the metadata says that config.json of a plain model would leave out.
    For example `logit_scale = 0.5`.
    """
    prefix = f"{gguf.architecture}."
    inside = {name.removeprefix(prefix): value for name, value in gguf.metadata.items() if name.startswith(prefix)}
    same = _same_as_plain(gguf)
    return [
        WORDS.get(name, f"{name} = {{value}}").format(value=f"{value[1]} values" if isinstance(value, tuple) else value)
        for name, value in inside.items()
        if name not in CARRIED | NEUTRAL
        and not _is_one_of(value, (*PLAIN.get(name, (0, False, "")), *same.get(name, ())))
    ]


def rope_parameters(gguf: Gguf) -> dict[str, Any]:
    """Return `rope_parameters` of config.json. A factor stretches positions unless the type is
    `none`: unsaid, it is `linear`.

    Raises SourceError for a factor that is no positive number.
    """
    parameters = {"rope_theta": positive_float(gguf, "rope.freq_base", 10000.0), "rope_type": "default"}
    factor = gguf.get("rope.scaling.factor", gguf.get("rope.scale_linear", 0.0)) or 1.0
    if gguf.get("rope.scaling.type", "linear") == "none":
        return parameters
    if not isinstance(factor, (int, float)) or not 0 < factor < LARGEST:
        raise SourceError(
            f"rope scaling by {factor!r}",
            where=str(gguf.path),
            why="Positions are divided by it",
            remedy="Download it again",
        )
    return parameters if factor == 1 else {**parameters, "rope_type": "linear", "factor": shortest_float32(factor)}


def _same_as_plain(gguf: Gguf) -> dict[str, tuple[Any, ...]]:
    """Return keys whose plain value hangs on the size of a head."""
    heads, hidden = gguf.get("attention.head_count"), gguf.get("embedding_length")
    whole = isinstance(heads, int) and isinstance(hidden, int) and heads > 0
    size = gguf.get("attention.key_length", hidden // heads if whole else None)
    usual = (size**-0.5,) if isinstance(size, int) and size > 0 else ()
    return {"rope.dimension_count": (size,), "attention.value_length": (size,), "attention.scale": usual}


def _is_one_of(value: Any, plain: tuple[Any, ...]) -> bool:
    if isinstance(value, float):
        return any(
            isinstance(each, (int, float)) and math.isclose(value, each, rel_tol=1e-6, abs_tol=1e-12) for each in plain
        )
    return value in plain


def positive_float(gguf: Gguf, key: str, default: float | None = None) -> float:
    """Return a number of the metadata. Raises SourceError if it is missing, or not above 0."""
    value = gguf.get(key, default)
    if not isinstance(value, float):
        raise SourceError(
            f"the metadata has no number {gguf.architecture}.{key}", where=str(gguf.path), remedy="Download it again"
        )
    if not 0 < value < LARGEST:
        raise SourceError(
            f"{gguf.architecture}.{key} is {value}, no number above 0", where=str(gguf.path), remedy="Download it again"
        )
    return shortest_float32(value)


def shortest_float32(value: float) -> float:
    """Return the shortest decimal that is the same float32: 9.999999747378752e-06 -> 1e-05."""
    return next(
        short
        for digits in range(1, 18)
        if struct.pack("<f", short := float(f"{value:.{digits}g}")) == struct.pack("<f", value)
    )
