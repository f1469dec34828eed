"""Configs of tiny models, made from transformers' own: its defaults with smaller numbers.

What a field counts is told by its name, in nested configs too. Models keep what makes them
differ: one block of each kind that their defaults have, two at least.
"""

from fnmatch import fnmatchcase
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

from optkit.model.task import ENCODERS

VOCABULARY = 512
SPECIAL = 500
"""Tokens from here on mean something: the place of an image, say."""
SIZES: dict[str, int] = {
    "*vocab_size*": VOCABULARY,
    "max_source_positions": 50,
    "max_*position*": 512,
    "n_positions": 512,
    "max_target_positions": 512,
    "max_seq*": 512,
    "seq_length": 512,
    "context_length": 512,
    "moe_intermediate_size": 64,
    "moe_ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 64,
    "*intermediate*size*": 128,
    "*intermediate_dim*": 128,
    "*ffn_dim": 128,
    "*ffn_hidden_size": 128,
    "d_ff": 128,
    "dff": 128,
    "n_inner": 128,
    "mlp_dim": 128,
    "head_hidden_size": 16,
    "*hidden_size": 64,
    "*hidden_size_per_layer_input": 64,
    "*_hidden_dim": 64,
    "hidden_dim": 64,
    "*embed_dim": 64,
    "embedding_size": 64,
    "*projection_dim": 64,
    "*output_dim": 64,
    "projector_input_dim": 64,
    "*_proj_dim": 64,
    "n_embd": 64,
    "d_model": 64,
    "emb_dim": 64,
    "dim": 64,
    "lru_width": 64,
    "head_dim": 16,
    "global_head_dim": 32,
    "d_kv": 16,
    "dim_head": 16,
    "kv_channels": 16,
    "attention_head_dim": 16,
    "attention_head_size": 16,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "rotary_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 16,
    "*num_key_value_heads": 2,
    "num_kv_heads": 2,
    "n_head_kv": 2,
    "num_*experts_per_tok*": 2,
    "*top_k": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_*experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_*_head_dim": 16,
    "*mamba*n_heads": 8,
    "mamba_num_heads": 8,
    "n_mamba_heads": 2,
    "*mamba_*head*": 16,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_ngroups": 1,
    "*state_size": 8,
    "*_d_state": 8,
    "*chunk_size": 8,
    "*num_*heads": 4,
    "*attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "sliding_window": 8,
    "window_size": 8,
    "local_attention": 8,
    "attention_window_size": 8,
    "image_size": 32,
    "patch_size": 8,
    "mm_tokens_per_image": 4,
    "num_position_embeddings": 16,
    "num_kv_shared_layers": 0,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_offset": 1,
    "full_attention_interval": 2,
    "no_rope_layer_interval": 2,
}
"""Glob pattern of fields -> the number that they get, if they have one; the first match decides."""
BLOCKS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
    "depth", "num_encoder_layers",
)  # fmt: skip
"""Fields that say how many blocks there are."""
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
IN_THREE = {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}
SPARSE = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
OTHERWISE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": SPARSE,
    "dots1": {**SPARSE, "first_k_dense_replace": 1},
    "glm4v_moe_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    **dict.fromkeys(
        ("glm4v_text", "glm_ocr_text", "paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text"), IN_THREE
    ),
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "mobilebert": {"intra_bottleneck_size": 64},
    "nemotron": {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 2},
    "phi": {"hidden_size": 128},
    "qwen2_vl_text": IN_THREE,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "step3p5": {"sliding_window": 8},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3}
    | {"attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3}
    | {"attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 8, "adapter_rank": 8},
}
"""Model type -> fields that its architecture ties to others, or has no default for."""


def kinds() -> dict[str, str]:
    """Return model type -> the class of its tiny model, of every architecture in the zoo's scope."""
    names: dict[str, str] = {}
    mappings = (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        {kind: name for kind, name in auto.MODEL_MAPPING_NAMES.items() if kind in ENCODERS},
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    for mapping in mappings:
        for kind, name in mapping.items():
            if isinstance(name, str):
                names.setdefault(kind, name)
    return dict(sorted(names.items()))


def tiny_config(kind: str, **fields: Any) -> PreTrainedConfig:
    """Return the config of a tiny model of an architecture; `fields` are those of a case of its own."""
    return _tiny(CONFIG_MAPPING[kind](), fields)


def _tiny(default: PreTrainedConfig, fields: dict[str, Any]) -> PreTrainedConfig:
    said = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    changed: dict[str, Any] = {}
    blocks = next((said[name] for name in BLOCKS if isinstance(said.get(name), int)), 0)
    kept = _kept(said, blocks)
    special = VOCABULARY
    for name, value in said.items():
        if isinstance(value, PreTrainedConfig):
            changed[name] = _tiny(value, {})
        elif name.endswith(("_token_id", "_token_index", "_token_ids")):
            special -= 1
            changed[name] = _token(name, value, special)
        elif name in BLOCKS and isinstance(value, int):
            changed[name] = len(kept)
        elif _is_per_block(value, blocks):
            changed[name] = [_number(name, value[index]) for index in kept]
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            changed[name] = _rope(value)
        elif (smaller := _number(name, value)) != value:
            changed[name] = smaller
    if said.get("is_encoder_decoder"):  # what the decoder begins with, which published models say
        changed["decoder_start_token_id"] = 0
    if "qk_rope_head_dim" in said:  # latent attention has as many heads of keys, and rotates a part of them
        changed |= {"num_key_value_heads": 4} if "num_key_value_heads" in said else {}
        changed |= {"head_dim": SIZES["qk_rope_head_dim"]} if "head_dim" in said else {}
    return type(default)(**{**changed, **OTHERWISE.get(default.model_type, {}), **fields})


def _number(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return next((size for pattern, size in SIZES.items() if fnmatchcase(name, pattern) and value), value)


def _token(name: str, value: Any, special: int) -> Any:
    """Return a token of the small vocabulary: 0 for what begins and ends, one of its own for the others."""
    if not isinstance(value, int) or isinstance(value, bool):
        return 0 if isinstance(value, list) else value
    return 0 if name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id") else special


def _is_per_block(value: Any, blocks: int) -> bool:
    numbers = isinstance(value, list) and all(type(each) is int for each in value) and len({*value}) == len(value)
    return isinstance(value, list) and blocks > 2 and len(value) == blocks and not numbers


def _kept(said: dict[str, Any], blocks: int) -> list[int]:
    """Return the first block of each kind, two at least."""
    lists = [value for value in said.values() if _is_per_block(value, blocks)]
    rows = [str([value[index] for value in lists]) for index in range(blocks)]
    firsts = sorted({rows.index(row) for row in rows})
    return sorted({*firsts, *range(2)}) if len(firsts) < 2 else firsts


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    section = value.get("mrope_section")
    return {**value, "mrope_section": [2, 3, 3]} if section else value
