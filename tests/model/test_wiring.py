from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from optkit.model.wiring import FoldGroup, Wiring, fold_, fold_groups
from optkit.model.wiring_probe import columns
from tests.conftest import TinyModel
from tests.support.tiny_models import CONFIGS, SIZES, save_tiny_model

QKV, GATED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
LLAMA = {
    "input_layernorm": QKV,
    "post_attention_layernorm": GATED,
    "self_attn.v_proj": ("self_attn.o_proj",),
    "mlp.up_proj": ("mlp.down_proj",),
}
EXPECTED = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "gemma": LLAMA,
    "gemma3": {
        ("pre_feedforward_layernorm" if norm.startswith("post") else norm): consumers
        for norm, consumers in LLAMA.items()
    },
    "gpt2": {"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",), "attn.c_attn": ("attn.c_proj",)},
    "gptj": {"ln_1": ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in"), "attn.v_proj": ("attn.out_proj",)},
    "opt": {
        "self_attn_layer_norm": QKV,
        "final_layer_norm": ("fc1",),
        "fc1": ("fc2",),
        "self_attn.v_proj": ("self_attn.out_proj",),
    },
    "mixtral": {
        "input_layernorm": QKV,
        "post_attention_layernorm": (
            "block_sparse_moe.gate",
            *(f"block_sparse_moe.experts.{expert}.{leaf}" for expert in range(4) for leaf in ("w1", "w3")),
        ),
        "self_attn.v_proj": ("self_attn.o_proj",),
        **{f"block_sparse_moe.experts.{expert}.w3": (f"block_sparse_moe.experts.{expert}.w2",) for expert in range(4)},
    },
    "qwen2_moe": {
        "input_layernorm": QKV,
        "post_attention_layernorm": (
            *("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.gate"),
            *(f"mlp.experts.{expert}.{leaf}" for expert in range(4) for leaf in ("gate_proj", "up_proj")),
            "mlp.shared_expert_gate",
        ),
        "self_attn.v_proj": ("self_attn.o_proj",),
        "mlp.shared_expert.up_proj": ("mlp.shared_expert.down_proj",),
        **{f"mlp.experts.{expert}.up_proj": (f"mlp.experts.{expert}.down_proj",) for expert in range(4)},
    },
}
"""Producer -> consumers of the second block, by the names after the block's."""
REFUSED = {"gpt2": {"mlp.c_proj": "mlp.c_fc"}, "gptj": {"mlp.fc_out": "mlp.fc_in"}}


class Loaded:
    """A tiny model with its second block loaded and two sequences in front of it."""

    def __init__(self, directory: Path, length: int = 24, dtype: torch.dtype | None = None) -> None:
        self.skeleton = Skeleton(Checkpoint(directory), dtype)
        tokens = torch.randint(0, 512, (2, length), generator=torch.Generator().manual_seed(3))
        inputs = self.skeleton.capture_inputs(tokens, "cpu")
        self.hidden, self.call = inputs.hidden, inputs.batches[0].calls[1]
        self.block = self.skeleton.blocks[1]
        self.skeleton.load_(self.block.name, "cpu")

    def run(self) -> Tensor:
        return self.skeleton.run_block(1, self.hidden, self.call)

    def wiring(self) -> Wiring:
        return fold_groups(self.skeleton, 1, self.hidden, self.call)

    def module(self, name: str) -> nn.Module:
        return self.block.module.get_submodule(name)

    def full(self, name: str) -> str:
        first = next(iter(self.skeleton.linears(self.block)))
        return first[: first.index(".1.") + 3] + name

    def short(self, name: str) -> str:
        return name.removeprefix(self.full(""))

    def group(self, producer: str) -> FoldGroup:
        return next(group for group in self.wiring().groups if self.short(group.producer) == producer)

    def random_scales(self, group: FoldGroup, spread: float = 3.0) -> Tensor:
        inputs = columns(self.skeleton.model.get_submodule(group.places[group.consumers[0]]))
        random = (torch.rand(4096, generator=torch.Generator().manual_seed(5)) * 2 - 1).mul(spread).exp2()
        return random[:inputs] if group.rows is None else random[group.rows]


