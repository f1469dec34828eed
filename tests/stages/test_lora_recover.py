"""Stage `lora_recover`: adapters that are merged into float weights, and that lie beside packed
ones.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from optkit import pipeline
from optkit.artifact import read_artifact
from optkit.errors import StageError
from optkit.model.adapter import read_adapter
from optkit.model.checkpoint import Checkpoint
from optkit.session import open_session
from optkit.stage import Context
from optkit.stages.lora_recover import LoraRecover
from optkit.stages.mx import Mx
from optkit.stages.nf4 import Nf4
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.changes import changed_copy
from tests.support.recovering import LENGTH, recipe, run, short_training


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    return short_training(tmp_path)


def tokens() -> Tensor:
    return torch.randint(0, 512, (4, LENGTH), generator=torch.Generator().manual_seed(3))


def half_pruned(source: Path, parent: Path) -> Path:
    """Return a copy without the smaller half of the weights of its MLPs or experts."""

    def prune(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {
            name: torch.where(tensors[name].abs() >= tensors[name].abs().median(), tensors[name], 0.0)
            for name in wide(tensors)
        }

    return changed_copy(source, parent, prune)


def wide(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name, held in tensors.items() if (".mlp." in name or ".experts." in name) and held.dim() == 2]


def opened_by_peft(directory: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    how = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", device_map={"": "cpu"}, quantization_config=how
    )
    return PeftModel.from_pretrained(model, directory / "adapter").eval()


@pytest.mark.parametrize("initialization", ["zero", "loftq"])
def test_packed_weights_stay_and_the_adapter_brings_the_model_back(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any], initialization: str
) -> None:
    source, base, done = tiny_model("llama"), tmp_path / "base", tmp_path / "done"
    run(Rtn(bits=3, group_size=32), source, base)
    stage = LoraRecover(**fields, initialization=initialization, ranks={"*.down_proj": 8})
    with pytest.raises(
        StageError,
        match="the model that the recipe starts from would be the teacher, and is quantized. .* Name one: `tea",
    ):
        stage.predict(Checkpoint(base).shape, "cpu")
    cost, predicted = stage.predict_beside(Checkpoint(base).shape, "cpu", Checkpoint(source).shape)
    assert cost.by_kind["frozen weights"] >= 4 * Checkpoint(source).shape.elements
    report = run(stage, base, done, source)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (done / file).read_bytes() == (base / file).read_bytes()
    before, after = (report.details[f"held_out_{when}"]["divergence"] for when in ("before", "after"))
    assert after < 0.9 * before
    assert report.changed == 21
    assert report.details["ranks"] == {"4": 18, "8": 3}
    assert "--max-lora-rank 8" in report.notes[0]
    assert "`quantization_config=CompressedTensorsConfig(dequantize=True)`" in report.notes[0]
    found = read_adapter(done)
    assert found is not None
    assert {layer.scale for layer in found.layers.values()} == {2.0}
    assert {f"adapter/{name}": info for name, info in found.tensors.items()} == {
        name: info for name, info in predicted.tensors.items() if name.startswith("adapter/")
    }
    config = json.loads((done / "adapter" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    assert config["init_lora_weights"] is True
    with torch.no_grad():
        theirs = opened_by_peft(done)(tokens()).logits
    assert (open_session(done).logits(tokens()) - theirs).abs().max() < 1e-4


def test_loftq_begins_with_the_best_product_for_what_was_lost(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]
) -> None:
    source, base = tiny_model("llama"), tmp_path / "base"
    run(Rtn(bits=3, group_size=32), source, base)
    report = run(LoraRecover(**fields, initialization="loftq"), base, tmp_path / "done", source)
    name = "model.layers.1.self_attn.o_proj"
    from optkit.algorithms.packing import unpack_compressed_tensors

    parts = {
        key.rpartition(".")[2]: held
        for key, held in load_file(base / "model.safetensors").items()
        if key.startswith(f"{name}.")
    }
    lost = load_file(source / "model.safetensors")[f"{name}.weight"] - unpack_compressed_tensors(parts, 3).dequantize()
    values = torch.linalg.svdvals(lost).square()
    assert report.details["initial_share_of_error"][name] == pytest.approx(
        float(values[:4].sum() / values.sum()), abs=2e-4
    )


def test_nf4_gets_an_adapter_without_bitsandbytes_in_the_training(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]
) -> None:
    source, base, done = tiny_model("llama"), tmp_path / "base", tmp_path / "done"
    run(Nf4(), source, base)
    report = run(LoraRecover(**{**fields, "learning_rate": 1e-4}, initialization="loftq"), base, done, source)
    assert report.details["held_out_after"]["divergence"] < report.details["held_out_before"]["divergence"]
    assert (done / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    assert any(note.startswith("adapter: LoRA of rank 4") for note in open_session(done).notes)


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_float_weights_get_it_merged(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any], kind: str, method: str
) -> None:
    source, done = half_pruned(tiny_model(kind), tmp_path), tmp_path / "done"
    report = run(LoraRecover(**fields, method=method), source, done, tiny_model(kind))
    before, after = load_file(source / "model.safetensors"), load_file(done / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name, held in before.items() if not torch.equal(held, after[name])}
    assert changed
    assert all(held.dim() == 2 for name, held in before.items() if name in changed)
    assert all(torch.equal(before[name] == 0, after[name] == 0) for name in wide(before))
    assert report.details["layers_that_keep_zeros"] == len(wide(before))
    assert not (done / "adapter").exists()
    held_out = report.details["held_out_after"]
    assert held_out["divergence"] < report.details["held_out_before"]["divergence"]


def test_what_is_merged_computes_what_was_trained(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]
) -> None:
    from optkit.training.adapters import adapted, merge_

    source = half_pruned(tiny_model("llama"), tmp_path)
    for method in ("lora", "dora"):
        stage = LoraRecover(**fields, method=method)
        student = stage._student(source, Context(origin=source))
        for name, parameter in student.model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        with torch.no_grad():
            trained = student.model(tokens()).logits
            merge_(student.model)
            merged = student.model(tokens()).logits
        assert not list(adapted(student.model))
        assert (trained - merged).abs().max() < 1e-4
        assert (merged - open_session(source).logits(tokens())).abs().max() > 0.1


def test_zeros_need_not_stay(tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]) -> None:
    source, done = half_pruned(tiny_model("llama"), tmp_path), tmp_path / "done"
    report = run(LoraRecover(**fields, keep_zeros=False), source, done, tiny_model("llama"))
    assert report.details["layers_that_keep_zeros"] == 0
    assert (
        float((load_file(done / "model.safetensors")["model.layers.0.mlp.up_proj.weight"] == 0).float().mean()) < 0.01
    )


def test_zeros_that_stay_are_not_what_loftq_makes_up_for(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]
) -> None:
    source, stage = half_pruned(tiny_model("llama"), tmp_path), LoraRecover(**fields, initialization="loftq")
    said = (
        r"up_proj: what \d+ layers lost are weights that are to stay 0. .* Set initialization: "
        r"zero, or keep_zeros: false"
    )
    with pytest.raises(StageError, match=said.replace("up_proj", "(up|gate)_proj")):
        run(stage, source, tmp_path / "done", tiny_model("llama"))
    with pytest.raises(
        StageError, match="lora_recover.initialization: there is no model to begin from. Set initialization: zero"
    ):
        stage._student(source, Context())


def test_where_nothing_was_lost_loftq_leaves_an_adapter_that_learns(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]
) -> None:
    source, base, done = tiny_model("llama"), tmp_path / "base", tmp_path / "done"
    run(Rtn(bits=3, group_size=32, exclude=("*.down_proj",)), source, base)
    report = run(LoraRecover(**fields, initialization="loftq"), base, done, source)
    assert report.details["initial_share_of_error"]["model.layers.0.mlp.down_proj"] == 0
    learned = {
        name: held
        for name, held in load_file(done / "adapter" / "adapter_model.safetensors").items()
        if "down_proj" in name
    }
    assert len(learned) == 6
    assert all(bool(held.any()) for held in learned.values())


def test_experts_in_one_tensor_get_none(tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]) -> None:
    source, base, done = tiny_model("mixtral"), tmp_path / "base", tmp_path / "done"
    run(Rtn(bits=3, group_size=32), source, base)
    report = run(LoraRecover(**fields), base, done, source)
    assert report.changed == 8
    assert sum("an expert" in reason for reason in report.skipped.values()) == 24
    with torch.no_grad():
        assert (open_session(done).logits(tokens()) - opened_by_peft(done)(tokens()).logits).abs().max() < 1e-4


def test_dropout_is_for_learning_alone(tiny_model: TinyModel, fields: dict[str, Any]) -> None:
    student = LoraRecover(**fields, dropout=0.5)._student(tiny_model("llama"), Context())
    for name, parameter in student.model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.1)
    with torch.no_grad():
        judged = [student.model(tokens()).logits for _ in range(2)]
    learned = [student.model(tokens()).logits for _ in range(2)]
    assert torch.equal(*judged)
    assert not torch.equal(*learned)


def test_four_bit_floats_have_gradients(tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]) -> None:
    source, base = tiny_model("llama bfloat16"), tmp_path / "base"
    run(Mx(type="nvfp4"), source, base)
    report = run(LoraRecover(**fields), base, tmp_path / "done", source)
    assert report.details["held_out_after"]["divergence"] < report.details["held_out_before"]["divergence"]
    assert read_adapter(tmp_path / "done").tensors.popitem()[1].dtype == "BF16"  # type: ignore[union-attr]


@pytest.mark.usefixtures("children_here")
def test_the_artifact_has_its_adapter_everywhere(tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]) -> None:
    told = json.dumps(fields)
    path = recipe(tmp_path, tiny_model("llama"), "rtn: {bits: 3, group_size: 32}", f"lora_recover: {told}")
    path.write_text(path.read_text() + "evals: [footprint]\n")
    scorecard = pipeline.run(path, out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= set(
        read_artifact(tmp_path / "out").record.files
    )
    rows = {row.metric.name: row.metric.value for row in scorecard.rows}
    adapter = (tmp_path / "out" / "adapter" / "adapter_model.safetensors").stat().st_size
    packed = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert rows["weights_bytes"] == adapter + packed
    found = pipeline.verify(tmp_path / "out", engines=["transformers"], device="cpu")
    assert {check.name: check.detail for check in found.checks}["adapter"] == "LoRA of rank 4 at most beside 21 layers"
    assert [(each.verdict, "peft" in each.packages) for each in found.loading] == [("agrees", True)]
    (tmp_path / "out" / "adapter" / "adapter_config.json").write_text("{}")
    damaged = pipeline.verify(tmp_path / "out", engines=[], device="cpu")
    assert {check.name for check in damaged.checks if not check.ok} == {"digests", "adapter"}
