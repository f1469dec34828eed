"""What a plan knows of models whose parts no stage finds, chains or rotates, and that the run says so too."""

from pathlib import Path
from typing import Any

import pytest

from optkit.errors import OptkitError
from optkit.model.calibration_memory import refuse_unchained
from optkit.model.checkpoint import Checkpoint
from optkit.model.conversions import rewritten_tensor
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.unfound import refuse_unfound
from optkit.model.unrotated import refuse_unrotated
from optkit.stage import Context
from optkit.stages.fp8 import Fp8
from optkit.stages.kv_scales import KvScales
from optkit.stages.rotate import Rotate
from optkit.stages.rtn import Rtn
from tests.support.planning import plan_of
from tests.support.running import run_stage
from tests.zoo.models import save_model

NORM = TensorInfo("F32", (8,))


@pytest.mark.parametrize(
    ("kind", "name", "found"),
    [
        ("olmo_hybrid", "model.layers.0.linear_attn.q_conv1d.weight", True),
        ("olmo_hybrid", "model.layers.0.mlp.up_proj.weight", False),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w1.weight", False),  # optkit takes these apart again
        ("minimax_m2", "model.layers.0.block_sparse_moe.experts.0.w1.weight", False),
        ("kimi_linear", "model.layers.0.self_attn.k_conv1d.weight", True),
        ("step3p7", "model.layers.1.moe.gate_proj.weight", True),
        ("llama", "model.layers.0.self_attn.q_proj.weight", False),
        ("nobody knows it", "model.layers.0.self_attn.q_proj.weight", False),
    ],
)
def test_tensors_that_transformers_joins_or_splits(kind: str, name: str, found: bool) -> None:
    assert rewritten_tensor({"model_type": kind}, ["lm_head.weight", name]) == (name if found else None)
    assert rewritten_tensor({"model_type": "any", "text_config": {"model_type": kind}}, [name]) == (
        name if found else None
    )


def test_a_part_whose_model_type_is_no_name_is_none_that_is_known() -> None:
    assert rewritten_tensor({"model_type": "llama", "vision_config": {"model_type": ["x"]}}, ["lm_head.weight"]) is None


def shape_of(kind: str, *names: str, info: TensorInfo = NORM, **config: Any) -> ModelShape:
    tensors = {f"model.layers.{index}.{name}": info for name in names for index in range(2)}
    text = {"model_type": kind, "architectures": ["AForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8}
    return ModelShape({**text, **config}, tensors)


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        (shape_of("gptj", "ln_1.weight", "ln_1.bias"), "the blocks have a norm that adds a bias"),
        (shape_of("cohere", "input_layernorm.weight"), "a norm that subtracts the mean .CohereLayerNorm"),
        (shape_of("gemma2", "post_feedforward_layernorm.weight"), "a norm behind the feed-forward layers"),
        (shape_of("granitemoe", "moe.input_linear.weight", info=TensorInfo("F32", (4, 8, 8))), r"a tensor \[4, 8, 8"),
        (shape_of("jamba", "mamba.dt_proj.weight", info=TensorInfo("F32", (8, 8))), "own code computes with"),
        (shape_of("deepseek_v32", "self_attn.indexer.wk.weight"), "an index of tokens"),
        (shape_of("olmo", "mlp.up_proj.weight", info=TensorInfo("F32", (16, 8))), "norms without weights"),
    ],
)
def test_parts_that_do_not_commute_with_a_rotation(shape: ModelShape, what: str) -> None:
    with pytest.raises(OptkitError, match=rf"^rotate: model.layers\S*: .*{what}.*Set rotate.residual to false"):
        refuse_unrotated(shape)


def test_what_commutes_is_rotated() -> None:
    refuse_unrotated(shape_of("llama", "input_layernorm.weight", "post_attention_layernorm.weight"))
    refuse_unrotated(shape_of("mamba2", "norm.weight", "mixer.conv1d.weight"))


def test_blocks_that_cannot_be_run_one_by_one() -> None:
    with pytest.raises(OptkitError, match=r"^gptq: the blocks of AForCausalLM .* It reads weights of all blocks at"):
        refuse_unchained(shape_of("rwkv", "ln1.weight"), "gptq")
    refuse_unchained(shape_of("llama", "input_layernorm.weight"), "gptq")


def test_a_stage_that_runs_the_whole_model_takes_blocks_that_cannot_be_run_one_by_one() -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    shape = shape_of("gemma3n_text", "self_attn.k_proj.weight", info=TensorInfo("F32", (8, 8)), **heads)
    assert "model.layers.1.self_attn.k_scale" in KvScales().predict(shape, "cpu")[1].tensors


def test_lists_of_other_lengths_than_config_json_says() -> None:
    with pytest.raises(OptkitError, match=r"^rtn: unsupported .* no list of 16 .* there is model.layers with 2\. Take"):
        refuse_unfound(shape_of("llama", "input_layernorm.weight", num_hidden_layers=16), "rtn")
    refuse_unfound(shape_of("llama", "input_layernorm.weight", num_hidden_layers=16), "")  # no stage looks for them
    refuse_unfound(shape_of("llama", "input_layernorm.weight", num_hidden_layers=16, auto_map={"A": "b"}), "rtn")
    refuse_unfound(shape_of("llama", "input_layernorm.weight"), "rtn")


def test_of_two_lists_the_one_nearer_to_the_embedding_is_the_decoder() -> None:
    sizes = {"embed_tokens.weight": (9, 8), "layers.0.norm.weight": (8,), "model.visual.layers.0.norm.weight": (8,)}
    tensors = {name: TensorInfo("F32", size) for name, size in sizes.items()}
    tensors["model.visual.layers.0.up.weight"] = TensorInfo("F32", (64, 8))
    config = {"num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 9}
    assert ModelShape(config, tensors).decoder == "layers"


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("olmo_hybrid", Rtn(group_size=None)), ("hrm_text", Fp8(rounding="nearest")), ("cohere", Rotate())],
)
def test_plan_and_run_refuse_the_same(kind: str, stage: Any, tmp_path: Path) -> None:
    source, target = save_model(kind, tmp_path / "model"), tmp_path / "made"
    with pytest.raises(OptkitError):
        run_stage(stage, source, target, Context(device="cpu", seed=0))
    (file := tmp_path / "r.yaml").write_text(
        f"model: {source}\nstages:\n- {stage.kind}: {stage.model_dump_json()}\n", encoding="utf-8"
    )
    with pytest.raises(OptkitError, match=rf"^{stage.kind}"):
        plan_of(file, tmp_path / "store")


def test_a_gate_beside_the_queries_keeps_the_heads_as_they_are(tmp_path: Path) -> None:
    source, target = save_model("qwen3_next", tmp_path / "model"), tmp_path / "made"
    report = run_stage(Rotate(), source, target, Context(device="cpu", seed=0))
    assert [why for why in report.skipped.values() if "q_proj makes a gate too" in why]
    assert report.details["largest_difference"] < 1e-3
    assert Checkpoint(target).tensors
