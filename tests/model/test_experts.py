import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from optkit.model.experts import Expert, Experts, unfuse_experts_
from tests.support.near import near

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES |= {
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
LATENT |= {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
GATED = ["gate_proj", "up_proj", "down_proj"]
KINDS = {
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, ["w1", "w3", "w2"]),
    "phimoe": ({"num_local_experts": 4, "num_experts_per_tok": 2}, ["w1", "w3", "w2"]),
    "qwen2_moe": ({"num_experts": 4, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1} | EXPERTS, GATED),
    "qwen3_moe": ({"num_experts": 4, "decoder_sparse_step": 1, "head_dim": 8} | EXPERTS, GATED),
    "olmoe": ({"num_experts": 4} | EXPERTS, GATED),
    "deepseek_v2": (LATENT | EXPERTS, GATED),
    "deepseek_v3": (LATENT | EXPERTS, GATED),
}


def make(kind: str, extra: dict[str, object]) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **(SIZES | extra)), experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_the_same(kind: str) -> None:
    extra, leaves = KINDS[kind]
    model = make(kind, extra)
    tokens = torch.randint(0, 128, (3, 17), generator=torch.Generator().manual_seed(1))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        want = model(tokens).logits
        assert unfuse_experts_(model) == {}
        got = model(tokens).logits
    assert near(got, want)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    experts = [module for module in model.modules() if isinstance(module, Expert)]
    assert experts
    for expert in experts:
        assert [name for name, module in expert.named_modules() if isinstance(module, nn.Linear)] == leaves


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_a_saved_copy_has_the_names_that_come_out(kind: str, tiny_model) -> None:
    from optkit.model.checkpoint import Checkpoint

    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind))
    unfuse_experts_(model)
    names = {name.replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else name for name in model.state_dict()}
    assert names == set(Checkpoint(tiny_model(kind)).tensors)


def test_each_expert_sees_only_its_tokens() -> None:
    model = make("mixtral", KINDS["mixtral"][0])
    unfuse_experts_(model)
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    seen = dict.fromkeys(range(4), 0)
    for index, expert in enumerate(experts):
        expert.register_forward_hook(lambda module, inputs, output, index=index: seen.update({index: len(inputs[0])}))
    chosen = torch.tensor([[0, 2], [2, 0], [2, 3]])
    experts(torch.randn(3, 32), chosen, torch.full((3, 2), 0.5))
    assert seen == {0: 2, 1: 0, 2: 3, 3: 1}


@torch.no_grad()
def test_what_is_compiled_around_experts_serves_every_choice_of_them() -> None:
    class Step(nn.Module):
        def __init__(self, experts: nn.Module) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            return self.experts(hidden * 2, chosen, torch.full(chosen.shape, 0.5)) + hidden

    model = make("mixtral", KINDS["mixtral"][0])
    unfuse_experts_(model)
    step, graphs = Step(next(module for module in model.modules() if isinstance(module, Experts))), []
    compiled = torch.compile(step, backend=lambda graph, _: graphs.append(graph) or graph)
    for choice in ([[0, 2], [2, 0]], [[1, 2], [3, 0]], [[1, 1], [1, 1]]):
        given = torch.randn(2, 32), torch.tensor(choice)
        assert compiled(*given).equal(step(*given))
    assert len(graphs) == 2, "what is before and behind the experts"


def test_experts_that_cannot_be_taken_apart_are_reported(tiny_model) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("gpt_oss"))
    before = set(model.state_dict())
    fused = unfuse_experts_(model)
    assert set(model.state_dict()) == before
    assert set(fused) == {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    assert all(
        "the fused experts have more than their matrices (gate_up_proj [4, 64, 256]" in reason
        for reason in fused.values()
    )


def test_experts_that_the_checkpoint_stores_joined_stay_so(tiny_model) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("mixtral"))
    fused = unfuse_experts_(model, {"model.layers.1.mlp.experts.down_proj"})
    assert list(fused) == ["model.layers.1.mlp.experts"]
    assert fused["model.layers.1.mlp.experts"].startswith(
        "the checkpoint stores the experts joined (gate_up_proj [4, 256, 64]"
    )
    assert "model.layers.0.mlp.experts.3.w2.weight" in model.state_dict()


def test_an_unknown_layout_is_reported() -> None:
    model = make("mixtral", KINDS["mixtral"][0])
    model.model.layers[0].mlp.experts = nn.ParameterDict({"all": nn.Parameter(torch.zeros(4, 3, 2))})
    fused = unfuse_experts_(model)
    reason = "the weights have three dimensions (all [4, 3, 2]), in a layout that is not known to be that of experts"
    assert fused == {"model.layers.0.mlp.experts": reason}


def test_a_dense_model_is_left_alone(tiny_model) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    modules = dict(model.named_modules())
    assert unfuse_experts_(model) == {}
    assert dict(model.named_modules()) == modules
