"""The decode step of a split model: each process has a graph of its share, and exchanges sums and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from transformers import LlamaConfig, LlamaForCausalLM

from optkit.kernels.cuda.split_layers import why_not_split
from optkit.session import open_session, rank_group
from optkit.settings.cuda_graphs import CudaGraphs
from optkit.settings.precision import Precision
from optkit.settings.tensor_parallel import TensorParallel
from tests.conftest import TinyModel
from tests.support.near import near

GRAPH_RANK = str(Path(__file__).parents[1] / "support" / "graph_rank.py")
TWO = TensorParallel(devices=2)


@pytest.fixture
def opened(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Open models of two processes, each with the graph's kernels in torch."""
    monkeypatch.setattr(rank_group, "PROGRAM", GRAPH_RANK)
    sessions: list[Any] = []

    def open_(name: str) -> Any:
        sessions.append(open_session(tiny_model(name), [TWO, CudaGraphs()]))
        return sessions[-1]

    yield open_
    for session in sessions:
        session.close()


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_two_shares_decode_what_the_whole_model_does(
    name: str, opened: Callable[[str], Any], tiny_model: TinyModel
) -> None:
    split, alone = opened(name), open_session(tiny_model(name))
    assert not any("cuda_graphs" in note for note in split.notes), split.notes
    tokens = torch.randint(5, 90, (3, 12), generator=torch.Generator().manual_seed(0))
    assert split.attention_kernels(tokens).endswith("kernels of its own in steps")
    assert split.generate(tokens, 8).equal(alone.generate(tokens, 8))  # type: ignore[union-attr]
    assert near(split.logits(tokens), alone.logits(tokens), 1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "dimension", "reason"),
    [
        ("self_attn.o_proj", 0, "o_proj of LlamaDecoderLayer is not split by whole heads or columns"),
        ("mlp.up_proj", 1, "up_proj of LlamaDecoderLayer is not split by whole heads or columns"),
        ("self_attn.q_norm", 0, "LlamaAttention norms all heads together, and each GPU has a share of them"),
        ("mlp.act_fn", 0, "LlamaMLP is split over GPUs and is no MLP of gate, up and down"),
    ],
)
def test_other_ways_to_split_say_why(name: str, dimension: int, reason: str) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    assert why_not_split(model) is None
    for each, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            weight: Any = layer.weight
            weight.placements = (Shard(int(each.endswith(("o_proj", "down_proj")))),)
    assert why_not_split(model) is None
    block = model.model.layers[0]
    if name.endswith("_proj"):
        block.get_submodule(name).weight.placements = (Shard(dimension),)
    else:
        block.set_submodule(name, nn.ReLU() if name.endswith("act_fn") else nn.RMSNorm(32))
    assert why_not_split(model) == reason


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_two_gpus_choose_what_float32_would(name: str, tiny_model: TinyModel) -> None:
    settings = [Precision(mode="bf16"), CudaGraphs()]
    split: Any = open_session(tiny_model(name), [*settings, TWO], "cuda")
    own: Any = open_session(tiny_model(name), settings[:1], "cuda")
    exact: Any = open_session(tiny_model(name), device="cuda", dtype="float32")
    assert not any("cuda_graphs" in note for note in split.notes), split.notes
    for batch, prompt in ((1, 5), (3, 140), (12, 17), (45, 9), (256, 3)):
        tokens = torch.randint(0, 90, (batch, prompt), generator=torch.Generator().manual_seed(batch))
        written = split.generate(tokens, 30)
        behind = slice(prompt - 1, None)
        expected = exact.logits(written[:, :-1])[:, behind]
        usual = (own.logits(written[:, :-1])[:, behind] - expected).abs().max()
        chosen = expected.gather(-1, written[:, prompt:, None].to(expected.device))[..., 0]
        assert float((expected.amax(-1) - chosen).max()) < 4 * float(usual) + 1e-3
    split.close()
