import json
import random
import struct
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from optkit.errors import MissingPackageError, SourceError
from optkit.model.checkpoint import Checkpoint
from optkit.plan import make_plan
from optkit.progress import SilentProgress
from optkit.recipe.recipe import load_recipe
from optkit.source.calibration import load_tokenizer
from optkit.source.gguf_header import read_gguf
from optkit.source.gguf_import import import_gguf
from optkit.source.gguf_llama import LAYOUTS, checkpoint_shape, layout_of
from optkit.source.gguf_metadata import shortest_float32
from optkit.source.gguf_tokenizer import _found_by_hash, import_tokenizer
from optkit.store.store import Store
from tests.conftest import Warnings
from tests.support.gguf_files import save_gguf

gguf = pytest.importorskip("gguf", reason="needs gguf, of the extra `gguf`")


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """Return architecture -> directory of a tiny model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.conftest import SIZES, save_tokenizer

    qwen3 = tmp_path_factory.mktemp("qwen3")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3", **SIZES, head_dim=32, tie_word_embeddings=False)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(qwen3)
    save_tokenizer(qwen3)
    return {"llama": tiny_model("llama"), "qwen2": tiny_model("qwen2"), "qwen3": qwen3}


@pytest.fixture(scope="module")
def llama_file(models, tmp_path_factory):
    return save_gguf(models["llama"], tmp_path_factory.mktemp("gguf") / "llama.gguf", "llama")


class TestImport:
    @pytest.mark.parametrize("architecture", sorted(LAYOUTS))
    def test_float_weights_come_back_as_they_were(self, models, tmp_path, architecture):
        file = save_gguf(models[architecture], tmp_path / "model.gguf", architecture)
        target = tmp_path / "imported"
        target.mkdir()
        details = import_gguf(file, target, SilentProgress())
        original, imported = Checkpoint(models[architecture]), Checkpoint(target)
        assert set(imported.tensors) == set(original.tensors)
        assert all(torch.equal(imported.read(name), original.read(name)) for name in original.tensors)
        assert details == {"format": "gguf", "architecture": architecture, "types": {"F32": len(original.tensors)}}
        shape = checkpoint_shape(read_gguf(file))
        assert dict(shape.tensors) == dict(imported.tensors)
        assert {name: imported.config.get(name) for name in shape.config} == dict(shape.config)

    @pytest.mark.parametrize("architecture", sorted(LAYOUTS))
    def test_the_imported_model_computes_the_same(self, models, tmp_path, architecture):
        from transformers import AutoModelForCausalLM

        target = tmp_path / "imported"
        target.mkdir()
        import_gguf(save_gguf(models[architecture], tmp_path / "model.gguf", architecture), target, SilentProgress())
        tokens = torch.arange(24).reshape(2, 12) * 7
        with torch.no_grad():
            expected, found = (
                AutoModelForCausalLM.from_pretrained(place)(tokens).logits for place in (models[architecture], target)
            )
        assert torch.equal(found, expected)

    @pytest.mark.parametrize(
        ("architecture", "quantization"), [("llama", "Q8_0"), ("llama", "Q4_1"), ("qwen2", "Q4_0"), ("llama", "BF16")]
    )
    def test_quantized_weights_are_those_that_transformers_unpacks(self, models, tmp_path, architecture, quantization):
        from transformers import AutoModelForCausalLM, GgufConfig

        file = save_gguf(models[architecture], tmp_path / "model.gguf", architecture, quantization)
        target = tmp_path / "imported"
        target.mkdir()
        import_gguf(file, target, SilentProgress())
        reference = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        ).state_dict()
        imported = Checkpoint(target)
        assert {info.dtype for info in imported.tensors.values()} == {"F32"}
        assert all(torch.equal(imported.read(name), reference[name]) for name in imported.tensors)

    def test_configs_and_tokenizer_are_clean(self, models, llama_file, tmp_path, capfd):
        from transformers import AutoTokenizer

        import_gguf(llama_file, tmp_path, SilentProgress())
        assert capfd.readouterr() == ("", "")
        config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert not {"quantization_config", "_model_name_or_path", "_name_or_path", "transformers_version"} & set(config)
        assert json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8")) == {
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, None)
        assert tokenizer.chat_template == "{{ messages }}"
        original = AutoTokenizer.from_pretrained(models["llama"])
        text = Path(__file__).read_text(encoding="utf-8")
        assert tokenizer(text).input_ids == original(text).input_ids
        assert tokenizer.decode(original("a , b . c 'd").input_ids) == "a , b . c 'd"
        described = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert described["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert not {"is_local", "local_files_only"} & set(described)

    def test_two_imports_give_the_same_bytes(self, llama_file, tmp_path):
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            import_gguf(llama_file, tmp_path / name, SilentProgress())
        first, second = (
            {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two")
        )
        assert first == second


class TestTokenizer:
    @pytest.mark.parametrize(
        ("kind", "pieces"),
        [
            ("default", ["it", "'s", "Ġ12345", "Ċ", "Ċ", "IT", "'", "S"]),
            ("smollm", ["it", "'s", "Ġ12345", "Ċ", "Ċ", "IT", "'", "S"]),
            ("llama-bpe", ["it", "'s", "Ġ", "123", "45", "ĊĊ", "IT", "'S"]),
        ],
    )
    def test_text_is_cut_as_the_file_says(self, models, tmp_path, kind, pieces):
        file = save_gguf(models["llama"], tmp_path / "model.gguf", "llama", tokenizer__ggml__pre=kind)
        header = read_gguf(file)
        import_tokenizer(header, checkpoint_shape(header).config, tmp_path, SilentProgress())
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("it's 12345\n\nIT'S")] == pieces
        text = Path(__file__).read_text(encoding="utf-8")
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

    @pytest.mark.parametrize(
        ("says", "first"),
        [
            ({}, []),
            ({"tokenizer__ggml__add_bos_token": True}, [0]),
            ({"tokenizer__ggml__add_bos_token": False}, []),
            ({"tokenizer__ggml__pre": "llama-bpe"}, [0]),
            ({"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__add_bos_token": False}, []),
        ],
    )
    def test_the_first_token_stands_where_the_file_says(self, models, tmp_path, says, first):
        header = read_gguf(save_gguf(models["llama"], tmp_path / "model.gguf", "llama", **says))
        import_tokenizer(header, checkpoint_shape(header).config, tmp_path, SilentProgress())
        tokenizer, original = load_tokenizer(tmp_path), load_tokenizer(models["llama"])
        assert tokenizer("a text").input_ids == [*first, *original("a text").input_ids]

    @pytest.mark.parametrize("first", [True, False])
    def test_the_last_token_stands_where_the_file_says(self, models, tmp_path, first):
        says = {"tokenizer__ggml__add_bos_token": first, "tokenizer__ggml__add_eos_token": True}
        header = read_gguf(save_gguf(models["llama"], tmp_path / "model.gguf", "llama", **says))
        import_tokenizer(header, checkpoint_shape(header).config, tmp_path, SilentProgress())
        tokenizer, plain = load_tokenizer(tmp_path), load_tokenizer(models["llama"])("a text").input_ids
        assert tokenizer("a text").input_ids == [*([0] if first else []), *plain, 1]
        assert tokenizer("a text", "a text").input_ids == 2 * [*([0] if first else []), *plain, 1]

    @pytest.mark.parametrize(("kind", "lines"), [("qwen2", 0), ("deepseek-r1-qwen", 0), ("viking", 1)])
    def test_a_way_of_cutting_of_qwen2_that_is_not_its_own_is_said(self, models, tmp_path, kind, lines):
        header = read_gguf(save_gguf(models["qwen2"], tmp_path / "model.gguf", "qwen2", tokenizer__ggml__pre=kind))
        told = Warnings()
        import_tokenizer(header, checkpoint_shape(header).config, tmp_path, told)
        assert [
            line
            for line in told.lines
            if "the file cuts text by 'viking', which optkit does not know; it is cut as Qwen2 does" in line
        ] == (told.lines)
        assert len(told.lines) == lines

    def test_a_way_of_cutting_that_is_not_known_is_said(self, models, tmp_path):
        header = read_gguf(save_gguf(models["llama"], tmp_path / "model.gguf", "llama", tokenizer__ggml__pre="viking"))
        told = Warnings()
        import_tokenizer(header, checkpoint_shape(header).config, tmp_path, told)
        assert len(told.lines) == 1
        assert "the file cuts text by 'viking', which optkit does not know; it is cut as GPT-2 did" in told.lines[0]

    def test_a_tokenizer_that_cannot_be_read(self, models, tmp_path):
        file = save_gguf(models["llama"], tmp_path / "model.gguf", "llama")
        file.write_bytes(file.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenx"))
        header = read_gguf(file)
        with pytest.raises(SourceError, match="model.gguf: the tokenizer in the file cannot be read"):
            import_tokenizer(header, checkpoint_shape(header).config, tmp_path, SilentProgress())


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
            SourceError,
            match=rf"not a GGUF file \({len(content)} bytes\). "
            r"It does not begin with 'GGUF'. Download",
        ):
            read_gguf(tmp_path / "model.gguf")

    @pytest.mark.parametrize("share", [0.00002, 0.001, 0.02, 0.5, 0.99999])
    def test_cut_off_anywhere(self, llama_file, tmp_path, share):
        whole = llama_file.read_bytes()
        (tmp_path / "model.gguf").write_bytes(whole[: max(4, int(len(whole) * share))])
        with pytest.raises(
            SourceError,
            match=r"the GGUF file has [\d,]+ bytes.* It was cut "
            r"off or overwritten. Copy or download it again",
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
    def test_an_unknown_architecture(self, models, tmp_path):
        file = save_gguf(models["llama"], tmp_path / "model.gguf", "llama", general__architecture="mamba")
        with pytest.raises(
            SourceError, match="unsupported GGUF architecture 'mamba'. optkit imports llama, qwen2, qwen3. Take"
        ):
            layout_of(read_gguf(file))

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
    def test_stretched_positions_are_those_of_the_file(self, models, tmp_path, architecture, key):
        from transformers import AutoModelForCausalLM

        target = tmp_path / "imported"
        target.mkdir()
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
            match=r"model.gguf: rope scaling by (-2.0|inf|nan). "
            r"Positions are divided by it. Download it again",
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


def test_a_plan_counts_the_unpacking_of_the_largest_tensor(llama_file, tmp_path):
    recipe = load_recipe({"name": "r", "model": str(llama_file), "stages": [{"cast": {"dtype": "bfloat16"}}]})
    step = make_plan(recipe.pinned(None), Store(tmp_path), "cpu").steps[0]
    largest = max(info.size_bytes for info in checkpoint_shape(read_gguf(llama_file)).tensors.values())
    assert step.cost.ram_bytes == step.size_bytes + 3 * largest


@pytest.mark.parametrize("value", [1e-5, 1e-6, 10000.0, 500000.0, 0.1, 1 / 3])
def test_the_shortest_decimal_is_the_same_float32(value):
    stored = struct.unpack("<f", struct.pack("<f", value))[0]
    short = shortest_float32(stored)
    assert struct.pack("<f", short) == struct.pack("<f", stored)
    assert len(repr(short)) <= len(repr(value))


def test_merges_of_sentencepiece_are_those_of_transformers_and_their_parts_found_by_hash():
    from transformers.integrations import ggml

    letters = random.Random(0)
    tokens = [*"abcdefgh"]
    while len(tokens) < 600:
        tokens.append(letters.choice(tokens)[:5] + letters.choice(tokens)[:5])
    tokens = list(dict.fromkeys(tokens))
    described = {"tokens": tokens, "scores": [-float(place) for place in range(len(tokens))]}
    plain = ggml.GGUFTokenizerSkeleton(described)
    with _found_by_hash():
        quick = ggml.GGUFTokenizerSkeleton(described)
    assert len(plain.merges) > 100
    assert quick.merges == plain.merges
    assert quick.tokens == plain.tokens

    class Counted(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    with _found_by_hash():
        ggml.GGUFTokenizerSkeleton({**described, "tokens": [Counted(token) for token in tokens]})
    assert Counted.compared < 100 * len(tokens)  # and not once for each token and each part


def test_the_size_of_the_file_itself_is_told(models, tmp_path):
    file = save_gguf(models["llama"], tmp_path / "model.gguf", "llama", "Q4_1")
    plan = make_plan(
        load_recipe({"model": str(file), "stages": ["rtn"], "evals": ["footprint"]}).pinned(None),
        Store(tmp_path / "s"),
        "cpu",
    )
    (note,) = plan.steps[0].cost.notes
    assert note.startswith("the file model.gguf itself has ")
    assert note.endswith(" of float32 that it is unpacked to")


def test_a_gate_on_size_that_cannot_pass_is_in_the_plan(models, tmp_path):
    recipe = {"model": str(models["llama"]), "stages": [{"rtn": {"bits": 8}}], "evals": ["footprint"]}
    for limit, doomed in (("<= 0.1x", 1), ("<= 1x", 0)):
        plan = make_plan(
            load_recipe({**recipe, "gates": {"size_bytes": limit}}).pinned(None), Store(tmp_path / "s"), "cpu"
        )
        assert len(plan.doomed) == doomed
