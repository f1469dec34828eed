from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, conversion_mapping
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter
from transformers.pytorch_utils import Conv1D

from optkit.errors import SourceError, StageError
from optkit.model import blocks
from optkit.model.checkpoint import Checkpoint
from optkit.model.routers import is_router
from optkit.model.skeleton import Skeleton

KINDS = ["llama", "qwen2", "gemma", "gemma3", "gpt2", "mixtral", "qwen2_moe"]
LENGTH = 24
LLAMA_PROJECTIONS = ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"]


def some_tokens(rows: int = 5, length: int = LENGTH) -> Tensor:
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(3))


def reference(directory: Path, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> PreTrainedModel:
    options = {"attn_implementation": attention, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **options).eval()


def real(module: nn.Module) -> bool:
    devices = {parameter.device.type for parameter in module.parameters()}
    assert len(devices) == 1
    return devices == {"cpu"}


def run_all_blocks(skeleton: Skeleton, tokens: Tensor, batch_size: int) -> list[Tensor]:
    """Return the output of each block, float [sequences, length, hidden], with one block real at a time."""
    inputs = skeleton.capture_inputs(tokens, "cpu", batch_size)
    outputs = []
    for index, block in enumerate(skeleton.blocks):
        skeleton.load_(block.name, "cpu")
        assert [real(other.module) for other in skeleton.blocks] == [other is block for other in skeleton.blocks]
        for batch in inputs.batches:
            inputs.hidden[batch.rows] = skeleton.run_block(index, inputs.hidden[batch.rows], batch.calls[index])
        skeleton.release_(block.name)
        outputs.append(inputs.hidden.clone())
    return outputs


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
    tolerance = 2e-6 if dtype == torch.float32 else 0.02
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_size_changes_nothing(tiny_model, kind: str) -> None:
    skeleton, tokens = Skeleton(Checkpoint(tiny_model(kind))), some_tokens(5)
    whole, parts = run_all_blocks(skeleton, tokens, 5)[-1], run_all_blocks(skeleton, tokens, 2)[-1]
    assert torch.allclose(whole, parts, rtol=1e-5, atol=1e-5)


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
        assert torch.allclose(skeleton.model(tokens).logits, want, rtol=1e-5, atol=1e-5)
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
    """Gemma 3: two blocks with a sliding window of 8 and local rotary embeddings, then one with full attention and global ones."""
    inputs = Skeleton(Checkpoint(tiny_model("gemma3")), attention="eager").capture_inputs(some_tokens(), "cpu", 2)
    local, _, full = inputs.batches[0].calls
    visible = [(call.keywords["attention_mask"][0, 0, -1] == 0).sum().item() for call in (local, full)]
    assert visible == [8, LENGTH]
    assert not torch.equal(local.keywords["position_embeddings"][0], full.keywords["position_embeddings"][0])


def test_batches_share_what_is_equal(tiny_model) -> None:
    first, second, last = Skeleton(Checkpoint(tiny_model("llama"))).capture_inputs(some_tokens(5), "cpu", 2).batches
    assert [batch.rows for batch in (first, second, last)] == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert second.calls[0].keywords["position_embeddings"][0] is first.calls[2].keywords["position_embeddings"][0]


def test_capturing_loads_no_block_and_no_head_and_releases_the_rest(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(tiny_model("qwen2"))
    skeleton, read = Skeleton(checkpoint), list[str]()
    finite = checkpoint.read_finite
    monkeypatch.setattr(checkpoint, "read_finite", lambda name: (read.append(name), finite(name))[1])
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
                for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
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


def test_routers_are_told_from_projections(tiny_model) -> None:
    skeleton = Skeleton(Checkpoint(tiny_model("qwen2_moe")))
    assert [name for name in skeleton.linears(skeleton.blocks[1]) if is_router(name)] == ["model.layers.1.mlp.shared_expert_gate"]
    assert is_router("model.layers.0.block_sparse_moe.gate")
    assert is_router("model.layers.0.mlp.router")
    assert is_router("model.layers.0.block_sparse_moe.router.layer")
    assert not is_router("model.layers.0.mlp.gate_proj")
    assert not is_router("model.layers.0.mlp.experts.0.gate")


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
        for batch in inputs.batches:
            inputs.hidden[batch.rows] = skeleton.run_block(index, inputs.hidden[batch.rows], batch.calls[index])
        skeleton.release_(block.name)
        assert torch.allclose(inputs.hidden.cpu(), want[index], rtol=1e-4, atol=1e-4)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_over_the_blocks(directory: Path, tokens: Tensor) -> float:
    """Return what stays resident at most after a block, as a fraction of the model's size."""
    skeleton, most = Skeleton(Checkpoint(directory)), 0
    inputs = skeleton.capture_inputs(tokens, "cpu", 4)
    before = resident_bytes()
    for index, block in enumerate(skeleton.blocks):
        skeleton.load_(block.name, "cpu")
        for batch in inputs.batches:
            inputs.hidden[batch.rows] = skeleton.run_block(index, inputs.hidden[batch.rows], batch.calls[index])
        skeleton.release_(block.name)
        most = max(most, resident_bytes() - before)
    return most / skeleton.checkpoint.shape.size_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_blocks_leave_no_memory_behind(tmp_path: Path) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "max_position_embeddings": 512}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=30, **sizes)).save_pretrained(tmp_path)
    assert growth_over_the_blocks(tmp_path, some_tokens(4, 128)) < 0.15


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_blocks_of_the_real_model_leave_no_memory_behind(smol: Path) -> None:
    """Without the heap being trimmed it is 0.7 here: blocks of 14 MB are what glibc keeps."""
    assert growth_over_the_blocks(smol, some_tokens(8, 512)) < 0.15


