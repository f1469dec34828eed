"""Plans of transformers that would compute something else."""

from contextlib import nullcontext

import pytest

from optkit.errors import StageError
from optkit.model.shape import ModelShape, TensorInfo
from optkit.settings.tensor_parallel import TensorParallel
from tests.zoo.configs import kinds, tiny_config


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gemma3", "splits its embedding"),
        ("paligemma", "splits its embedding"),
        ("aya_vision", "splits its embedding"),
        ("gemma3n_text", "its logits are others"),
        ("qwen3_omni_moe_thinker", "splits its experts, and does not add up"),
        ("doge", "not the numbers that each head has"),
        ("gemma3_text", ""),
        ("llava", ""),
        ("qwen2_vl", ""),
    ],
)
def test_models_that_transformers_splits_wrong(kind: str, why: str) -> None:
    config = tiny_config(kind, architectures=[kinds()[kind]]).to_dict()
    with pytest.raises(StageError, match=f"cannot be split. .*{why}.*or use offload") if why else nullcontext():
        TensorParallel(devices=2).check(ModelShape(config, {"a.weight": TensorInfo("F32", (8, 8))}), "cpu")


@pytest.mark.parametrize(
    ("kind", "tensor", "why"),
    [
        ("step3p7", "model.layers.0.moe.gate_proj.weight", "joins or cuts up model.layers.0.moe.gate_proj.weight "),
        ("hrm_text", "model.H_module.layers.0.attn.gqkv_proj.weight", "joins or cuts up model.H_module.layers.0.attn"),
        ("inkling_text", "model.layers.0.mlp.shared_experts.up_proj", "splits model.* as one matrix, and .* a stack"),
        ("minimax_m3_vl", "model.layers.0.block_sparse_moe.shared_experts.gate_proj.weight", ""),
    ],
)
def test_tensors_that_are_split_otherwise_than_they_are_joined(kind: str, tensor: str, why: str) -> None:
    config = tiny_config(kind, architectures=[kinds()[kind]]).to_dict() | {"num_hidden_layers": 1}
    shape = ModelShape(config, {tensor: TensorInfo("F32", (2, 8, 8)), "lm_head.weight": TensorInfo("F32", (8, 8))})
    with pytest.raises(StageError, match=f"cannot be split. transformers.*{why}") if why else nullcontext():
        TensorParallel(devices=2).check(shape, "cpu")
