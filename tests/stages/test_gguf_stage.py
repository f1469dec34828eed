"""A checkpoint as GGUF, read back by optkit's import and by transformers, and run by llama.cpp."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.errors import StageError
from optkit.gguf import proof, vocabulary, writing
from optkit.kernels.packed_linear import PackedLinear
from optkit.kernels.quant_methods import quantized_layers
from optkit.model.checkpoint import Checkpoint
from optkit.model.formats.base import Format
from optkit.model.gguf_file import read_gguf
from optkit.model.layer_sizes import bits_per_weight
from optkit.progress import SilentProgress
from optkit.session import open_session
from optkit.source.gguf_import import import_gguf
from optkit.stages.gguf import Gguf
from tests.conftest import TinyModel
from tests.support.opened import transformers_logits
from tests.support.packed_models import save_packed
from tests.support.running import run_stage
from tests.support.tiny_models import SIZES, save_tokenizer

gguf = pytest.importorskip("gguf", reason="needs gguf, of the extra `gguf`")
TOKENS = torch.arange(48).reshape(2, 24) * 7
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}
EXPERTS = {"num_experts_per_tok": 2}
WINDOWED = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
WRITTEN: dict[str, dict[str, Any]] = {
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 32},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "gemma": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": WINDOWED,
    "gemma3_text": {**WINDOWED, "num_hidden_layers": 7},
    "llama": {"rope_parameters": YARN},
    "qwen2": {"rope_parameters": YARN},
}
"""Models that optkit writes and does not import."""


def save(kind: str, target: Path, **fields: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**SIZES, "tie_word_embeddings": False, **KINDS.get(kind, {}), **fields}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32)
    model.save_pretrained(target)
    save_tokenizer(target)
    return target


@pytest.fixture(scope="module", params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param))


def read_back(directory: Path, target: Path) -> Checkpoint:
    target.mkdir()
    import_gguf(directory / "model.gguf", target, SilentProgress())
    return Checkpoint(target)


def test_floats_come_back_as_they_were(source: Path, tmp_path: Path) -> None:
    report = run_stage(Gguf(), source, tmp_path / "gguf")
    assert Format.of(tmp_path / "gguf") is Format.GGUF
    before, after = Checkpoint(source), read_back(tmp_path / "gguf", tmp_path / "back")
    assert set(before.tensors) == set(after.tensors)
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.tensors)
    for key in ("rms_norm_eps", "head_dim", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings"):
        assert key not in before.config or before.config[key] is None or after.config[key] == before.config[key]
    assert report.details["types"] == {"F32": sum(len(each.shape) > 1 for each in before.tensors.values())}
    assert report.details["bits_per_weight"] == 32


def test_only_what_llama_cpp_makes_needs_it() -> None:
    assert [len(Gguf(**fields).needs()) for fields in ({}, {"type": "F16"})] == [1, 1]
    assert [len(Gguf(**fields).needs()) for fields in ({"type": "Q4_K_M"}, {"embedding": "Q6_K"})] == [2, 2]


@pytest.mark.parametrize(("symmetric", "kind"), [(True, "Q4_0"), (False, "Q4_1")])
def test_codes_come_back_as_they_were(source: Path, tmp_path: Path, symmetric: bool, kind: str) -> None:
    save_packed(source, tmp_path / "packed", tmp_path / "plain", symmetric=symmetric, dtype=torch.float16)
    report = run_stage(Gguf(), tmp_path / "packed", tmp_path / "gguf")
    after = read_back(tmp_path / "gguf", tmp_path / "back")
    layers = quantized_layers(Checkpoint(tmp_path / "packed")) or {}
    assert report.details["types"][kind] == len(layers)
    for name, layer in layers.items():
        weight = layer.integers("cpu")
        assert weight is not None
        expected = PackedLinear(weight, None, torch.float32).dequantize()
        found = after.read(f"{name}.weight")
        assert torch.equal(found, expected) if symmetric else (found - expected).abs().max() < 2e-4
    config = json.loads((tmp_path / "gguf" / "config.json").read_text())
    assert "quantization_config" not in config
    assert (tmp_path / "gguf" / "tokenizer.json").is_file()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_transformers_reads_the_same_model(tiny_model: TinyModel, tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    source = tiny_model(kind)
    run_stage(Gguf(), source, tmp_path / "gguf")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "gguf", gguf_file="model.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    with torch.no_grad():
        expected = transformers_logits(source, TOKENS)
        assert torch.allclose(theirs(TOKENS).logits, expected, atol=1e-5)


def test_the_counted_bits_are_those_of_the_file(tiny_model: TinyModel, tmp_path: Path) -> None:
    save_packed(tiny_model("qwen2"), tmp_path / "packed", tmp_path / "plain")
    report = run_stage(Gguf(), tmp_path / "packed", tmp_path / "gguf")
    tensors = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf").tensors
    bits = 8 * sum(int(each.n_bytes) for each in tensors) / sum(int(each.n_elements) for each in tensors)
    assert bits_per_weight(Format.GGUF.layer_sizes(tmp_path / "gguf")) == bits
    assert report.details["bits_per_weight"] == round(bits, 4)
    cost, left = Gguf().predict(Checkpoint(tmp_path / "packed").shape, "cpu")
    assert left.size_bytes == cost.disk_bytes == sum(int(each.n_bytes) for each in tensors)
    assert Format.GGUF.shape(tmp_path / "gguf").size_bytes == left.size_bytes


def test_a_window_limits_the_context_and_scaled_frequencies_travel(tmp_path: Path) -> None:
    run_stage(Gguf(), save("mistral", tmp_path / "mistral", sliding_window=64), tmp_path / "a")
    assert read_gguf(tmp_path / "a" / "model.gguf").get("context_length") == 64
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    run_stage(Gguf(), save("llama", tmp_path / "llama", rope_parameters=rope), tmp_path / "b")
    (factors,) = (
        each.data for each in gguf.GGUFReader(tmp_path / "b" / "model.gguf").tensors if each.name == "rope_freqs.weight"
    )
    assert factors.shape == (8,)
    assert factors[0] == 1
    assert factors[-1] == pytest.approx(8)
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    run_stage(Gguf(), save("llama", tmp_path / "linear", rope_parameters=linear), tmp_path / "c")
    assert read_back(tmp_path / "c", tmp_path / "back").config["rope_parameters"]["factor"] == 2


class TestLlamaCpp:
    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, of the extra `llama-cpp`")

    def test_it_computes_the_same(self, source: Path, tmp_path: Path) -> None:
        run_stage(Gguf(), source, tmp_path / "gguf")
        ours, theirs = open_session(source), open_session(tmp_path / "gguf")
        expected = ours.logits(TOKENS)
        assert torch.allclose(theirs.logits(TOKENS), expected, atol=2e-3)  # its KV cache is in float16
        assert torch.allclose(theirs.stepped_logits(TOKENS, 20), expected[:, 20:], atol=2e-3)
        assert torch.equal(theirs.generate(TOKENS, 8), ours.generate(TOKENS, 8))
        assert theirs.vocabulary == ours.vocabulary
        assert theirs.positions == ours.positions
        theirs.close()

    @pytest.mark.parametrize(("kind", "fields"), WRITTEN.items())
    def test_it_computes_other_architectures_too(self, tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
        source = save(kind, tmp_path / "source", **fields)
        report = run_stage(Gguf(), source, tmp_path / "gguf")
        assert report.details["divergence"] < 1e-6
        ours, theirs = open_session(source), open_session(tmp_path / "gguf")
        assert torch.allclose(theirs.logits(TOKENS), ours.logits(TOKENS), atol=2e-3)
        assert theirs.positions == ours.positions
        theirs.close()

    @pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
    def test_codes_of_experts_are_stacked(self, tmp_path: Path, kind: str) -> None:
        source = save(kind, tmp_path / "source", **WRITTEN[kind])
        save_packed(source, tmp_path / "packed", tmp_path / "plain", dtype=torch.float16)
        report = run_stage(Gguf(), tmp_path / "packed", tmp_path / "gguf")
        assert report.details["divergence"] < 1e-2
        tensors = read_gguf(tmp_path / "gguf" / "model.gguf").tensors
        assert (tensors["blk.0.ffn_up_exps.weight"].type, len(tensors["blk.0.ffn_up_exps.weight"].shape)) == ("Q4_0", 3)

    def test_the_embedding_has_the_very_bytes_of_llama_cpp(self, tmp_path: Path) -> None:
        source = save("qwen2", tmp_path / "source", hidden_size=256, tie_word_embeddings=True)
        save_packed(source, tmp_path / "packed", tmp_path / "plain", dtype=torch.float32)
        report = run_stage(Gguf(embedding="Q6_K"), tmp_path / "packed", tmp_path / "ours")
        assert report.details["types"]["Q6_K"] == 1
        run_stage(Gguf(type="Q6_K", allow_fallback=True), source, tmp_path / "theirs")
        ours, theirs = (
            {each.name: each for each in gguf.GGUFReader(tmp_path / name / "model.gguf").tensors}["token_embd.weight"]
            for name in ("ours", "theirs")
        )
        assert (ours.tensor_type, ours.data.tobytes()) == (theirs.tensor_type, theirs.data.tobytes())
        save_packed(save("qwen2", tmp_path / "small"), tmp_path / "narrow", tmp_path / "plain2")
        message = "weight: rows of 64 numbers are no multiple of the 256 that Q6_K packs. Set embedding: Q8"
        with pytest.raises(StageError, match=message):
            run_stage(Gguf(embedding="Q6_K"), tmp_path / "narrow", tmp_path / "a")

    def test_a_file_that_says_something_else_is_refused(
        self, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(proof, "LIMIT", 0.01)  # a tiny model loses 0.06 so, and a real one 0.26
        assert run_stage(Gguf(), tiny_model("llama"), tmp_path / "whole").details["divergence"] < 1e-6
        monkeypatch.setattr(writing, "PERMUTED", {})
        with pytest.raises(
            StageError, match=r"gguf: llama.cpp computes something else: 0.06\d* nats a token apart. Its"
        ):
            run_stage(Gguf(), tiny_model("llama"), tmp_path / "a")
        monkeypatch.undo()
        monkeypatch.setattr(vocabulary, "PRE_TOKENIZERS", {("ByteLevel+",): "refact"})
        report = run_stage(Gguf(), tiny_model("llama"), tmp_path / "b")
        assert report.details["divergence"] < 1e-3
        assert report.notes[0].startswith("llama.cpp cuts text into other tokens than transformers, from token ")

    def test_a_text_weighs_what_its_quantizer_loses(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        text = {"dataset": "python-reference", "samples": 4, "sequence_length": 64}
        weighed = run_stage(Gguf(type="Q4_0", imatrix=text), tiny_model("llama"), tmp_path / "a")
        plain = run_stage(Gguf(type="Q4_0"), tiny_model("llama"), tmp_path / "b")
        assert weighed.details["divergence"] < plain.details["divergence"]
        assert [each["dataset"] for each in weighed.calibrated_on] == ["python-reference"]
        cost, _ = Gguf(type="Q4_0", imatrix=text).predict(Checkpoint(tiny_model("llama")).shape, "cpu")
        assert cost.ram_bytes > 7e8

    @pytest.mark.parametrize(("kind", "most"), [("Q8_0", 0.01), ("Q5_0", 0.06), ("Q4_1", 0.12)])
    def test_its_own_quantizer(self, tiny_model: TinyModel, tmp_path: Path, kind: str, most: float) -> None:
        report = run_stage(Gguf(type=kind), tiny_model("llama"), tmp_path / "gguf")
        assert report.details["types"][kind] >= 20
        assert not report.notes
        assert [path.name for path in (tmp_path / "gguf").glob("*.gguf")] == ["model.gguf"]
        before, after = Checkpoint(tiny_model("llama")), read_back(tmp_path / "gguf", tmp_path / "back")
        for name in before.tensors:
            weight = before.read(name)
            assert (after.read(name) - weight).norm() <= most * weight.norm()

    def test_a_fallback_is_said(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        report = run_stage(Gguf(type="Q4_K_M", allow_fallback=True), tiny_model("llama"), tmp_path / "gguf")
        types = " and ".join(f"{count} as {kind}" for kind, count in report.details["types"].items())
        assert report.notes == (
            f"llama.cpp stored 22 of 22 matrices otherwise than as Q4_K_M, whose rows are no multiple of 256: {types}; "
            f"the file has {report.details['bits_per_weight']:.2f} bits a weight",
        )