def differ(tensor: Tensor, reference: Tensor) -> float:
    return float((tensor.float() - reference.float()).norm() / reference.float().norm())


@pytest.mark.parametrize("kind", EXPECTED)
def test_what_feeds_what_is_found_without_names(tiny_model: TinyModel, kind: str) -> None:
    loaded = Loaded(tiny_model(kind))
    before = {name: parameter.clone() for name, parameter in loaded.block.module.named_parameters()}
    wiring = loaded.wiring()
    found = {loaded.short(group.producer): tuple(map(loaded.short, group.consumers)) for group in wiring.groups}
    assert found == EXPECTED[kind]
    assert {loaded.short(name): reason for name, reason in wiring.refused.items()} == {
        name: f"the output of {loaded.full(producer)} reaches it through something that is not linear"
        for name, producer in REFUSED.get(kind, {}).items()
    }
    assert all(torch.equal(parameter, before[name]) for name, parameter in loaded.block.module.named_parameters())


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_folded_block_computes_what_it_did(tiny_model: TinyModel, kind: str) -> None:
    loaded = Loaded(tiny_model(kind))
    before, changed = loaded.run(), set()
    stored = {name: loaded.skeleton.checkpoint.read(name) for name in loaded.skeleton.block_tensors(loaded.block)}
    for group in loaded.wiring().groups:
        changed |= set(fold_(loaded.skeleton, group, loaded.random_scales(group)))
    assert differ(loaded.run(), before) < 2e-6
    parameters = dict(loaded.skeleton.model.named_parameters(prefix=""))
    now = {tensor: parameters[name] for name, tensor in loaded.skeleton.tensor_names.items() if tensor in stored}
    assert {name for name, tensor in stored.items() if not torch.equal(now[name], tensor)} == changed


def test_heads_that_share_a_value_share_its_row(tiny_model: TinyModel) -> None:
    group = Loaded(tiny_model("llama")).group("self_attn.v_proj")
    head = torch.arange(16)
    assert group.rows is not None
    assert torch.equal(group.rows, torch.cat([head, head, head + 16, head + 16]))  # 4 heads of 16, 2 of keys and values


def test_only_the_values_of_a_joined_projection_are_scaled(tiny_model: TinyModel) -> None:
    group = Loaded(tiny_model("gpt2")).group("attn.c_attn")
    assert group.rows is not None
    assert torch.equal(group.rows, torch.arange(128, 192))


def test_joined_gate_and_up_and_joined_queries_keys_and_fewer_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "phi3", {"model_type": "phi3", **SIZES, "tie_word_embeddings": False})
    loaded = Loaded(save_tiny_model("phi3", tmp_path / "phi3"))
    before, groups = loaded.run(), loaded.wiring().groups
    assert {loaded.short(group.producer): tuple(map(loaded.short, group.consumers)) for group in groups} == {
        "input_layernorm": ("self_attn.qkv_proj",),
        "post_attention_layernorm": ("mlp.gate_up_proj",),
        "self_attn.qkv_proj": ("self_attn.o_proj",),
        "mlp.gate_up_proj": ("mlp.down_proj",),
    }
    rows = {loaded.short(group.producer): group.rows for group in groups}
    assert torch.equal(rows["self_attn.qkv_proj"].unique(), torch.arange(96, 128))  # type: ignore[union-attr]
    assert torch.equal(rows["mlp.gate_up_proj"], torch.arange(128, 256))  # type: ignore[arg-type]
    for group in groups:
        fold_(loaded.skeleton, group, loaded.random_scales(group))
    assert differ(loaded.run(), before) < 2e-6


