import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from optkit.algorithms.hadamard import random_rotation
from optkit.errors import SourceError, StageError
from optkit.model import residual_rotation
from optkit.model.checkpoint import Checkpoint
from optkit.stage import Context, Report
from optkit.stages.rotate import Rotate
from tests.conftest import TinyModel
from tests.support.changes import changing
from tests.support.opened import transformers_logits
from tests.support.predictions import predicted

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": None}


def rotate(source: Path, target: Path, seed: int = 0, **fields: bool) -> Report:
    return Rotate(**fields).run(source, target, Context(seed=seed))


def logits(directory: Path) -> Tensor:
    tokens = torch.randint(512, (2, 40), generator=torch.Generator().manual_seed(1))
    return transformers_logits(directory, tokens, dtype=torch.float32)


def saved(directory: Path, **config: object) -> Path:
    """Write a random model with norms and biases that are far from 1 and 0."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES | config), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.05))
    model.save_pretrained(directory)
    return directory


def assert_same_outputs(source: Path, rotated: Path) -> None:
    want = logits(source)
    assert torch.allclose(logits(rotated), want, atol=1e-4 * float(want.abs().max()))


# llama is tied, qwen2 has biases, gemma norms with 1 + weight and a scaled embedding, the others
# experts.
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "mixtral", "qwen2_moe"])
def test_the_model_computes_what_it_did(tiny_model: TinyModel, target: Path, kind: str) -> None:
    report = rotate(tiny_model(kind), target)
    assert_same_outputs(tiny_model(kind), target)
    assert report.skipped == {}
    assert report.details["residual_rotation"] == "Hadamard"
    assert 0 < report.details["largest_difference"] < 1e-4


@pytest.mark.parametrize(
    "config",
    [
        # biases of writers live in the residual stream
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen3", "head_dim": 32},  # norms of the heads of queries and keys stay
        {"model_type": "phi3"},  # queries, keys and values in one matrix, gate and up in another
        {"model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
        # norms of all queries at once, as wide as the stream
        {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    ],
    ids=lambda config: config["model_type"],
)
def test_architectures_with_a_twist(tmp_path: Path, target: Path, config: dict[str, object]) -> None:
    source = saved(tmp_path / "source", **config)
    report = rotate(source, target)
    assert_same_outputs(source, target)
    heads = "the heads stay as they are: no v_proj"
    assert report.skipped == (
        {f"model.layers.{index}": heads for index in range(2)} if config["model_type"] == "phi3" else {}
    )


def test_the_weights_are_those_of_the_papers_formula(tmp_path: Path, target: Path) -> None:
    source = saved(tmp_path / "source", model_type="llama", tie_word_embeddings=False, attention_bias=True)
    rotate(source, target, seed=7)
    before, after = (load_file(path / "model.safetensors") for path in (source, target))
    stream, heads = random_rotation(64, 7).matrix(), random_rotation(16, 8).matrix()
    layer = "model.layers.0"
    norm = before[f"{layer}.input_layernorm.weight"].double()
    final = before["model.norm.weight"].double()
    both = torch.block_diag(heads, heads)
    expected = {
        "model.embed_tokens.weight": before["model.embed_tokens.weight"].double() @ stream,
        "lm_head.weight": before["lm_head.weight"].double() * final @ stream,
        f"{layer}.self_attn.q_proj.weight": before[f"{layer}.self_attn.q_proj.weight"].double() * norm @ stream,
        f"{layer}.self_attn.v_proj.weight": both.T
        @ (before[f"{layer}.self_attn.v_proj.weight"].double() * norm @ stream),
        f"{layer}.self_attn.v_proj.bias": before[f"{layer}.self_attn.v_proj.bias"].double() @ both,
        f"{layer}.self_attn.o_proj.weight": stream.T
        @ before[f"{layer}.self_attn.o_proj.weight"].double()
        @ torch.block_diag(both, both),
        f"{layer}.self_attn.o_proj.bias": before[f"{layer}.self_attn.o_proj.bias"].double() @ stream,
        f"{layer}.mlp.down_proj.weight": stream.T @ before[f"{layer}.mlp.down_proj.weight"].double(),
        f"{layer}.input_layernorm.weight": torch.ones(64).double(),
    }
    for name, want in expected.items():
        assert torch.allclose(after[name].double(), want, atol=1e-6), name
    unchanged = f"{layer}.self_attn.q_proj.bias"
    assert torch.equal(after[unchanged], before[unchanged])


def test_outliers_are_spread_over_all_channels(tiny_model: TinyModel, target: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    with changing(source) as tensors:
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name][:, 3] *= 40
    rotate(source, target)
    rotated = load_file(target / "model.safetensors")[name]

    def peak(weight: Tensor) -> float:
        return float((weight.abs().amax(1) / weight.pow(2).mean(1).sqrt()).median())

    assert peak(tensors[name]) > 7
    assert peak(rotated) < 4


def test_heads_can_be_left_alone(tiny_model: TinyModel, target: Path) -> None:
    rotate(tiny_model("qwen2"), target, heads=False)
    before, after = (load_file(path / "model.safetensors") for path in (tiny_model("qwen2"), target))
    name = "model.layers.0.self_attn.v_proj.bias"
    assert torch.equal(before[name], after[name])
    assert_same_outputs(tiny_model("qwen2"), target)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3", "gpt_oss", "opt", "gptj"])
def test_heads_alone_leave_the_residual_stream_as_it_is(tiny_model: TinyModel, target: Path, kind: str) -> None:
    if kind in ("opt", "gptj"):  # out_proj
        with pytest.raises(
            StageError, match=r"^rotate: no block has heads that can be rotated\. .*: no o_proj\. Take rotate out"
        ):
            rotate(tiny_model(kind), target, residual=False)
        return
    report = rotate(tiny_model(kind), target, residual=False)
    assert_same_outputs(tiny_model(kind), target)
    before, after = (load_file(path / "model.safetensors") for path in (tiny_model(kind), target))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert set(before) == set(after)
    assert {name.split(".")[-2] for name in changed} == {"v_proj", "o_proj"}
    assert report.changed == len(changed)
    predicted(Rotate(residual=False), tiny_model(kind), target)


def test_nothing_to_rotate_is_an_error() -> None:
    with pytest.raises(ValidationError, match="nothing is left to rotate: set residual or heads to true"):
        Rotate(residual=False, heads=False)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "mixtral"])
def test_the_prediction_is_what_comes_out(tiny_model: TinyModel, target: Path, kind: str) -> None:
    report = rotate(tiny_model(kind), target)
    untied = predicted(Rotate(), tiny_model(kind), target).disk_bytes - Checkpoint(tiny_model(kind)).shape.size_bytes
    said = ("lm_head is no longer tied to the embedding, which takes 131,072 bytes more",)
    assert report.notes == (said if untied else ())
    assert report.details["untied_lm_head_bytes"] == untied == (512 * 64 * 4 if kind in ("llama", "gemma") else 0)


def test_a_tied_model_whose_file_holds_both_matrices_is_tied_no_longer(
    tiny_model: TinyModel, target: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    with changing(source) as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert Checkpoint(source).config["tie_word_embeddings"]
    rotate(source, target)
    written = Checkpoint(target)
    assert not torch.equal(written.read("lm_head.weight"), written.read("model.embed_tokens.weight"))
    assert written.config["tie_word_embeddings"] is False  # an engine that ties would leave lm_head out
    predicted(Rotate(), source, target)
    assert_same_outputs(source, target)
    (heads := tmp_path / "heads").mkdir()
    rotate(source, heads, residual=False)
    assert Checkpoint(heads).config == Checkpoint(source).config


def test_other_seeds_give_other_weights_and_the_same_model(tiny_model: TinyModel, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        rotate(tiny_model("llama"), tmp_path / name, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    assert_same_outputs(tmp_path / "a", tmp_path / "c")


def test_bfloat16_stays_bfloat16(tmp_path: Path, target: Path) -> None:
    source = saved(tmp_path / "source", model_type="llama", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    shutil.rmtree(source)
    model.save_pretrained(source)
    report = rotate(source, target)
    assert {tensor.dtype for tensor in load_file(target / "model.safetensors").values()} == {torch.bfloat16}
    assert report.details["largest_difference"] < 1e-4
    want = logits(source)
    assert torch.allclose(logits(target), want, atol=0.05 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "gpt2",
            r"^rotate: transformer\.wte\.weight: what enters the first block is not the embedding "
            r"of the tokens, up to a factor",
        ),
        ("opt", r"^rotate: model\.decoder\.embed_tokens\.weight: what enters the first block is not the embedding"),
        ("gptj", r"^rotate: transformer\.h\.0\.ln_1: LayerNorm is no RMS norm\. A norm that subtracts the mean"),
        (
            "gemma3",
            r"^rotate: model\.layers\.0\.post_feedforward_layernorm: no linear layer reads "
            r"what this Gemma3RMSNorm makes",
        ),
        ("gpt_oss", r"^rotate: model\.layers\.0\.mlp\.experts: the experts cannot be rotated\. "),
    ],
)
def test_architectures_that_do_not_commute_are_refused(
    tiny_model: TinyModel, target: Path, kind: str, message: str
) -> None:
    with pytest.raises(StageError, match=message):
        rotate(tiny_model(kind), target)
    assert not list(target.iterdir())


@pytest.mark.parametrize("kind", ["gemma2", "olmo2"])
def test_norms_behind_the_writers_are_refused(tmp_path: Path, target: Path, kind: str) -> None:
    source = saved(tmp_path / "source", model_type=kind, head_dim=16)
    with pytest.raises(
        StageError, match=r"^rotate: model\.layers\.0\.post_feedforward_layernorm: no linear .* scales what they add"
    ):
        rotate(source, target)


def test_a_block_that_computes_something_else_is_refused(
    tiny_model: TinyModel, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = residual_rotation.rotate_stream_

    def forgetful(parts: residual_rotation.StreamParts, rotation: residual_rotation.Rotation) -> list[str]:
        writers = {name: writer for name, writer in parts.writers.items() if not name.endswith("1.mlp.down_proj")}
        return real(residual_rotation.StreamParts(parts.norms, writers), rotation)

    monkeypatch.setattr(residual_rotation, "rotate_stream_", forgetful)
    with pytest.raises(
        StageError,
        match=r"^rotate: model\.layers\.1: rotated, it computes something else: tokens differ by up to [\d.]+",
    ):
        rotate(tiny_model("llama"), target)
    assert not list(target.iterdir())


def test_a_wrong_head_size_is_refused_with_its_remedy(
    tiny_model: TinyModel, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = residual_rotation.find_heads
    monkeypatch.setattr(residual_rotation, "find_heads", lambda *given: replace(real(*given), size=32))
    with pytest.raises(
        StageError, match=r"model\.layers\.0: rotated, it computes something else.*Set rotate\.heads to false\.$"
    ):
        rotate(tiny_model("llama"), target)


def test_matrices_that_the_language_model_does_not_read_are_refused(
    tiny_model: TinyModel, target: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_model("qwen2"), tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, source / "model.safetensors")
    rotate(source, target)
    save_file(tensors | {"model.layers.0.attn.masked_bias": torch.ones(2, 2)}, source / "model.safetensors")
    (tmp_path / "other").mkdir()
    with pytest.raises(
        StageError,
        match=r"^rotate: 1 matrices belong to no part of the language model \(model\.layers\.0\.attn\.masked_bias\)",
    ):
        rotate(source, tmp_path / "other")


def test_weights_that_no_longer_fit_float16_are_refused(tmp_path: Path, target: Path) -> None:
    source = saved(tmp_path / "source", model_type="llama")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.fill_(6e4)
        model.model.layers[0].mlp.gate_proj.weight.fill_(1)
        model.model.layers[0].self_attn.q_proj.weight.fill_(1)
    shutil.rmtree(source)
    model.save_pretrained(source)
    message = (
        r"q_proj\.weight: rotated weights of up to [\d,]+ do not fit float16\. Put `- cast: "
        r"\{dtype: bfloat16\}` in front"
    )
    with pytest.raises(StageError, match=message):
        rotate(source, target)


def test_nan_weights_are_refused(tiny_model: TinyModel, target: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    with changing(source) as tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    with pytest.raises(SourceError, match=r"up_proj\.weight: 1 of 8,192 weights are NaN"):
        rotate(source, target)
