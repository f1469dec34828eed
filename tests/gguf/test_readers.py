"""What is imported from GGUF files says what llama.cpp says of the same file: another reader altogether."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optkit.gguf.llama_cpp import LlamaCppModel
from optkit.source.gguf_by_transformers import PROVEN
from optkit.source.gguf_llama import LAYOUTS
from optkit.source.models import ModelSource, import_model, pin_model
from tests.support.gguf_files import save_by_names, save_gguf
from tests.support.remembered import Lines
from tests.zoo.models import TOKENS, plain_logits, save_model

SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
RMS = {**SIZES, "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
NORM = "attention.layer_norm_epsilon"
HEADS = {"attention.key_length": "head_dim", "attention.value_length": "head_dim"}
EXPERTS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
WINDOW = {"attention.sliding_window": "sliding_window"}
ROPE = {"rope_type": "default", "rope_theta": 1000.0}
LINEAR = {
    "full_attention": {**ROPE, "rope_type": "linear", "factor": 8.0},
    "sliding_attention": {**ROPE, "rope_theta": 10_000.0},
}
CAPS = {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str], float, dict[str, Any]]] = {
    "llama": ("llama", {}, {}, 0, {}),
    "qwen2": ("qwen2", {}, {}, 0, {}),
    "qwen3": ("qwen3", {}, {}, 0, {}),
    "qwen2moe": ("qwen2_moe", {}, RMS | EXPERTS | {"expert_count": "num_experts",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}, 0, {}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True, "head_dim": 16}, RMS | HEADS | EXPERTS, 0, {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16} | CAPS, RMS | HEADS | WINDOW, 1, CAPS),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 16, "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "rope_parameters": LINEAR},
        RMS | HEADS | WINDOW, 1, {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}),
    "phi3": ("phi3", {"sliding_window": None, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, RMS, 0,
        {"rope__dimension_count": 8, "attention__sliding_window": 0}),
    "starcoder2": ("starcoder2", {"rope_parameters": ROPE}, SIZES | {NORM: "norm_epsilon"}, 0, {}),
    "stablelm": ("stablelm", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        SIZES | {NORM: "layer_norm_eps"}, 0, {"rope__dimension_count": 8, "use_parallel_residual": False}),
    "falcon": ("falcon", {"alibi": False, "ffn_hidden_size": 256},
        {key: SIZES[key] for key in SIZES if "feed" not in key and "kv" not in key} | {NORM: "layer_norm_epsilon"},
        0, {"attention__head_count_kv": 1, "feed_forward_length": 256}),
    "nemotron": ("nemotron", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        SIZES | {NORM: "norm_eps"}, 1, {"rope__dimension_count": 16}),
}  # fmt: skip
"""Architecture of GGUF -> the zoo's kind, its fields, and what `save_by_names` is given."""


def said_by_llama_cpp(file: Path) -> torch.Tensor:
    model = LlamaCppModel(file, "cpu")
    model.start(*TOKENS.shape)
    rows = [
        model.append([(token, place, row) for place, token in enumerate(text)])
        for row, text in enumerate(TOKENS.tolist())
    ]
    model.close()
    return torch.from_numpy(np.stack(rows))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize("architecture", [*CASES])
def test_llama_cpp_says_the_same(architecture: str, tmp_path: Path) -> None:
    """But for its KV cache in 16 bits."""
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, of the extra `llama-cpp`")
    kind, fields, words, norms, told = CASES[architecture]
    source = save_model(kind, tmp_path / "model", **fields)
    file = tmp_path / "tiny.gguf"
    if architecture in LAYOUTS:
        save_gguf(source, file, architecture)
    else:
        save_by_names(source, file, architecture, words, norms, **told)
    (target := tmp_path / "imported").mkdir()
    import_model(pin_model(ModelSource(name=str(file)), tmp_path / "cache"), target, Lines())
    theirs, ours, wanted = said_by_llama_cpp(file), plain_logits(target), plain_logits(source)
    assert float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max()) < 5e-3
    assert float(((ours - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()) < 5e-3


def test_no_architecture_is_read_that_was_not_compared() -> None:
    assert {*CASES} == {*LAYOUTS, *PROVEN}
