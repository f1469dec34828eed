"""Packed experts in two launches, on a GPU, against float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels.cuda import experts
from optkit.kernels.cuda.experts import Choices, StackedExperts
from optkit.kernels.cuda.matrix import Matrix, dequantized, stacked, tiled
from optkit.model.experts import Experts
from tests.kernels.test_cuda_kernels import difference, example

COUNT, HIDDEN, INSIDE = 16, 512, 384


def matrices(weights: str, outputs: int, inputs: int) -> tuple[Matrix, Tensor]:
    """One expert's matrix with the weights of all, and these in float64."""
    if weights == "int4":
        packed = [tiled(example(outputs, inputs, 128, True, "cuda")[0], torch.bfloat16) for _ in range(COUNT)]
        packed = [replace(each, weight=each.weight.roll(step, 1)) for step, each in enumerate(packed)]
        whole = stacked(packed)
        return replace(whole, outputs=outputs), dequantized(whole).double().view(COUNT, outputs, inputs)
    dense = torch.randn(COUNT * outputs, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5
    if weights == "bf16":
        return Matrix(dense, outputs, inputs, torch.bfloat16), dense.double().view(COUNT, outputs, inputs)
    codes, scales = (dense * 100).to(torch.float8_e4m3fn), torch.rand(COUNT * outputs, device="cuda") / 100 + 0.01
    known = codes.double() * scales.double()[:, None]
    return Matrix(codes, outputs, inputs, torch.bfloat16, scales), known.view(COUNT, outputs, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["int4", "fp8", "bf16"])
@pytest.mark.parametrize("gelu", [False, True])
def test_each_row_goes_through_its_experts(weights: str, gelu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "MOST_GROUPS", dict.fromkeys((4, 8, 16), 32))
    torch.manual_seed(0)
    (first, gate_up), (last, down) = matrices(weights, 2 * INSIDE, HIDDEN), matrices(weights, HIDDEN, INSIDE)
    layer = StackedExperts(Experts([torch.nn.Identity()] * COUNT), COUNT, replace(first, gelu=gelu), last)
    for tokens in (1, 2, 3, 8, 33, 130, 250, 1000, 1001, 4096, 4097):
        rows = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        chosen = torch.rand(tokens, COUNT, device="cuda").topk(4).indices
        if tokens in (33, 1001, 4097):
            chosen %= 8
            chosen[:, 0], chosen[:, 1] = 5, COUNT  # one has all tokens, half have none, and the last is no expert
        assert layer.takes(*chosen.shape) == (tokens <= 1001)
        dtype = torch.float32 if tokens % 2 else torch.bfloat16
        shares = torch.rand(tokens, 4, device="cuda", dtype=dtype)
        expected = torch.zeros(tokens, HIDDEN, device="cuda", dtype=torch.float64)
        for expert in range(COUNT):
            gate, up = (rows.double() @ gate_up[expert].T).chunk(2, 1)
            made = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up @ down[expert].T
            expected += made * torch.where(chosen == expert, shares.double(), 0).sum(1, keepdim=True)
        assert difference(layer(rows, chosen, shares), expected) < (0.05 if weights == "fp8" else 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "choices"), [(128, 8), (60, 4), (8, 2)])
@pytest.mark.parametrize("to_one", [False, True])
def test_the_router_chooses_what_torch_does(experts: int, choices: int, to_one: bool) -> None:
    torch.manual_seed(0)
    for tokens in (1, 16, 17, 1000, 4097):
        logits = torch.randn(tokens, experts, device="cuda") * 3
        found = Choices.routed(logits, choices, to_one, 8)
        found.sort_()
        shares, chosen = logits.softmax(-1).topk(choices)
        assert found.chosen.equal(chosen)
        assert torch.allclose(found.shares, shares / shares.sum(-1, keepdim=True) if to_one else shares, atol=1e-5)
        assert found.order.sort().values.equal(torch.arange(tokens * choices, device="cuda", dtype=torch.int32))
        assert found.ends.equal(chosen.flatten().bincount(minlength=experts).cumsum(0).int())
        of_places = chosen.flatten()[found.order].tolist()
        assert of_places == sorted(of_places)
        groups = [each for each in found.groups.tolist() if each[2]]
        assert sum(count for _, _, count, _ in groups) == len(of_places)
        assert all({expert} == {*of_places[first : first + count]} for expert, first, count, _ in groups)
        assert max(count for _, _, count, _ in groups) <= 8
