"""What llama.cpp calls a model's architecture, its tensors and its sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from optkit.errors import StageError
from optkit.model.task import architecture_of
from optkit.source.gguf_llama import BIASES, NORMS, OUTSIDE, WEIGHTS

EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
ROPES = ("default", "linear", "yarn")
FEED_FORWARD = {name: theirs for name, theirs in WEIGHTS.items() if "mlp." in theirs}
ATTENTION = {name: theirs for name, theirs in WEIGHTS.items() if name not in FEED_FORWARD}
AROUND = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
"""Gemma's norms of what attention and feed-forward take and give."""
FUSED = {
    name: theirs for name, theirs in WEIGHTS.items() if name[:-7] not in ("attn_q", "attn_k", "attn_v", "ffn_gate")
}
FUSED |= {"attn_qkv.weight": "self_attn.qkv_proj.weight", "ffn_up.weight": "mlp.gate_up_proj.weight"}


@dataclass(frozen=True)
class Architecture:
    """How GGUF holds an architecture of transformers."""

    name: str
    block: Mapping[str, str]
    """Names below `blk.N.` -> names below `model.layers.N.`, in which `*` is each expert."""
    permuted: bool = False
    """Whether the rows of q and k are in the order of llama.cpp's own rotary embedding."""
    activation: str = "silu"
    norms_less_one: bool = False
    """Whether the checkpoint has the weights of norms less one."""
    ropes: tuple[str, ...] = ROPES
    more: Callable[[Any], dict[str, Any]] = lambda config: {}
    """What its metadata has more, of a config of transformers. Raises StageError for what llama.cpp
    would compute otherwise.
    """


def _experts(config: Any, count: int) -> dict[str, Any]:
    return {"expert_count": count, "expert_used_count": config.num_experts_per_tok}


def _qwen3_moe(config: Any) -> dict[str, Any]:
    _refuse("norm_topk_prob", config.norm_topk_prob, (True,))
    width = {"expert_feed_forward_length": config.moe_intermediate_size}
    return {**_experts(config, config.num_experts), **width}


def _phi3(config: Any) -> dict[str, Any]:
    width = config.hidden_size // config.num_attention_heads
    return {"rope.dimension_count": int(width * config.rope_parameters.get("partial_rotary_factor", 1.0))}


def _sliding(config: Any, every: int, largest: int) -> dict[str, Any]:
    """Return the metadata of Gemma 2 and 3. Every so many layers one sees all, and a model of the
    `largest` number of layers scales its scores in another way.
    """
    layers = config.num_hidden_layers
    pattern = ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(layers)]
    _refuse("layer_types", list(config.layer_types), (pattern,))
    width = config.hidden_size // config.num_attention_heads if layers == largest else config.head_dim
    _refuse("query_pre_attn_scalar", config.query_pre_attn_scalar, (width,))
    _refuse("use_bidirectional_attention", bool(getattr(config, "use_bidirectional_attention", False)), (False,))
    return {"attention.sliding_window": config.sliding_window, "context_length": config.max_position_embeddings}


