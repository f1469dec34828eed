"""The GGUF architectures of Llama's layout, with names, shapes and config for an import.

llama.cpp reorders the rows of q and k for its own rotary embedding in `llama`, and keeps them in
`qwen2` and `qwen3` (https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py,
`LlamaModel.permute`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optkit.errors import SourceError
from optkit.model.config_file import check_against_tensors, check_values
from optkit.model.gguf_file import Gguf
from optkit.model.shape import ModelShape, TensorInfo
from optkit.source.gguf_by_transformers import foreign_shape
from optkit.source.gguf_metadata import lost_metadata, positive_float, rope_parameters

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
WEIGHTS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
BIASES = {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
NORMS = {f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}


@dataclass(frozen=True)
class Layout:
    """How an architecture of GGUF maps to one of transformers."""

    architecture: str
    block: dict[str, str]
    """Names below `blk.N.` -> names below `model.layers.N.`"""
    permuted: bool = False
    """Whether the rows of q and k were reordered."""


LAYOUTS = {
    "llama": Layout("LlamaForCausalLM", WEIGHTS, permuted=True),
    "qwen2": Layout("Qwen2ForCausalLM", WEIGHTS | BIASES),
    "qwen3": Layout("Qwen3ForCausalLM", WEIGHTS | NORMS),
}


def imports(config: Mapping[str, Any]) -> bool:
    """Say whether a config.json is of an architecture with a layout here."""
    return any(layout.architecture in config.get("architectures", ()) for layout in LAYOUTS.values())


def layout_of(gguf: Gguf) -> Layout:
    """Return the layout of a file of one of `LAYOUTS`. Raises SourceError for one that an import
    could not carry over whole.
    """
    where = str(gguf.path)
    layout = LAYOUTS[gguf.architecture]
    lost = lost_metadata(gguf)
    lost += ["rope scaling by frequency (rope_freqs.weight)"] if "rope_freqs.weight" in gguf.tensors else []
    unknown = [name for name in gguf.tensors if name != "rope_freqs.weight" and tensor_name(name, layout) is None]
    lost += (
        [f"{len(unknown)} tensors that a plain {gguf.architecture} has not ({', '.join(unknown[:3])})"]
        if unknown
        else []
    )
    if lost:
        raise SourceError(
            f"the import would lose {' and '.join(lost)}",
            where=where,
            remedy="Take the safetensors form of the model, which has it",
        )
    return layout


def tensor_name(name: str, layout: Layout) -> str | None:
    """Return the name of a GGUF tensor in the checkpoint.
    For example `blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`.
    """
    if found := re.fullmatch(r"blk\.(\d+)\.(.+)", name):
        inside = layout.block.get(found[2])
        return f"model.layers.{found[1]}.{inside}" if inside else None
    return OUTSIDE.get(name)


def checkpoint_shape(gguf: Gguf) -> ModelShape:
    """Return config and tensors of the checkpoint that an import writes. Raises SourceError as
    `layout_of` and for missing parts.
    """
    if gguf.architecture not in LAYOUTS:
        return foreign_shape(gguf, LAYOUTS)
    layout = layout_of(gguf)
    config = checkpoint_config(gguf, layout)
    tensors = {str(tensor_name(name, layout)): TensorInfo("F32", tensor.shape) for name, tensor in gguf.tensors.items()}
    expected = [name for name in OUTSIDE.values() if name != "lm_head.weight"]
    expected += [
        f"model.layers.{index}.{name}" for index in range(config["num_hidden_layers"]) for name in layout.block.values()
    ]
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise _damaged(gguf, f"{len(missing)} tensors are missing: {', '.join(missing[:3])}")
    rows = rows_of(config)
    for name, info in tensors.items():
        found = rows.get(re.sub(r".*\.(?=self_attn|mlp)", "", name).removesuffix(".weight"))
        if found and info.shape[:1] != (found,):
            raise _damaged(gguf, f"{name} has the shape {list(info.shape)}, and the metadata asks for {found:,} rows")
    return ModelShape(config=config, tensors=tensors)


def rows_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the rows of the matrices that the metadata decides."""
    heads, shared, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    attention = {"q_proj": heads * width, "k_proj": shared * width, "v_proj": shared * width, "o_proj": hidden}
    feed_forward = {"gate_proj": inner, "up_proj": inner, "down_proj": hidden}
    return {f"self_attn.{name}": size for name, size in attention.items()} | {
        f"mlp.{name}": size for name, size in feed_forward.items()
    }


def _damaged(gguf: Gguf, what: str) -> SourceError:
    return SourceError(what, where=str(gguf.path), remedy="Download it again")


def checkpoint_config(gguf: Gguf, layout: Layout) -> dict[str, Any]:
    """Return what the metadata says, in the words of config.json."""

    def number(key: str, default: int | None = None) -> int:
        value = gguf.get(key, default)
        if type(value) is not int:
            raise _damaged(gguf, f"the metadata has no number {gguf.architecture}.{key}")
        return value

    table = gguf.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise _damaged(gguf, "there are no token embeddings (token_embd.weight)")
    heads, hidden = number("attention.head_count"), number("embedding_length")
    special = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    config: dict[str, Any] = {
        "architectures": [layout.architecture],
        "model_type": gguf.architecture,
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": number("attention.key_length", hidden // max(heads, 1)),
        "vocab_size": table.shape[0],
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": positive_float(gguf, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(gguf),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **{name: gguf.metadata.get(f"tokenizer.ggml.{key}") for name, key in special.items()},
    }
    check_values(config, str(gguf.path))
    check_against_tensors(config, {name: tensor.shape for name, tensor in gguf.tensors.items()}, str(gguf.path))
    for name in special:
        if config[name] is not None and not 0 <= config[name] < table.shape[0]:
            raise _damaged(gguf, f"{name} is {config[name]}, and there are {table.shape[0]:,} tokens")
    return config
