"""What a config says of windows, rotary embeddings and norms is in the exported graph, which the
builder alone would miss it.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optkit.onnx.adapted_builder import older_names_
from optkit.stages.onnx import Onnx
from tests.support.running import run_stage
from tests.support.tiny_models import SIZES, draw_

for package in ("onnx", "onnxruntime", "onnxruntime_genai", "onnxscript"):
    pytest.importorskip(package)
pytestmark = pytest.mark.usefixtures("children_here")

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
KINDS: dict[str, dict[str, Any]] = {
    "local and global rotary embeddings": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "head_dim": 16,
        "sliding_window": 8,
    },
    "windows in the even layers, a soft cap": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 0.5,
    },
    "windows in the last layer alone": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "half of a head rotated, layer norms": {"model_type": "phi", "hidden_size": 128},
    "a layer without rotary embedding": {"model_type": "smollm3", "num_hidden_layers": 4},
    "a stretched rotary embedding": {"model_type": "llama", "head_dim": 64, "rope_parameters": YARN},
    "as many queries as tokens": {"model_type": "ernie4_5", "head_dim": 128},
}


def save(directory: Path, fields: dict[str, Any]) -> Path:
    """Write a seeded random model without a tokenizer."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **fields}), dtype=torch.float32)
    draw_(model)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_is_what_the_config_says(kind: str, tmp_path: Path) -> None:
    source, target = save(tmp_path / "source", KINDS[kind]), tmp_path / "onnx"
    details = run_stage(Onnx(), source, target).details
    assert max(details["logits_apart"].values()) < 2e-6


def test_names_of_transformers_4() -> None:
    flat = SimpleNamespace(
        rope_parameters={"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}, layer_norm_eps=1e-3
    )
    older_names_(flat)
    assert (flat.rope_theta, flat.partial_rotary_factor, flat.rms_norm_eps) == (5e5, 0.5, 1e-3)
    assert flat.rope_scaling == {**flat.rope_parameters, "type": "default"}
    local = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4},
    }
    nested = SimpleNamespace(rope_parameters=local, rms_norm_eps=1e-6)
    older_names_(nested)
    assert (nested.rope_theta, nested.rope_local_base_freq, nested.rms_norm_eps) == (1e6, 1e4, 1e-6)
    assert nested.rope_scaling == {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0, "type": "linear"}
    none = SimpleNamespace(norm_eps=1e-4)
    older_names_(none)
    assert vars(none) == {"norm_eps": 1e-4, "rms_norm_eps": 1e-4}