def test_a_norm_of_heads_gives_each_of_them_its_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {f"linear_{which}_head_dim": 16 for which in ("key", "value")} | {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    monkeypatch.setitem(
        CONFIGS, "hybrid", {"model_type": "qwen3_5_text", **SIZES, "head_dim": 16, "num_hidden_layers": 4, **heads}
    )
    loaded = Loaded(save_tiny_model("hybrid", tmp_path / "hybrid"))
    before, group = loaded.run(), loaded.group("linear_attn.norm")
    assert [loaded.short(name) for name in group.consumers] == ["linear_attn.out_proj"]
    assert group.rows is not None
    assert torch.equal(group.rows, torch.arange(16).repeat(4))
    scales = loaded.random_scales(group)
    norm = loaded.module("linear_attn.norm").weight.clone()  # type: ignore[operator]
    fold_(loaded.skeleton, group, scales)
    torch.testing.assert_close(loaded.module("linear_attn.norm").weight, norm / scales[:16])
    assert differ(loaded.run(), before) < 2e-6


def test_fused_experts_take_no_scales(tiny_model: TinyModel) -> None:
    loaded = Loaded(tiny_model("gpt_oss"))
    assert [loaded.short(group.producer) for group in loaded.wiring().groups] == ["input_layernorm", "self_attn.v_proj"]


def test_a_norm_that_the_residual_takes_too_is_refused(tiny_model: TinyModel) -> None:
    loaded = Loaded(tiny_model("llama"))
    plain = loaded.module("mlp").forward

    def with_residual(_module: nn.Module, hidden: Tensor) -> Any:
        return plain(hidden) + hidden

    loaded.module("mlp").forward = MethodType(with_residual, loaded.module("mlp"))
    wiring = loaded.wiring()
    assert "post_attention_layernorm" not in {loaded.short(group.producer) for group in wiring.groups}
    assert {loaded.short(name): reason for name, reason in wiring.refused.items()} == dict.fromkeys(
        GATED, "the output of model.layers.1.post_attention_layernorm reaches it and goes elsewhere too"
    )


def test_a_layer_without_producer_is_refused(tiny_model: TinyModel) -> None:
    loaded = Loaded(tiny_model("llama"))
    del loaded.block.module.input_layernorm
    loaded.block.module.input_layernorm = nn.RMSNorm(64, elementwise_affine=False)  # type: ignore[assignment]
    reasons = {loaded.short(name): reason for name, reason in loaded.wiring().refused.items()}
    assert reasons == dict.fromkeys(QKV, "no norm or linear layer with weights of its own makes its input")


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_in_bfloat16_consumers_get_the_scale_that_the_norm_came_to(tiny_model: TinyModel, kind: str) -> None:
    loaded = Loaded(tiny_model(kind), dtype=torch.bfloat16)
    group = loaded.group("input_layernorm")
    norm = loaded.module("input_layernorm")
    queries = loaded.module("self_attn.q_proj")
    product = (norm.weight.float() + group.offset) * queries.weight.float()  # type: ignore[operator]
    fold_(loaded.skeleton, group, loaded.random_scales(group, spread=5))
    folded = (norm.weight.float() + group.offset) * queries.weight.float()  # type: ignore[operator]
    assert float(torch.as_tensor(folded / product - 1).abs().max()) < 2**-8


def test_scales_that_cannot_be_folded_are_an_error(tiny_model: TinyModel) -> None:
    loaded = Loaded(tiny_model("llama"))
    scales = torch.ones(64)
    scales[3] = 0
    with pytest.raises(ValueError, match=r"^model.layers.1.input_layernorm: a scale is not a positive, finite number$"):
        fold_(loaded.skeleton, loaded.group("input_layernorm"), scales)
    with pytest.raises(
        ValueError, match=r"^model.layers.1.self_attn.v_proj: channels of one row have different scales$"
    ):
        fold_(loaded.skeleton, loaded.group("self_attn.v_proj"), torch.arange(1.0, 65.0))


def test_every_expert_must_get_a_token(tiny_model: TinyModel) -> None:
    loaded = Loaded(tiny_model("mixtral"), length=1)
    loaded.hidden = loaded.hidden[:1]
    with pytest.raises(StageError) as raised:
        loaded.wiring()
    assert str(raised.value) == (
        "model.layers.1: 2 places for tokens and 4 experts. Each expert has to be seen at work to know what feeds it."
        " Calibrate on longer sequences."
    )
