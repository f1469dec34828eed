import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.empty_model import _no_random_numbers
from optkit.model.skeleton import Skeleton
from tests.support.near import near
from tests.support.skeletons import LENGTH, real, reference, run_all_blocks, some_tokens

KINDS = ["llama", "qwen2", "gemma", "gemma3", "gpt2", "mixtral", "qwen2_moe"]


def block_outputs(model: PreTrainedModel, names: list[str], tokens: Tensor) -> list[Tensor]:
    outputs: list[Tensor] = []
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output: outputs.append(output[0] if isinstance(output, tuple) else output)
        )
    with torch.no_grad():
        model(tokens)
    return outputs


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_block_by_block_equals_the_whole_model(tiny_model, kind: str, dtype: torch.dtype, attention: str) -> None:
    skeleton, model, tokens = (
        Skeleton(Checkpoint(tiny_model(kind)), dtype, attention),
        reference(tiny_model(kind), dtype, attention),
        some_tokens(4),
    )
    want = block_outputs(model, [block.name for block in skeleton.blocks], tokens)
    got = run_all_blocks(skeleton, tokens, batch_size=4)
    assert len(got) == len(want) == model.config.num_hidden_layers
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for ours, theirs in zip(got, want, strict=True):
        assert near(ours, theirs, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_size_changes_nothing(tiny_model, kind: str) -> None:
    skeleton, tokens = Skeleton(Checkpoint(tiny_model(kind))), some_tokens(5)
    whole, parts = run_all_blocks(skeleton, tokens, 5)[-1], run_all_blocks(skeleton, tokens, 2)[-1]
    assert near(whole, parts)


@pytest.mark.parametrize("kind", [*KINDS, "gpt_oss"])
def test_loaded_whole_it_gives_the_same_logits(tiny_model, kind: str) -> None:
    """GPT-OSS has no sdpa: by default each architecture gets the best that it has."""
    attention = "eager" if kind == "gpt_oss" else "sdpa"
    skeleton, tokens = Skeleton(Checkpoint(tiny_model(kind))), some_tokens()
    assert skeleton.model.config._attn_implementation == attention
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    skeleton.load_("", "cpu")
    with torch.no_grad():
        want = reference(tiny_model(kind), attention=attention)(tokens).logits
        assert near(skeleton.model(tokens).logits, want)
    skeleton.release_("")
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())


@pytest.mark.parametrize("kind", [*KINDS, "gpt_oss"])
def test_blocks_and_outside_are_every_tensor_of_the_file(tiny_model, kind: str) -> None:
    checkpoint = Checkpoint(tiny_model(kind))
    skeleton = Skeleton(checkpoint)
    parts = [*skeleton.outside_tensors, *(name for block in skeleton.blocks for name in skeleton.block_tensors(block))]
    assert sorted(parts) == sorted(checkpoint.tensors)
    skeleton.load_("", "cpu")
    for name, parameter in skeleton.model.named_parameters():
        assert torch.equal(parameter, checkpoint.read(skeleton.tensor_name(name)))


def test_each_block_gets_its_own_arguments(tiny_model) -> None:
    """Gemma 3: two blocks with a sliding window of 8 and local rotary embeddings, then one with
    full attention and global ones.
    """
    inputs = Skeleton(Checkpoint(tiny_model("gemma3")), attention="eager").capture_inputs(some_tokens(), "cpu", 2)
    local, _, full = inputs.batches[0].calls
    visible = [(call.keywords["attention_mask"][0, 0, -1] == 0).sum().item() for call in (local, full)]
    assert visible == [8, LENGTH]
    assert not torch.equal(local.keywords["position_embeddings"][0], full.keywords["position_embeddings"][0])


def test_batches_share_what_is_equal(tiny_model) -> None:
    first, second, last = Skeleton(Checkpoint(tiny_model("llama"))).capture_inputs(some_tokens(5), "cpu", 2).batches
    assert [batch.rows[0] for batch in (first, second, last)] == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert second.calls[0].keywords["position_embeddings"][0] is first.calls[2].keywords["position_embeddings"][0]


def test_capturing_loads_no_block_and_no_head_and_releases_the_rest(
    tiny_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(tiny_model("qwen2"))
    skeleton, read = Skeleton(checkpoint), list[str]()
    finite = checkpoint.read_finite
    monkeypatch.setattr(checkpoint, "read_finite", lambda name, **how: (read.append(name), finite(name, **how))[1])
    skeleton.capture_inputs(some_tokens(), "cpu")
    assert read == ["model.embed_tokens.weight", "model.norm.weight"]
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    assert not any("forward" in vars(block.module) for block in skeleton.blocks)


def test_tied_weights_share_memory_when_both_are_loaded(tiny_model) -> None:
    skeleton = Skeleton(Checkpoint(tiny_model("llama")))
    assert skeleton.tensor_name("lm_head.weight") == "model.embed_tokens.weight"
    skeleton.load_outside_("cpu")
    assert skeleton.model.lm_head.weight is skeleton.model.model.embed_tokens.weight
    assert not real(skeleton.blocks[0].module)
    skeleton.release_outside_()
    assert skeleton.model.lm_head.weight.is_meta


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            "llama",
            [
                f"model.layers.1.{name}_proj"
                for name in (
                    "self_attn.q",
                    "self_attn.k",
                    "self_attn.v",
                    "self_attn.o",
                    "mlp.gate",
                    "mlp.up",
                    "mlp.down",
                )
            ],
        ),
        ("gpt2", [f"transformer.h.1.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]),
    ],
)
def test_linears_of_a_block(tiny_model, kind: str, names: list[str]) -> None:
    skeleton = Skeleton(Checkpoint(tiny_model(kind)))
    found = skeleton.linears(skeleton.blocks[1])
    assert list(found) == names
    assert {type(module) for module in found.values()} == {Conv1D if kind == "gpt2" else nn.Linear}