@pytest.mark.slow
def test_the_real_model_block_by_block(smol: Path) -> None:
    skeleton, tokens = Skeleton(Checkpoint(smol)), some_tokens(2, 64)
    want = block_outputs(reference(smol), [block.name for block in skeleton.blocks], tokens)
    for ours, theirs in zip(run_all_blocks(skeleton, tokens, 2), want, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


# Files that are not named as the model is


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def changed_copy(source: Path, parent: Path, change: Change = dict, **config: object) -> Path:
    """Return a copy of a model with changed tensors and changed keys in config.json."""
    target = Path(shutil.copytree(source, parent / "changed"))
    tensors = change(load_file(source / "model.safetensors"))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return target


def replacing(name: str, value: float) -> Change:
    return lambda tensors: tensors | {name: torch.full_like(tensors[name], value)}


def without(name: str) -> Change:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


def logits_of(directory: Path) -> Tensor:
    skeleton = Skeleton(Checkpoint(directory))
    skeleton.load_("", "cpu")
    with torch.no_grad():
        return skeleton.model(some_tokens()).logits


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
    assert "the checkpoint stores the experts joined" in Skeleton(Checkpoint(directory)).fused["model.layers.0.mlp.experts"]
    assert torch.allclose(logits_of(directory), logits_of(tiny_model("mixtral")), rtol=1e-5, atol=1e-5)


# Errors


def test_missing_and_extra_tensors_are_counted_and_named(tiny_model, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if ".0.self_attn." not in name} | {"model.extra": torch.ones(2)}

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
    with pytest.raises(SourceError, match=rf"parameters that the files lack: 1 \({lost}\); tensors that the model has no place for: 0"):
        Skeleton(Checkpoint(directory))


def test_shapes_that_differ_from_the_config(tiny_model, tmp_path: Path) -> None:
    directory = changed_copy(tiny_model("llama"), tmp_path, intermediate_size=256)
    with pytest.raises(SourceError, match=r"9 of 29 tensors have another shape .*is \[64, 128\], not \[64, 256\]"):
        Skeleton(Checkpoint(directory))


def test_a_tied_tensor_of_another_shape_is_named_once(tiny_model, tmp_path: Path) -> None:
    directory = changed_copy(tiny_model("llama"), tmp_path, vocab_size=600)
    with pytest.raises(SourceError, match=r"says: model.embed_tokens.weight is \[512, 64\], not \[600, 64\]\. See that"):
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


def test_quantized_models_are_refused(tiny_model, tmp_path: Path) -> None:
    directory = changed_copy(tiny_model("llama"), tmp_path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(SourceError, match=r"the model is quantized already \(gptq\)"):
        Skeleton(Checkpoint(directory))


def test_an_attention_that_the_architecture_does_not_have(tiny_model) -> None:
    with pytest.raises(SourceError, match=r"transformers cannot build GptOssForCausalLM\. .*scaled_dot_product_attention"):
        Skeleton(Checkpoint(tiny_model("gpt_oss")), attention="sdpa")


def test_an_architecture_that_transformers_does_not_know(tiny_model, tmp_path: Path) -> None:
    directory = changed_copy(tiny_model("llama"), tmp_path, model_type="not_a_model", architectures=["NotAModelForCausalLM"])
    with pytest.raises(SourceError, match=r"transformers cannot build NotAModelForCausalLM\. .*not_a_model"):
        Skeleton(Checkpoint(directory))


def test_weights_that_transformers_rewrites_are_refused(tiny_model, tmp_path: Path) -> None:
    rule = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Transpose(0, 1)])
    register_checkpoint_conversion_mapping("LlamaForCausalLM", [rule], overwrite=True)
    try:
        with pytest.raises(SourceError, match=r"llama is not supported: transformers rewrites model\.layers\.0\.mlp\.up_proj\.weight"):
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


