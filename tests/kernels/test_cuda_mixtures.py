"""Mixtures of experts in the CUDA-graph step, on a CPU with the kernels' references in torch."""

from dataclasses import replace

import pytest
import torch

from optkit.errors import StageError
from optkit.kernels.cuda import decoding, experts
from optkit.kernels.cuda.decoding import GraphDecoder
from optkit.kernels.cuda.experts import Choices, Mixture, StackedExperts
from optkit.kernels.cuda.matrix import Matrix
from optkit.model.experts import Experts, experts_in, unfuse_experts_
from tests.kernels.test_cuda_families import KNOWN, logits_of_both, random_model, some
from tests.support.eager_kernels import run_on_cpu


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu(monkeypatch)


@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize("kind", some(["qwen3_moe", "mixtral"]))
def test_experts_that_lie_one_by_one_are_stacked(kind: str, batch: int) -> None:
    model = random_model(kind, KNOWN[kind])
    unfuse_experts_(model)
    ours, reference = logits_of_both(model, batch)
    assert float((ours - reference).norm() / reference.norm()) < 1e-4
    assert all(isinstance(layer.mlp, Mixture) for layer in GraphDecoder(model).layers)
    first, second = experts_in(model.model.layers[0])[0][:2]
    starts = [
        expert.get_submodule(name).weight.untyped_storage() for expert in (first, second) for name in expert.input_names
    ]
    assert len({start.data_ptr() for start in starts}) == 1


def test_joined_experts_are_taken_as_they_lie() -> None:
    model = random_model("qwen3_moe", KNOWN["qwen3_moe"])
    own, found = model.model.layers[0].mlp.experts, GraphDecoder(model).layers[0].mlp.experts
    assert found.experts is own
    assert found.gate_up.weight.data_ptr() == own.gate_up_proj.data_ptr()
    assert found.down.weight.data_ptr() == own.down_proj.data_ptr()
    transposed = GraphDecoder(random_model("gpt_oss", KNOWN["gpt_oss"]))
    assert not any(isinstance(layer.mlp, Mixture) for layer in transposed.layers)


def test_experts_of_long_prompts_are_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("qwen3_moe", KNOWN["qwen3_moe"])
    unfuse_experts_(model)
    monkeypatch.setattr(experts, "STEPPED", 3)
    monkeypatch.setattr(experts, "MOST_PRODUCTS", 0)
    ours, reference = logits_of_both(model)
    assert float((ours - reference).norm() / reference.norm()) < 1e-4
    taken = (mixture := GraphDecoder(model).layers[0].mlp).takes
    assert [taken(tokens) for tokens in (3, 4)] == [True, False]
    monkeypatch.setattr(experts, "MOST_PRODUCTS", 5 << 30)
    assert [taken(tokens) for tokens in (4, 65535, 65536)] == [True, True, False], "blocks of a launch are counted"
    monkeypatch.setattr(experts, "MOST_BLOCKS", 8 + 100)
    assert [taken(tokens) for tokens in (100, 403, 404)] == [True, False, False]
    monkeypatch.setattr(experts, "STEPPED", 256)
    monkeypatch.setattr(experts, "MOST_GROUPS", {16: 1})
    monkeypatch.setattr(mixture.experts, "grouped", True)
    assert [mixture.experts.takes(tokens, 2) for tokens in (32, 33)] == [True, False], "steps are grouped, too"
    assert taken(65536), "grouped products take any"


@pytest.mark.parametrize("gelu", [False, True])
def test_grouped_experts_say_what_packed_ones_say(gelu: bool) -> None:
    torch.manual_seed(0)
    first, last = (Matrix(torch.randn(5 * 64, 32) / 6, 64, 32, torch.float32, gelu=gelu) for _ in range(2))
    layer = StackedExperts(
        Experts([torch.nn.Identity()] * 5), 5, first, replace(last, outputs=32, weight=last.weight[:160])
    )
    chosen, shares = torch.randint(0, 4, (40, 3)), torch.rand(40, 3)
    chosen[7] = 5  # there is none
    x, packed, unpacked = torch.randn(40, 32), torch.empty(40, 32), torch.empty(40, 32)
    layer.through(choices := Choices.empty(chosen, shares, 5, 8), x, packed)
    layer.through_grouped(choices, x, unpacked, add=False)
    assert not layer.grouped
    assert torch.allclose(packed, unpacked, atol=1e-5)


def test_another_router_is_the_models_own() -> None:
    model = random_model("qwen3_moe", KNOWN["qwen3_moe"])
    unfuse_experts_(model)
    for block in model.model.layers:
        block.mlp.gate.register_forward_hook(lambda _, given, found: (found[0], found[1] * 0.5, found[2]))
    ours, reference = logits_of_both(model)
    assert float((ours - reference).norm() / reference.norm()) < 1e-4
    assert not any(isinstance(layer.mlp, Mixture) for layer in GraphDecoder(model).layers)


@pytest.mark.parametrize("far", [decoding.MOST_PAIRS - 1, decoding.MOST_PAIRS])
def test_a_graph_is_declined_if_no_text_has_the_models_logits(far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own, tried = decoding.Steps.launch, []

    def launch(steps: decoding.Steps) -> None:
        own(steps)
        if int(steps.position) == decoding.TRIED:
            tried.append(steps.batch)
            if len(tried) <= far:
                steps.logits[:, ::2] *= -1  # as if rounding had sent the tokens to other experts

    monkeypatch.setattr(decoding.Steps, "launch", launch)
    model = random_model("qwen3_moe", KNOWN["qwen3_moe"])
    if far < decoding.MOST_PAIRS:
        GraphDecoder(model)
    else:
        with pytest.raises(StageError, match=r"its logits are not the model's own \(cosine -?0\.\d+\)"):
            GraphDecoder(model)
    assert tried == [2] * decoding.MOST_PAIRS
