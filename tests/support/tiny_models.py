"""Tiny random models of many architectures, with a tokenizer of 512 tokens."""

from pathlib import Path
from typing import Any

VOCABULARY = 512
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
CAPPED = {"head_dim": 16, "query_pre_attn_scalar": 1, "attn_logit_softcapping": 0.5, "tie_word_embeddings": False}
"""Scores of attention of about 4, and a cap that nobody can miss."""
STATES = {
    key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id")
} | {"tie_word_embeddings": False}
"""Of models without attention."""
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Of models with gated delta networks."""
CONFIGS: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", **SIZES, "num_hidden_layers": 3, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": False},
    "gemma": {"model_type": "gemma", **SIZES, "head_dim": 16},
    "gemma3": {
        "model_type": "gemma3_text",
        **SIZES,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
    },
    "gemma2": {"model_type": "gemma2", **SIZES, **CAPPED, "sliding_window": 8},
    "vaultgemma": {"model_type": "vaultgemma", **SIZES, **CAPPED, "sliding_window": 8},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
    }
    | {"bos_token_id": 0, "eos_token_id": 0},
    "gptj": {
        "model_type": "gptj",
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "rotary_dim": 8,
    }
    | {"bos_token_id": 0, "eos_token_id": 0},
    "opt": {"model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}
    | {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "mixtral": {
        "model_type": "mixtral",
        **SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **SIZES,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    }
    | {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "mamba": {"model_type": "mamba", **STATES, "state_size": 8},
    "falcon_mamba": {"model_type": "falcon_mamba", **STATES, "state_size": 8},
    "mamba2": {
        "model_type": "mamba2",
        **STATES,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "rwkv": {"model_type": "rwkv", **STATES, "attention_hidden_size": 64, "context_length": 512},
    "bamba": {
        "model_type": "bamba",
        **SIZES,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    }
    | {"mamba_n_groups": 1, "mamba_chunk_size": 8, "attn_rotary_emb": 16, "tie_word_embeddings": False},
    "falcon": {"model_type": "falcon", **STATES, "num_attention_heads": 4},
    "jamba": {"model_type": "jamba", **SIZES, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
    | {"expert_layer_period": 2, "mamba_d_state": 8},
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        **SIZES,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
        "mamba_n_heads": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "falcon_h1": {"model_type": "falcon_h1", **SIZES, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_state": 8}
    | {"mamba_chunk_size": 8},
    "zamba2": {
        "model_type": "zamba2",
        **SIZES,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "adapter_rank": 8,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        **SIZES,
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        "num_hidden_layers": 3,
        "head_dim": 16,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **SIZES,
        **DELTA,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **SIZES, **DELTA},
    "lfm2": {
        "model_type": "lfm2",
        **SIZES,
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "minimax": {"model_type": "minimax", **SIZES, "head_dim": 16, "block_size": 8, "num_local_experts": 2}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"model_type": "recurrent_gemma", **SIZES, "block_types": ["recurrent", "attention"]}
    | {"attention_window_size": 16},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **SIZES,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    }
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


def save_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE tokenizer of 512 tokens; a file, so that every text is the same tokens
    whatever becomes of the tests.
    """
    from transformers import PreTrainedTokenizerFast

    file = str(Path(__file__).parent / "tiny_tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=file, bos_token="<|endoftext|>", eos_token="<|endoftext|>").save_pretrained(
        directory
    )


def draw_(model: Any) -> None:
    """Draw weights: norms and biases far from 1 and 0, and matrices that keep the size of what they multiply, so that
    logits tell whether any part was lost.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def save_tiny_model(name: str, directory: Path) -> Path:
    """Write a seeded random model of one of `CONFIGS`, as transformers saves it, with its tokenizer.
    It has float32 weights, or another dtype that is named behind it: `llama bfloat16`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, _, dtype = name.partition(" ")
    config = AutoConfig.for_model(**CONFIGS[kind])
    with torch.random.fork_rng():
        torch.manual_seed(sum(kind.encode()))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        draw_(model)
    model.to(getattr(torch, dtype or "float32")).save_pretrained(directory)
    save_tokenizer(directory)
    return directory
