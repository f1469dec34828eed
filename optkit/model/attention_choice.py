"""Which attention implementations of transformers compute what a model asks of attention.
The others leave it out in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optkit.model.attention import HEADS
from optkit.model.task import has_prefix
from optkit.model.text_config import first_number, text_config

EAGER = frozenset({
    "big_bird", "bigbird_pegasus", "bloom", "codegen", "cpmant", "deepseek_v4", "git", "got_ocr2", "gpt_neo",
    "gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa", "hy_v4", "megatron-bert",
    "mimo_v2_flash", "mpt", "mvp", "openai-gpt", "prophetnet", "reformer", "rembert", "roformer", "trocr", "xglm",
    "xlm", "xlnet",
})  # fmt: skip
"""Models (`model_type`) whose attention transformers has as matrix products alone, without torch's
fused one.
"""
MATRICES = 3
"""What scores become on their way through scale, cap, mask and softmax: so much is held at the peak,
as float32; with attention sinks in the model's dtype.
"""
ASKED = {
    **dict.fromkeys(("gemma2", "vaultgemma"), "softcap"),
    **dict.fromkeys(("deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"), "s_aux"),
    "doge": "own_mask",
    "inkling_text": "position_bias",
    "umt5": "own_products",
}
"""`model_type` -> the argument by which transformers asks an implementation for more than masked
softmax attention.
"""
HALVES = frozenset({"bfloat16", "float16"})
PHRASES = {
    "softcap": "the soft cap of the scores",
    "s_aux": "attention sinks",
    "position_bias": "the bias of the scores",
    "own_mask": "the causal mask beside the mask of its own",
    "prefix": "the causal mask of a text that is no prompt",
    "own_products": "what matrix products compute",
}
HONOURED: Mapping[str, frozenset[str]] = {
    "eager": frozenset(PHRASES),
    "sdpa": frozenset({"position_bias"}),
    "flex_attention": frozenset(PHRASES) - {"own_mask", "own_products"},
    "flash_attention_2": frozenset({"softcap"}),
    "flash_attention_3": frozenset({"softcap"}),
}
"""Implementation -> those of the arguments that it computes with. What a kernel of the hub takes is
known when it is loaded.
"""


def asked_of_attention(config: Mapping[str, Any]) -> str:
    """Return the argument of `PHRASES` that a model with this config.json hands to its attention.
    It is empty if there is none.
    """
    return "prefix" if has_prefix(config) else _asked_by_text(config)


def needs_eager(config: Mapping[str, Any]) -> bool:
    """Say whether transformers would open a model with sdpa, which leaves out what it asks for."""
    asked = asked_of_attention(config)
    return bool(asked) and asked not in HONOURED["sdpa"] and _kind(config) not in EAGER


def attends_eagerly(config: Mapping[str, Any]) -> bool:
    """Say whether attention forms the weights of all query-key pairs, if nothing else is asked."""
    return _kind(config) in EAGER or needs_eager(config)


def eager_bytes(config: Mapping[str, Any], sequences: int, length: int) -> int:
    """Return the bytes of the matrices that eager attention holds at once in one layer.
    It is 0 if attention is fused.
    """
    if not attends_eagerly(config):
        return 0
    text = text_config(config)
    halved = _asked_by_text(config) == "s_aux" and (text.get("dtype") or text.get("torch_dtype")) in HALVES
    return MATRICES * (2 if halved else 4) * sequences * (first_number(config, HEADS) or 1) * length**2


def caps_scores(config: Mapping[str, Any]) -> bool:
    """Say whether the scores of attention go through a tanh before the softmax."""
    return _asked_by_text(config) == "softcap"


def attention_options(config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `from_pretrained` options with the implementation that keeps what the model asks for.

    One that the options name stays.
    """
    return {"attn_implementation": "eager", **options} if needs_eager(config) else dict(options)


def eager_note(config: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Return a sentence for the notes if `attention_options` has chosen."""
    if "attn_implementation" in options or not needs_eager(config):
        return []
    return [f"attention: eager, because sdpa leaves out {PHRASES[asked_of_attention(config)]} of {_kind(config)}"]


def why_not_attention(config: Mapping[str, Any], implementation: str) -> str:
    """Return why an implementation cannot compute a model's attention.
    It is empty if nothing in config.json speaks against it.
    """
    asked = asked_of_attention(config)
    if asked and implementation in HONOURED and asked not in HONOURED[implementation]:
        return f"{implementation} leaves out {PHRASES[asked]}"
    if implementation == "sdpa" and _kind(config) in EAGER:
        return "transformers has the attention of this model as matrix products alone"
    return ""


def _asked_by_text(config: Mapping[str, Any]) -> str:
    asked = ASKED.get(_kind(config), "")
    capped = text_config(config).get("attn_logit_softcapping", "the default") is not None
    return asked if asked != "softcap" or capped else ""


def _kind(config: Mapping[str, Any]) -> str:
    return str(text_config(config).get("model_type", config.get("model_type")))