def test_linears_of_experts_have_the_names_of_the_file(tiny_model) -> None:
    checkpoint = Checkpoint(tiny_model("mixtral"))
    skeleton = Skeleton(checkpoint)
    found = skeleton.linears(skeleton.blocks[0])
    assert {f"{name}.weight" for name in found} < set(checkpoint.tensors)
    assert "model.layers.0.block_sparse_moe.experts.3.w2" in found
    skeleton.load_(skeleton.blocks[0].name, "cpu")
    for name, linear in found.items():
        assert torch.equal(linear.weight, checkpoint.read(f"{name}.weight"))


def test_experts_that_stay_fused_are_reported(tiny_model) -> None:
    skeleton = Skeleton(Checkpoint(tiny_model("gpt_oss")))
    assert set(skeleton.fused) == {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    assert Skeleton(Checkpoint(tiny_model("mixtral"))).fused == {}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_it_gives_the_same(tiny_model, kind: str) -> None:
    skeleton, tokens = Skeleton(Checkpoint(tiny_model(kind))), some_tokens(4)
    want = block_outputs(reference(tiny_model(kind)), [block.name for block in skeleton.blocks], tokens)
    inputs = skeleton.capture_inputs(tokens, "cuda", 2)
    for index, block in enumerate(skeleton.blocks):
        skeleton.load_(block.name, "cuda")
        skeleton.advance_(index, inputs)
        skeleton.release_(block.name)
        assert near(inputs.hidden.cpu(), want[index], 1e-4)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_over_the_blocks(directory: Path, tokens: Tensor) -> float:
    """Return what stays resident at most beyond what the first block leaves, as a fraction of the model's size."""
    skeleton, resident = Skeleton(Checkpoint(directory)), []
    inputs = skeleton.capture_inputs(tokens, "cpu", 4)
    for index, block in enumerate(skeleton.blocks):
        skeleton.load_(block.name, "cpu")
        skeleton.advance_(index, inputs)
        skeleton.release_(block.name)
        resident.append(resident_bytes())
    return (max(resident) - resident[0]) / skeleton.checkpoint.shape.size_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_blocks_leave_no_memory_behind(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=30, **sizes)).save_pretrained(
        tmp_path
    )
    assert growth_over_the_blocks(tmp_path, some_tokens(4, 128)) < 0.15


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_blocks_of_the_real_model_leave_no_memory_behind(smol: Path) -> None:
    """Without the heap being trimmed it is 0.26 here: blocks of 14 MB are what glibc keeps."""
    assert growth_over_the_blocks(smol, some_tokens(8, 512)) < 0.15


@pytest.mark.slow
def test_the_real_model_block_by_block(smol: Path) -> None:
    skeleton, tokens = Skeleton(Checkpoint(smol)), some_tokens(2, 64)
    want = block_outputs(reference(smol), [block.name for block in skeleton.blocks], tokens)
    for ours, theirs in zip(run_all_blocks(skeleton, tokens, 2), want, strict=True):
        assert near(ours, theirs, 1e-4)


def test_sequences_that_are_too_long(tiny_model) -> None:
    message = r"sequences of 513 tokens, and the model was built for 512\. Use a sequence_length of at most 512"
    with pytest.raises(StageError, match=message):
        Skeleton(Checkpoint(tiny_model("gpt2"))).capture_inputs(some_tokens(1, 513), "cpu")


def test_tokens_of_another_tokenizer(tiny_model) -> None:
    with pytest.raises(StageError, match="the text holds token 512 and the vocabulary ends at 511"):
        Skeleton(Checkpoint(tiny_model("llama"))).capture_inputs(torch.tensor([[1, 512]]), "cpu")


def test_no_tokens(tiny_model) -> None:
    with pytest.raises(StageError, match="there are no calibration tokens"):
        Skeleton(Checkpoint(tiny_model("llama"))).capture_inputs(torch.zeros(0, 8, dtype=torch.int64), "cpu")


class Draws(TorchDispatchMode):
    """Which functions draw random numbers for tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [name for name in ("normal_", "uniform_") if func.__name__.startswith(name) and args[0].is_meta]
        return func(*args, **(kwargs or {}))


def test_no_numbers_are_drawn_for_a_model_without_weights(tiny_model) -> None:
    with Draws() as draws:
        Skeleton(Checkpoint(tiny_model("llama")))
        assert draws.names == []
        nn.init.normal_(torch.empty(2, device="meta"))
        with _no_random_numbers():
            real = nn.init.normal_(torch.zeros(2))
    assert draws.names == ["normal_"]
    assert real.any()


def test_who_else_watches_the_drawing_of_numbers_is_kept(monkeypatch) -> None:
    seen, fill = list[str](), torch.Tensor.normal_
    monkeypatch.setattr(torch.Tensor, "normal_", lambda *given, **named: (seen.append("normal_"), fill(*given))[1])
    with _no_random_numbers():
        with _no_random_numbers():
            torch.empty(2, device="meta").normal_()
        torch.empty(2, device="meta").normal_()
        assert seen == []
    torch.zeros(2).normal_()
    assert seen == ["normal_"]
    assert "uniform_" not in vars(torch.Tensor)
