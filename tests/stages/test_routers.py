"""Routers stay in full precision: they are found by what they do, in the shapes of the files."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optkit.errors import OptkitError
from optkit.model.checkpoint import Checkpoint
from optkit.model.fewer_experts import COUNTS
from optkit.model.linear_layers import layers_of
from optkit.model.routers import routers_of
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.skeleton import Skeleton
from optkit.model.skeleton_layers import layers_of_skeleton
from optkit.model.weights import weights_of
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.fp8 import Fp8
from optkit.stages.gptq import Gptq
from optkit.stages.prune import Prune
from optkit.stages.rtn import Rtn
from optkit.stages.teaching.layers import linear_modules
from optkit.training.student import open_student
from tests.zoo.configs import kinds, tiny_config
from tests.zoo.models import save_model

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": None}
GEMMA = {"altup_num_inputs": 2, "laurel_rank": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
GEMMA |= {
    "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": [0.0, 0.0],
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": ({}, []),
    "mixtral": ({"num_local_experts": 4}, ["block_sparse_moe.gate"]),
    "qwen2_moe": ({"num_experts": 4}, ["mlp.gate", "mlp.shared_expert_gate"]),
    "hunyuan_v1_moe": ({"num_experts": 4, "moe_topk": 2}, ["mlp.gate.wg"]),
    "granitemoe": ({"num_local_experts": 4}, ["block_sparse_moe.router.layer"]),
    "jetmoe": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
        ["mlp.router.layer", "self_attention.experts.router.layer"],
    ),
    "gemma3n_text": (GEMMA, ["altup.modality_router"]),
}


def made(kind: str, directory: Path) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind][0]})
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def test_a_projection_with_as_many_outputs_as_there_are_experts_is_none(tmp_path: Path) -> None:
    shape = Checkpoint(save_model("ernie4_5_moe", tmp_path)).shape
    beside = shape.tensors["model.layers.1.mlp.shared_experts.down_proj.weight"]
    assert beside.shape[0] == shape.config["moe_num_experts"]
    assert routers_of(shape) == {"model.layers.1.mlp.gate"}


@pytest.mark.parametrize("kind", MODELS)
def test_routers_of_architectures(kind: str, tmp_path: Path) -> None:
    shape = Checkpoint(made(kind, tmp_path)).shape
    expected = {f"model.layers.{index}.{name}" for index in (0, 1) for name in MODELS[kind][1]}
    assert routers_of(shape) == expected
    assert {name for name, layer in layers_of(shape).items() if layer.router} == expected


@pytest.mark.parametrize("kind", ["hunyuan_v1_moe", "gemma3n_text"])
def test_no_stage_takes_a_router(kind: str, tmp_path: Path) -> None:
    source = made(kind, tmp_path / "source")
    routers = routers_of(Checkpoint(source).shape)
    layers, _ = layers_of_skeleton(Skeleton(Checkpoint(source)))
    assert {name for name, layer in layers.items() if layer.router} == routers
    assert {layer.name for layer in linear_modules(open_student(source, "cpu")).values() if layer.router} == routers
    (target := tmp_path / "target").mkdir()
    report = Rtn(group_size=8, exclude=["*coefs*"] if kind == "gemma3n_text" else []).run(source, target, Context())
    assert {name for name, reason in report.skipped.items() if reason == "router"} == routers
    for name in routers:
        assert torch.equal(Checkpoint(target).read(f"{name}.weight"), Checkpoint(source).read(f"{name}.weight"))


def shaped(config: dict[str, Any], **tensors: tuple[int, ...]) -> ModelShape:
    block = {f"model.layers.0.{name.replace('__', '.')}": TensorInfo("BF16", sizes) for name, sizes in tensors.items()}
    return ModelShape(config=config, tensors=block)


def test_a_matrix_with_an_output_for_each_expert_beside_it_is_a_router() -> None:
    experts = {f"mlp__experts__{index}__up__weight": (48, 32) for index in range(6)}
    shape = shaped(
        {}, **experts, mlp__choose__weight=(6, 32), mlp__shared__weight=(48, 32), self_attn__k_proj__weight=(6, 32)
    )
    assert routers_of(shape) == {"model.layers.0.mlp.choose"}
    fused = {"mlp__experts__up": (6, 48, 32), "mlp__choose__weight": (6, 32)}
    assert routers_of(shaped({"num_experts": 6}, **fused)) == {"model.layers.0.mlp.choose"}
    assert not routers_of(shaped({}, mixer__conv__weight=(48, 1, 4), mixer__dt_proj__weight=(48, 32)))


def test_names_of_routers() -> None:
    names = {
        "mlp__gate": True,
        "mlp__router": True,
        "mlp__gate_proj": False,
        "mlp__experts__0__gate": False,
        "mlp__router_gate": True,
    }
    shape = shaped({}, **{f"{name}__weight": (8, 32) for name in names})
    assert routers_of(shape) == {
        f"model.layers.0.{name.replace('__', '.')}" for name, is_router in names.items() if is_router
    }


def test_a_router_among_experts_counts_as_plain_weights() -> None:
    shape = shaped(
        {"num_local_experts": 4}, attn__experts__in__weight=(4, 16, 32), attn__experts__router__layer__weight=(4, 32)
    )
    head = {"lm_head.weight": TensorInfo("BF16", (64, 32))}
    roles = {
        each.elements: each.role
        for each in weights_of(ModelShape(config=shape.config, tensors={**shape.tensors, **head}))
    }
    assert roles[4 * 32] == "plain"


def mixtures() -> list[str]:
    """Return the decoders of the zoo whose config counts experts."""
    found = []
    for kind, name in kinds().items():
        with suppress(Exception):  # configs that cannot be made so small
            told = tiny_config(kind).get_text_config(decoder=True).to_dict()
            if name.endswith("ForCausalLM") and any(COUNTS.fullmatch(key) and told[key] for key in told):
                found.append(kind)
    return found


@pytest.mark.slow
def test_routers_of_every_mixture_keep_their_bytes(tmp_path: Path) -> None:
    text = Calibration(dataset="python-reference", samples=2, sequence_length=64)
    stages = [Rtn(group_size=8), Gptq(group_size=8, calibration=text), Fp8(), Prune(method="wanda", calibration=text)]
    compared = 0
    for kind in mixtures():
        try:
            source = save_model(kind, tmp_path / kind)
        except Exception:  # transformers cannot build it so small
            continue
        whole = Checkpoint(source)
        for stage in stages:
            (target := tmp_path / f"{kind}-{stage.kind}").mkdir()
            try:
                stage.predict(whole.shape, "cpu")
                stage.run(source, target, Context())
            except OptkitError:  # that architecture and stage are refused, which the zoo looks at
                continue
            for name in routers_of(whole.shape):
                router = f"{name}.weight"
                assert torch.equal(Checkpoint(target).read(router), whole.read(router)), (kind, stage.kind, router)
                compared += 1
    assert compared > 100
