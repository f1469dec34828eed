"""The skeleton over files that are not as transformers writes them today, or that are wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import conversion_mapping
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from optkit.errors import SourceError
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from tests.support.changes import Change, changed_copy, replacing, without
from tests.support.near import near
from tests.support.skeletons import logits_of, reference, run_all_blocks, some_tokens
from tests.zoo.models import save_model


def test_old_gpt2_files_without_the_prefix_and_with_buffers(tiny_model, tmp_path: Path) -> None:
    def old(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return renamed | {"h.0.attn.bias": torch.ones(1, 1, 512, 512), "h.1.attn.masked_bias": torch.tensor(-1e4)}

    directory = changed_copy(tiny_model("gpt2"), tmp_path, old)
    skeleton = Skeleton(Checkpoint(directory))
    assert "h.0.attn.c_attn" in skeleton.linears(skeleton.blocks[0])
    assert {"h.0.attn.bias", "h.1.attn.masked_bias"} < set(skeleton.outside_tensors)
    assert torch.equal(logits_of(directory), logits_of(tiny_model("gpt2")))


def base_model_alone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def with_rotary_buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": torch.ones(8) for index in range(3)}


def with_the_tied_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def with_only_the_tied_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}


@pytest.mark.parametrize("change", [base_model_alone, with_rotary_buffers, with_the_tied_head, with_only_the_tied_head])
def test_other_ways_to_store_the_same_model(tiny_model, tmp_path: Path, change: Change) -> None:
    assert torch.equal(logits_of(changed_copy(tiny_model("llama"), tmp_path, change)), logits_of(tiny_model("llama")))


def test_experts_joined_in_the_file_stay_fused(tiny_model, tmp_path: Path) -> None:
    joined = {name: tensor.clone() for name, tensor in reference(tiny_model("mixtral")).state_dict().items()}
    directory = changed_copy(tiny_model("mixtral"), tmp_path, lambda _: joined)
    assert (
        "the checkpoint stores "
        "the experts joined" in Skeleton(Checkpoint(directory)).fused["model.layers.0.mlp.experts"]
    )
    assert near(logits_of(directory), logits_of(tiny_model("mixtral")))


# Errors


def test_missing_and_extra_tensors_are_counted_and_named(tiny_model, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if ".0.self_attn." not in name} | {
            "model.extra": torch.ones(2)
        }

    message = (
        r"the weights are not those of LlamaForCausalLM: parameters that the files lack: 4 "
        r"\(model\.layers\.0\.self_attn\.q_proj\.weight, \S+k_proj\.weight, \S+v_proj\.weight, \.\.\.\); "
        r"tensors that the model has no place for: 1 \(model\.extra\)"
    )
    directory = changed_copy(tiny_model("llama"), tmp_path, change)
    with pytest.raises(SourceError, match=message):
        Skeleton(Checkpoint(directory))


def test_an_expert_that_is_missing_is_named(tiny_model, tmp_path: Path) -> None:
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    directory = changed_copy(tiny_model("qwen2_moe"), tmp_path, without(lost))
    with pytest.raises(
        SourceError, match=rf"parameters that the files lack: 1 \({lost}\); tensors that the model has no place for: 0"
    ):
        Skeleton(Checkpoint(directory))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"intermediate_size": 256}, r"9 of 29 tensors have another shape .*is \[64, 128\], not \[64, 256\]"),
        ({"vocab_size": 600}, r"says: model.embed_tokens.weight is \[512, 64\], not \[600, 64\]\. See that"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"the model is quantized already \(gptq\)"),
        (
            {"model_type": "not_a_model", "architectures": ["NotAModelForCausalLM"]},
            r"transformers cannot build NotAModelForCausalLM\. .*not_a_model",
        ),
        ({"hidden_act": "nosuch"}, r"cannot build LlamaForCausalLM\. KeyError: 'nosuch'\. Take config.json from"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_the_config(tiny_model, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    directory = changed_copy(tiny_model("llama"), tmp_path, **config)
    with pytest.raises(SourceError, match=message):
        Skeleton(Checkpoint(directory))


def test_nan_weights_are_refused_when_they_are_loaded(tiny_model, tmp_path: Path) -> None:
    directory = changed_copy(tiny_model("llama"), tmp_path, replacing("model.norm.weight", float("nan")))
    with pytest.raises(SourceError, match=r"model\.norm\.weight: 64 of 64 weights are NaN or Inf"):
        Skeleton(Checkpoint(directory)).load_outside_("cpu")


def test_weights_that_overflow_the_dtype(tiny_model, tmp_path: Path) -> None:
    directory = changed_copy(tiny_model("llama"), tmp_path, replacing("model.norm.weight", 7e4))
    message = r"model\.norm\.weight: weights of up to 7e\+04 do not fit float16\. Its largest number is 6\.55e\+04"
    with pytest.raises(SourceError, match=message):
        Skeleton(Checkpoint(directory), torch.float16).load_outside_("cpu")


def test_an_attention_that_the_architecture_does_not_have(tiny_model) -> None:
    with pytest.raises(
        SourceError, match=r"transformers cannot build GptOssForCausalLM\. .*scaled_dot_product_attention"
    ):
        Skeleton(Checkpoint(tiny_model("gpt_oss")), attention="sdpa")


def test_weights_that_transformers_rewrites_are_refused(tiny_model, tmp_path: Path) -> None:
    rule = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Transpose(0, 1)])
    register_checkpoint_conversion_mapping("LlamaForCausalLM", [rule], overwrite=True)
    try:
        with pytest.raises(
            SourceError, match=r"llama is not supported: transformers rewrites model\.layers\.0\.mlp\.up_proj\.weight"
        ):
            Skeleton(Checkpoint(tiny_model("llama")))
    finally:
        conversion_mapping._checkpoint_conversion_mapping_cache.pop("LlamaForCausalLM")


def test_custom_code_is_not_run_unless_it_is_trusted(tiny_model, tmp_path: Path) -> None:
    code = "from transformers import LlamaForCausalLM, LlamaConfig\nclass C(LlamaConfig):\n    model_type = 'mine'\n"
    code += "class M(LlamaForCausalLM):\n    config_class = C\n"
    places = {"AutoConfig": "modeling_mine.C", "AutoModelForCausalLM": "modeling_mine.M"}
    directory = changed_copy(tiny_model("llama"), tmp_path, model_type="mine", auto_map=places)
    (directory / "modeling_mine.py").write_text(code)
    with pytest.raises(SourceError, match=r"trust_remote_code: true"):
        Skeleton(Checkpoint(directory))
    skeleton = Skeleton(Checkpoint(directory), trust_remote_code=True)
    assert type(skeleton.model).__name__ == "M"
    assert len(run_all_blocks(skeleton, some_tokens(2), 2)) == 3


def test_tensors_that_transformers_joins_are_named(tmp_path: Path) -> None:
    what = r"olmo_hybrid is not supported: transformers rewrites model\S*_conv1d.weight while it loads it. It joins"
    with pytest.raises(SourceError, match=f"{what}.*such as cast"):
        Skeleton(Checkpoint(save_model("olmo_hybrid", tmp_path / "model")))