def test_no_list_of_blocks() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=64))
    model.config.n_layer = 5
    message = (
        r"gpt2: unsupported architecture GPT2LMHeadModel: no list of 5 decoder blocks\. .*num_hidden_layers = 5.* transformer\.h with 2"
    )
    with pytest.raises(SourceError, match=message):
        blocks.find_blocks(model)


class TupleBlock(nn.Linear):
    form: type = tuple

    def forward(self, hidden_states: Tensor) -> object:
        return self.form((super().forward(hidden_states), None))


class Custom(nn.Module):
    """A base model of the kind that custom code has: tuples between the blocks, hidden states by keyword."""

    config = AutoConfig.for_model("llama")

    def __init__(self, between: float) -> None:
        super().__init__()
        self.embed, self.layers, self.between = nn.Embedding(512, 8), nn.ModuleList(TupleBlock(8, 8) for _ in range(3)), between

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden_states=hidden)[0] * self.between if self.between != 1 else layer(hidden_states=hidden)[0]
        return hidden


def custom(between: float) -> tuple[Custom, tuple[blocks.Block, ...]]:
    model = Custom(between)
    return model, tuple(blocks.Block(f"layers.{index}", layer) for index, layer in enumerate(model.layers))


@pytest.mark.parametrize("form", [tuple, list])
def test_blocks_that_return_tuples_and_take_keywords(form: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TupleBlock, "form", form)
    (model, parts), tokens = custom(between=1), some_tokens(2)
    hidden, calls = blocks.record_calls(model, parts, tokens)
    assert torch.equal(hidden, model.embed(tokens))
    for block, call in zip(parts, calls, strict=True):
        hidden = call.run(block.module, hidden)
    assert torch.equal(hidden, model(tokens, use_cache=False))


def test_hidden_states_that_change_between_blocks_are_refused() -> None:
    model, parts = custom(between=0.5)
    with pytest.raises(SourceError, match=r"unsupported architecture Custom: its blocks cannot be run one by one\. "):
        blocks.record_calls(model, parts, some_tokens(2))


def test_hidden_states_of_another_form_are_refused() -> None:
    model, parts = custom(between=1)
    model.embed.register_forward_hook(lambda module, inputs, output: output[None])
    with pytest.raises(SourceError, match=r"the hidden states are \[1, 2, 24, 8\] for tokens \[2, 24\]"):
        blocks.record_calls(model, parts, some_tokens(2))


def test_blocks_that_are_not_called_are_refused() -> None:
    model, parts = custom(between=1)
    with pytest.raises(SourceError, match="only 3 of 4 blocks were called"):
        blocks.record_calls(model, (*parts, blocks.Block("layers.3", TupleBlock(8, 8))), some_tokens(2))


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
