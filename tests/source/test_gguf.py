import json
from pathlib import Path

import pytest
import torch

from optkit.model.checkpoint import Checkpoint
from optkit.model.gguf_file import read_gguf
from optkit.progress import SilentProgress
from optkit.source.gguf_import import import_gguf
from optkit.source.gguf_llama import LAYOUTS, checkpoint_shape
from tests.support.gguf_files import save_gguf
from tests.support.opened import transformers_logits
from tests.support.planning import plan_of

gguf = pytest.importorskip("gguf", reason="needs gguf, of the extra `gguf`")


class TestImport:
    @pytest.mark.parametrize("architecture", sorted(LAYOUTS))
    def test_float_weights_come_back_as_they_were(self, models, tmp_path, target, architecture):
        file = save_gguf(models[architecture], tmp_path / "model.gguf", architecture)
        details = import_gguf(file, target, SilentProgress())
        original, imported = Checkpoint(models[architecture]), Checkpoint(target)
        assert set(imported.tensors) == set(original.tensors)
        assert all(torch.equal(imported.read(name), original.read(name)) for name in original.tensors)
        assert details == {"format": "gguf", "architecture": architecture, "types": {"F32": len(original.tensors)}}
        shape = checkpoint_shape(read_gguf(file))
        assert dict(shape.tensors) == dict(imported.tensors)
        assert {name: imported.config.get(name) for name in shape.config} == dict(shape.config)

    @pytest.mark.parametrize("architecture", sorted(LAYOUTS))
    def test_the_imported_model_computes_the_same(self, models, tmp_path, target, architecture):

        import_gguf(save_gguf(models[architecture], tmp_path / "model.gguf", architecture), target, SilentProgress())
        tokens = torch.arange(24).reshape(2, 12) * 7
        expected, found = (transformers_logits(place, tokens) for place in (models[architecture], target))
        assert torch.equal(found, expected)

    @pytest.mark.parametrize(
        ("architecture", "quantization"), [("llama", "Q8_0"), ("llama", "Q4_1"), ("qwen2", "Q4_0"), ("llama", "BF16")]
    )
    def test_quantized_weights_are_those_that_transformers_unpacks(
        self, models, tmp_path, target, architecture, quantization
    ):
        from transformers import AutoModelForCausalLM, GgufConfig

        file = save_gguf(models[architecture], tmp_path / "model.gguf", architecture, quantization)
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


def test_a_plan_counts_the_unpacking_of_the_largest_tensor(llama_file, tmp_path):
    step = plan_of(
        {"name": "r", "model": str(llama_file), "stages": [{"cast": {"dtype": "bfloat16"}}]}, tmp_path
    ).steps[0]
    largest = max(info.size_bytes for info in checkpoint_shape(read_gguf(llama_file)).tensors.values())
    assert step.cost.ram_bytes == step.size_bytes + 3 * largest


def test_the_size_of_the_file_itself_is_told(models, tmp_path):
    file = save_gguf(models["llama"], tmp_path / "model.gguf", "llama", "Q4_1")
    plan = plan_of({"model": str(file), "stages": ["rtn"], "evals": ["footprint"]}, tmp_path / "s")
    (note,) = plan.steps[0].cost.notes
    assert note.startswith("the file model.gguf itself has ")
    assert note.endswith(" of float32 that it is unpacked to")


def test_a_gate_on_size_that_cannot_pass_is_in_the_plan(models, tmp_path):
    recipe = {"model": str(models["llama"]), "stages": [{"rtn": {"bits": 8}}], "evals": ["footprint"]}
    for limit, doomed in (("<= 0.1x", 1), ("<= 1x", 0)):
        plan = plan_of({**recipe, "gates": {"size_bytes": limit}}, tmp_path / "s")
        assert len(plan.doomed) == doomed
