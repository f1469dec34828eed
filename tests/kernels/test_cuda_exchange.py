"""The decode step of a split model: each process has a graph of its share, and exchanges sums and tokens."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.tensor import Shard
from transformers import LlamaConfig, LlamaForCausalLM

from optkit.devices.process_group import join
from optkit.errors import StageError
from optkit.kernels.cuda import exchange
from optkit.kernels.cuda.graph_capture import captured
from optkit.kernels.cuda.split_layers import why_not_split
from optkit.session import open_session, rank_group
from optkit.settings.cuda_graphs import CudaGraphs
from optkit.settings.precision import Precision
from optkit.settings.tensor_parallel import TensorParallel
from optkit.stage import Context, Transform
from optkit.stages.fp8 import Fp8
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.near import near

GRAPH_RANK = str(Path(__file__).parents[1] / "support" / "graph_rank.py")
TWO = TensorParallel(devices=2)
RTN = Rtn(group_size=32, symmetric=False)


@pytest.fixture(autouse=True)
def _graph_ranks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let the processes on CPUs have the graph's kernels in torch."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(rank_group, "PROGRAM", GRAPH_RANK)


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("llama", []),
        pytest.param(
            "gemma3",
            ["cuda_graphs: prompts are read by the model itself, whose attention has windows"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["llama", "gemma3"],
)
def test_two_shares_decode_what_the_whole_model_does(name: str, notes: list[str], tiny_model: TinyModel) -> None:
    split: Any = open_session(tiny_model(name), [TWO, CudaGraphs()])
    alone: Any = open_session(tiny_model(name))
    tokens = torch.randint(5, 90, (3, 12), generator=torch.Generator().manual_seed(0))
    assert split.attention_kernels(tokens).endswith("kernels of its own in steps")
    assert split.generate(tokens, 8).equal(alone.generate(tokens, 8))
    for long in [tokens.repeat(1, 9)] * 2:  # launched, and as a graph
        assert split.generate(long, 2).equal(alone.generate(long, 2))
    assert near(split.logits(tokens), alone.logits(tokens), 1e-4)
    assert [note for note in split.notes if "cuda_graphs" in note] == notes
    split.close()


@pytest.mark.usefixtures("warm_children")
def test_shares_of_packed_weights_decode_as_without_the_graph(tiny_model: TinyModel, tmp_path: Path) -> None:
    Fp8().run(tiny_model("qwen2"), tmp_path, Context())
    tokens = torch.randint(5, 90, (3, 12), generator=torch.Generator().manual_seed(0))
    written = []
    for settings in ([TWO, CudaGraphs()], [TWO]):
        session: Any = open_session(tmp_path, settings)
        assert not any("cuda_graphs" in note for note in session.notes), session.notes
        assert ("own in steps" in session.attention_kernels(tokens)) == (len(settings) == 2)
        written.append(session.generate(tokens, 8))
        session.close()
    assert written[0].equal(written[1])


@pytest.mark.usefixtures("warm_children")
def test_a_split_mixture_says_why_it_has_no_graph(tiny_model: TinyModel) -> None:
    split: Any = open_session(tiny_model("mixtral"), [TWO, CudaGraphs()])
    tokens = torch.randint(5, 90, (2, 6), generator=torch.Generator().manual_seed(0))
    assert (
        "cuda_graphs: compile: reduce-overhead in its place, because "
        "MixtralSparseMoeBlock is split over GPUs and is no MLP of gate, up and down"
    ) in split.notes
    alone: Any = open_session(tiny_model("mixtral"))
    assert split.generate(tokens, 4).equal(alone.generate(tokens, 4))
    split.close()


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


def test_gpus_without_a_link_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = SimpleNamespace(
        cuMemAlloc_v2=lambda *_: 0, cuMemsetD8_v2=lambda *_: 0, cuIpcGetMemHandle=lambda *_: 0,
        cuIpcOpenMemHandle_v2=lambda *_: 217,
    )  # fmt: skip
    monkeypatch.setattr(exchange, "driver", lambda: refused)
    monkeypatch.setattr(exchange, "_gathered", lambda value: [value, value])
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(
        StageError, match=r"^cuda_graphs: .*\. The GPUs cannot write into each other's memory\. See `nvidia-smi"
    ):
        exchange._shared_memories(1024, 0, torch.device("cuda", 0))


on_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")


@pytest.mark.gpu
@on_two_gpus
def test_sums_of_two_gpus_are_those_of_float32_and_each_has_the_same(tmp_path: Path) -> None:
    multiprocessing.spawn(_sums, (tmp_path,), nprocs=2)


def _sums(rank: int, folder: Path) -> None:
    """Add up rows of an odd number of vectors, before and after the numbers of packets come again."""
    device, width = torch.device("cuda", rank), 72
    join(str(device), rank, 2, str(folder / "meeting"), 60.0)
    given, given_too = exchange.Exchange.open(width, device), torch.Generator(device).manual_seed(rank)

    def check(rows: int, add: bool) -> None:
        x = torch.randn(rows, width, device=device, generator=given_too).bfloat16()
        scales = torch.linspace(0.5, 2, width, device=device), torch.linspace(1, 3, rows, device=device)
        for scaled in (x, (x.float() * (scales[1][:, None] * scales[0])).bfloat16()):
            each = [torch.empty_like(x) for _ in range(2)]
            distributed.all_gather(each, scaled)
            total = each[0].sin()
            expected = total.float() * add + each[0].float() + each[1].float()
            given.sum_into_(total, x, *(() if scaled is x else scales), add=add)
            assert total.equal(expected.bfloat16())

    one = torch.ones(1, width, device=device, dtype=torch.bfloat16)
    total = torch.zeros_like(one)
    graph = captured(lambda: [given.sum_into_(total, one, add=False) for _ in range(64)])
    for _ in range(3):
        for rows in (1, 300, 1500, 7):
            check(rows, add=True)
            check(rows, add=False)
        for _ in range(520):
            graph.replay()
    assert total.equal(one + one)
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.gpu
@on_two_gpus
@pytest.mark.parametrize(("name", "stage"), [("llama", None), ("gemma3", None), ("llama", RTN), ("qwen2", Fp8())])
def test_two_gpus_choose_what_float32_would(
    name: str, stage: Transform | None, tiny_model: TinyModel, tmp_path: Path
) -> None:
    settings, directory = [Precision(mode="bf16"), CudaGraphs()], tiny_model(name)
    if stage:
        stage.run(directory, tmp_path, Context())
        directory = tmp_path
    split: Any = open_session(directory, [*settings, TWO], "cuda")
    own: Any = open_session(directory, settings[:1], "cuda")
    exact: Any = open_session(directory, device="cuda", dtype="float32")
    assert not any("in its place" in note for note in split.notes), split.notes
    for batch, prompt in ((1, 5), (1, 5), (3, 140), (3, 150), (12, 100), (12, 17), (45, 9), (256, 3)):
        tokens = torch.randint(0, 90, (batch, prompt), generator=torch.Generator().manual_seed(batch))
        written = split.generate(tokens, 30)
        behind = slice(prompt - 1, None)
        expected = exact.logits(written[:, :-1])[:, behind]
        usual = (own.logits(written[:, :-1])[:, behind] - expected).abs().max()
        chosen = expected.gather(-1, written[:, prompt:, None].to(expected.device))[..., 0]
        assert float((expected.amax(-1) - chosen).max()) < 4 * float(usual) + 1e-3
    os.kill(split._ranks._children[1].process.pid, signal.SIGKILL)
    with pytest.raises(StageError, match=r"^tensor_parallel: process 2 of 2 \(cuda:1\) was ended by SIGKILL"):
        split.generate(tokens, 30)