def _gemma2(config: Any) -> dict[str, Any]:
    caps = {name: getattr(config, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    for name, value in caps.items():
        if value is None:
            raise StageError(f"{name} is not set", where="gguf", why="llama.cpp caps the logits of every Gemma 2")
    return {**_sliding(config, 2, 46), **{name: float(value) for name, value in caps.items()}}


def _gemma3(config: Any) -> dict[str, Any]:
    _refuse("final_logit_softcapping", config.final_logit_softcapping, (None,))
    _refuse("attn_logit_softcapping", config.attn_logit_softcapping, (None,))
    local = config.rope_parameters["sliding_attention"]
    _refuse("rope_theta of sliding_attention", local["rope_theta"], (10_000,))
    _refuse("rope_type of sliding_attention", local["rope_type"], ("default",))
    return _sliding(config, 6, 62)


def _of_experts(gate: str, experts: str, names: tuple[str, str, str]) -> dict[str, str]:
    kinds = zip(("gate", "up", "down"), names, strict=True)
    inside = {f"ffn_{kind}_exps.weight": f"{experts}.*.{name}.weight" for kind, name in kinds}
    return {"ffn_gate_inp.weight": f"{gate}.weight", **inside, "ffn_norm.weight": WEIGHTS["ffn_norm.weight"]}


LLAMA = Architecture("llama", WEIGHTS, permuted=True, ropes=(*ROPES, "llama3"))
GEMMA: dict[str, Any] = {"activation": "gelu_pytorch_tanh", "norms_less_one": True, "ropes": ("default", "linear")}
EXPORTED = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": Architecture(
        "llama",
        ATTENTION | _of_experts("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
        permuted=True,
        ropes=LLAMA.ropes,
        more=lambda config: _experts(config, config.num_local_experts),
    ),
    "Qwen2ForCausalLM": Architecture("qwen2", WEIGHTS | BIASES),
    "Qwen3ForCausalLM": Architecture("qwen3", WEIGHTS | NORMS),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3moe",
        ATTENTION | NORMS | _of_experts("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        more=_qwen3_moe,
    ),
    "Phi3ForCausalLM": Architecture("phi3", FUSED, ropes=("default",), more=_phi3),
    "GemmaForCausalLM": Architecture("gemma", WEIGHTS, **GEMMA),
    "Gemma2ForCausalLM": Architecture("gemma2", WEIGHTS | AROUND, **GEMMA, more=_gemma2),
    "Gemma3ForCausalLM": Architecture("gemma3", WEIGHTS | AROUND | NORMS, **GEMMA, more=_gemma3),
}
"""Architecture of config.json -> that of GGUF."""


def gguf_architecture(config: Mapping[str, Any]) -> Architecture:
    """Return how GGUF holds a model. Raises StageError for another architecture."""
    if (found := EXPORTED.get(architecture := architecture_of(config))) is None:
        what, why = f"{architecture} cannot be written as GGUF", f"optkit writes {', '.join(EXPORTED)}"
        raise StageError(
            what, where="gguf", why=why, remedy="Take the stage out, or convert with llama.cpp's own script"
        )
    return found


def gguf_name(name: str, architecture: Architecture) -> str:
    """Return what GGUF calls a tensor of a checkpoint, or that of all experts. Raises StageError for
    an unknown one. For example `model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`.
    """
    outside = {theirs: ours for ours, theirs in OUTSIDE.items()}
    block = {theirs: ours for ours, theirs in architecture.block.items()}
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if found and (inside := EXPERT.sub("*", found[2])) in block:
        return f"blk.{found[1]}.{block[inside]}"
    if name in outside:
        return outside[name]
    raise StageError(
        f"llama.cpp has no such tensor in a plain {architecture.name}",
        where=name,
        why="The file would compute another model",
    )


def hyperparameters(config: Any, architecture: Architecture) -> dict[str, Any]:
    """Return key -> value of the architecture's own metadata, of a config of transformers.
    Raises StageError for what llama.cpp would compute otherwise.
    """
    heads, rope = config.num_attention_heads, _rope(config)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    _refuse("hidden_act", getattr(config, "hidden_activation", None) or config.hidden_act, (architecture.activation,))
    _refuse("rope_type", rope["rope_type"], architecture.ropes)
    if architecture.norms_less_one:
        _refuse("tie_word_embeddings", config.tie_word_embeddings, (True,))
    if architecture.more is not _phi3:
        _refuse("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,))
    return {
        "block_count": config.num_hidden_layers,
        "context_length": _positions(config),
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": width,
        "rope.freq_base": float(rope["rope_theta"]),
        **_rope_scaling(rope),
        **architecture.more(config),
    }


def _rope(config: Any) -> Mapping[str, Any]:
    """Return the rotary embedding, of several that of the layers that see all."""
    found: Mapping[str, Any] = config.rope_parameters
    return found.get("full_attention") or found


def _rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    if (kind := rope["rope_type"]) not in ("linear", "yarn"):
        return {}
    factor = float(rope.get("factor", 1.0))
    found = {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    if kind == "linear":
        return found
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    given = rope.get("attention_factor")
    _refuse("attention_factor", usual if given is None else given, (usual,))
    for name, value in (("mscale", None), ("mscale_all_dim", None), ("truncate", True)):
        _refuse(name, rope.get(name, value), (value,))
    _refuse("beta_fast", rope.get("beta_fast") or 32, (32,))
    _refuse("beta_slow", rope.get("beta_slow") or 1, (1,))
    return {**found, "rope.scaling.original_context_length": int(rope["original_max_position_embeddings"])}


def _positions(config: Any) -> int:
    """Return the longest sequence. llama.cpp has no sliding window for most architectures, and within
    one there is nothing to slide.
    """
    return int(min(config.max_position_embeddings, getattr(config, "sliding_window", None) or 1 << 31))


def _refuse(key: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        names = ", ".join(str(each) for each in known)
        raise StageError(f"{key} is {value}", where="gguf", why=f"optkit writes models with {names} as GGUF")
