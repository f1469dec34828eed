import struct

import pytest
import torch

from optkit.errors import MissingPackageError, SourceError
from optkit.model.checkpoint import Checkpoint
from optkit.model.gguf_file import read_gguf
from optkit.progress import SilentProgress
from optkit.source.gguf_import import import_gguf
from optkit.source.gguf_llama import checkpoint_shape, layout_of
from optkit.source.gguf_metadata import shortest_float32
from tests.support.gguf_files import save_gguf

gguf = pytest.importorskip("gguf", reason="needs gguf, of the extra `gguf`")


class TestHeader:
    def test_it_says_what_the_gguf_package_says(self, llama_file):
        header, reader = read_gguf(llama_file), gguf.GGUFReader(llama_file)
        assert {name: tensor.shape for name, tensor in header.tensors.items()} == {
            tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors
        }
        assert {name: tensor.size_bytes for name, tensor in header.tensors.items()} == {
            t.name: int(t.n_bytes) for t in reader.tensors
        }
        for name, value in header.metadata.items():
            expected = reader.fields[name].contents()
            assert value == (("array", len(expected)) if isinstance(expected, list) else expected)

    def test_not_there(self, tmp_path):
        with pytest.raises(SourceError, match="gone.gguf: no such file"):
            read_gguf(tmp_path / "gone.gguf")

    @pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04 a zip"])
    def test_another_kind_of_file(self, tmp_path, content):
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(
            SourceError, match=rf"not a GGUF file \({len(content)} bytes\). It does not begin with 'GGUF'. Download"
        ):
            read_gguf(tmp_path / "model.gguf")

    @pytest.mark.parametrize("share", [0.00002, 0.001, 0.02, 0.5, 0.99999])
    def test_cut_off_anywhere(self, llama_file, tmp_path, share):
        whole = llama_file.read_bytes()
        (tmp_path / "model.gguf").write_bytes(whole[: max(4, int(len(whole) * share))])
        with pytest.raises(
            SourceError,
            match=r"the GGUF file has [\d,]+ bytes.* It was cut off or overwritten. Copy or download it again",
        ):
            read_gguf(tmp_path / "model.gguf")

    def test_another_version(self, tmp_path):
        (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
        with pytest.raises(SourceError, match="GGUF version 1. optkit reads versions 2 and 3, little-endian"):
            read_gguf(tmp_path / "model.gguf")

    def test_unknown_kinds(self, tmp_path):
        key = struct.pack("<Q", 1) + b"k"
        (tmp_path / "value.gguf").write_bytes(
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 99) + bytes(64)
        )
        with pytest.raises(SourceError, match="unknown value type 99 in the metadata"):
            read_gguf(tmp_path / "value.gguf")
        tensor = key + struct.pack("<IQIQ", 1, 32, 999, 0)
        (tmp_path / "tensor.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor + bytes(64))
        with pytest.raises(
            SourceError, match="tensor.gguf: k: the tensor type 999 is not known. Run: pip install -U gguf"
        ):
            read_gguf(tmp_path / "tensor.gguf")

    def test_one_part_of_several(self, models, tmp_path):
        file = save_gguf(models["llama"], tmp_path / "model.gguf", "llama", split__count=3)
        with pytest.raises(
            SourceError, match="one of 3 parts of a split GGUF. optkit reads whole files. Join them: llama-gguf-split"
        ):
            read_gguf(file)

    def test_without_the_package(self, llama_file, monkeypatch):
        import sys

        monkeypatch.setitem(sys.modules, "gguf.constants", None)
        with pytest.raises(MissingPackageError, match=r"pip install 'optkit\[gguf\]'"):
            read_gguf(llama_file)


class TestLayout:
    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("rwkv6", "Neither optkit nor transformers reads it"),
            ("gpt-oss", "transformers reads its weights, and no tokenizer of it"),
            ("bloom", "transformers reads it, and nobody has compared what it reads with llama.cpp"),
        ],
    )
    def test_an_architecture_that_is_not_imported(self, models, tmp_path, name, why):
        file = save_gguf(models["llama"], tmp_path / "model.gguf", "llama", general__architecture=name)
        what = f"unsupported GGUF architecture '{name}'. {why}. optkit imports falcon, gemma2, gemma3, llama, nemotron"
        with pytest.raises(SourceError, match=f"{what}.* Take the safetensors form"):
            checkpoint_shape(read_gguf(file))

    @pytest.mark.parametrize(
        ("changes", "lost"),
        [
            ({"llama__rope__scaling__type": "yarn"}, "rope scaling 'yarn'"),
            ({"llama__attention__sliding_window": 4096}, "sliding-window attention"),
            ({"llama__rope__dimension_count": 8}, "rope.dimension_count = 8"),
            ({"llama__attention__value_length": 32}, "attention.value_length = 32"),
            ({"llama__attention__scale": 0.5}, "attention.scale = 0.5"),
            ({"llama__attention__causal": False}, "attention.causal = False"),
            ({"llama__logit_scale": 0.25, "llama__residual_scale": 0.5}, "logit_scale = 0.25 and residual_scale = 0.5"),
            ({"llama__final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
            ({"llama__expert_count": 8}, "expert_count = 8"),
            ({"llama__rope__scaling__alpha": 2.0}, "rope.scaling.alpha = 2.0"),
            ({"llama__rope__scaling__attn_factor": 1.5}, "rope.scaling.attn_factor = 1.5"),
            ({"llama__rope__dimension_sections": [4, 2, 2, 0]}, "rope.dimension_sections = 4 values"),
            ({"llama__something__new": "yes"}, "something.new = yes"),
        ],
    )
    def test_what_an_import_would_lose(self, models, tmp_path, changes, lost):
        file = save_gguf(models["llama"], tmp_path / "model.gguf", "llama", **changes)
        with pytest.raises(
            SourceError, match=f"the import would lose {lost}. Take the safetensors form of the model, which has it"
        ):
            layout_of(read_gguf(file))

    def test_what_says_what_a_plain_model_does_anyway(self, models, tmp_path):
        says = {
            "rope__dimension_count": 16,
            "attention__value_length": 16,
            "attention__scale": 0.25,
            "attention__causal": True,
        }
        says |= {
            "logit_scale": 0.0,
            "rope__scaling__attn_factor": 1.0,
            "rope__scaling__type": "none",
            "rope__scaling__factor": 8.0,
        }
        says |= {"expert_count": 0, "vocab_size": 512, "rope__scaling__original_context_length": 64}
        file = save_gguf(
            models["llama"], tmp_path / "model.gguf", "llama", **{f"llama__{key}": value for key, value in says.items()}
        )
        plain = save_gguf(models["llama"], tmp_path / "plain.gguf", "llama")
        assert checkpoint_shape(read_gguf(file)).config == checkpoint_shape(read_gguf(plain)).config

    @pytest.mark.parametrize("architecture", ["llama", "qwen2"])
    @pytest.mark.parametrize("key", ["rope__scale_linear", "rope__scaling__factor"])
    def test_stretched_positions_are_those_of_the_file(self, models, tmp_path, target, architecture, key):
        from transformers import AutoModelForCausalLM

        file = save_gguf(models[architecture], tmp_path / "model.gguf", architecture, **{f"{architecture}__{key}": 4.0})
        import_gguf(file, target, SilentProgress())
        assert Checkpoint(target).config["rope_parameters"] == {
            "rope_type": "linear",
            "factor": 4.0,
            "rope_theta": 10000.0,
        }
        original, imported = (AutoModelForCausalLM.from_pretrained(place) for place in (models[architecture], target))
        tokens = torch.arange(12)[None] * 7
        with torch.no_grad():
            stretched = original(tokens, position_ids=torch.arange(12)[None] / 4).logits
            torch.testing.assert_close(
                imported(tokens).logits, stretched, rtol=1e-4, atol=1e-4 * float(stretched.abs().max())
            )
            assert float((original(tokens).logits - stretched).abs().max()) > 0.01 * float(stretched.abs().max())

    @pytest.mark.parametrize("factor", [-2.0, float("inf"), float("nan")])
    def test_a_factor_that_nothing_can_be_divided_by(self, models, tmp_path, factor):
        file = save_gguf(models["llama"], tmp_path / "model.gguf", "llama", llama__rope__scaling__factor=factor)
        with pytest.raises(
            SourceError,
            match=r"model.gguf: rope scaling by (-2.0|inf|nan). Positions are divided by it. Download it again",
        ):
            checkpoint_shape(read_gguf(file))

    def test_tensors_that_have_no_place(self, models, tmp_path):
        file = save_gguf(models["qwen2"], tmp_path / "model.gguf", "qwen2")
        content = file.read_bytes()
        (tmp_path / "other.gguf").write_bytes(content.replace(b"blk.1.ffn_gate.weight", b"blk.1.ffn_gate.wcales"))
        with pytest.raises(SourceError, match=r"lose 1 tensors that a plain qwen2 has not \(blk.1.ffn_gate.wcales\)"):
            layout_of(read_gguf(tmp_path / "other.gguf"))

    def test_a_part_that_is_missing(self, models, tmp_path):
        file = save_gguf(models["llama"], tmp_path / "model.gguf", "llama", llama__block_count=4)
        with pytest.raises(SourceError, match=r"9 tensors are missing: model.layers.3.input_layernorm.weight, "):
            checkpoint_shape(read_gguf(file))

    def test_numbers_that_are_missing(self, models, tmp_path):
        file = save_gguf(models["llama"], tmp_path / "model.gguf", "llama")
        content = file.read_bytes().replace(b"llama.embedding_length", b"lxama.embedding_length")
        file.write_bytes(content)
        with pytest.raises(SourceError, match="the metadata has no number llama.embedding_length. Download it again"):
            checkpoint_shape(read_gguf(file))


@pytest.mark.parametrize("value", [1e-5, 1e-6, 10000.0, 500000.0, 0.1, 1 / 3])
def test_the_shortest_decimal_is_the_same_float32(value):
    stored = struct.unpack("<f", struct.pack("<f", value))[0]
    short = shortest_float32(stored)
    assert struct.pack("<f", short) == struct.pack("<f", stored)
    assert len(repr(short)) <= len(repr(value))
