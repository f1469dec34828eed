"""Stage `lora_recover`: adapters that are merged into float weights, and that lie beside packed
ones.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from optkit import pipeline
from optkit.artifact import read_artifact
from optkit.errors import MissingPackageError, RecipeError, StageError
from optkit.execute import check_packages
from optkit.model.adapter import read_adapter
from optkit.model.checkpoint import Checkpoint
from optkit.plan import make_plan
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.stage import Context, Report
from optkit.stages.cast import Cast
from optkit.stages.fp8 import Fp8
from optkit.stages.int8 import Int8
from optkit.stages.lora_recover import LoraRecover
from optkit.stages.mx import Mx
from optkit.stages.nf4 import Nf4
from optkit.stages.rtn import Rtn
from optkit.stages.smoothquant import SmoothQuant
from optkit.store.store import Store
from tests.support.skeletons import changed_copy

TinyModel = Callable[[str], Path]
LENGTH = 32


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    """Return the fields of a short training on random letters."""
    letters = torch.randint(97, 123, (8_000,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "letters.txt").write_text("".join(map(chr, letters)), encoding="utf-8")
    text = {"dataset": str(tmp_path / "letters.txt")}
    length = {"sequence_length": LENGTH, "batch_size": 4, "tokens": 12 * 4 * LENGTH}
    return {
        "texts": [text],
        **length,
        "held_out": 4,
        "evaluations": 3,
        "precision": "float32",
        "rank": 4,
        "alpha": 8,
        "learning_rate": 2e-3,
    }


def run(stage: Any, source: Path, target: Path, origin: Path | None = None) -> Report:
    target.mkdir()
    return stage.run(source, target, Context(origin=origin or source))


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
    from tests.support.unpacking import unpack_compressed_tensors

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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"include": ("*.q_prj",)},
            r"lora_recover.include: `\*.q_prj` matches "
            r"none of 21 layers. Did you mean '\*.q_proj'",
        ),
        ({"ranks": {"*.wq": 2}}, r"lora_recover.ranks: `\*.wq` matches none"),
        ({"rank": 64}, "lora_recover.rank: .*k_proj: rank 64 is larger than the layer, which is 32 x 64"),
        (
            {"ranks": {"*.q_proj": 65}},
            "lora_recover.ranks: .*q_proj: rank 65 is larger than the layer, which is 64 x 64",
        ),
        ({"sequence_length": 1024}, "sequences of 1,024 tokens, and the model was built for 512"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_at_plan_time(
    tiny_model: TinyModel, fields: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    stage = LoraRecover(**{**fields, **changes})
    with pytest.raises(StageError, match=said):
        stage.predict(Checkpoint(tiny_model("llama")).shape, "cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "dora"}, "DoRA cannot be beside packed weights. .* Set method: lora"),
        ({"keep_zeros": True}, "there are no zeros to keep in packed weights"),
    ],
)
def test_what_packed_weights_do_not_allow_is_refused(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    base = tmp_path / "base"
    run(Rtn(group_size=32), tiny_model("llama"), base)
    stage = LoraRecover(**{**fields, **changes})
    with pytest.raises(StageError, match=said):
        stage.predict(Checkpoint(base).shape, "cpu")
    with pytest.raises(StageError, match=said):
        run(stage, base, tmp_path / "done")


ROUNDED_INPUTS = SmoothQuant(calibration={"dataset": "python-reference", "samples": 8, "sequence_length": 16})
WITHOUT_GRADIENTS = [
    (Fp8(), r"its weights \(fp8\)", "float-quantized weights"),
    (Int8(), "8-bit weights of bitsandbytes", "8-bit weights of bitsandbytes"),
    (ROUNDED_INPUTS, r"its weights \(.*\)", "int-quantized weights"),
]


@pytest.mark.parametrize(("stage", "what", "planned"), WITHOUT_GRADIENTS)
def test_weights_without_gradients_are_refused(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any], stage: Any, what: str, planned: str
) -> None:
    source, base = tiny_model("llama"), tmp_path / "base"
    run(stage, source, base)
    left, origin = stage.predict(Checkpoint(source).shape, "cpu")[1], Checkpoint(source).shape
    with pytest.raises(
        StageError,
        match=r"lora_recover: there are no gradients through "
        rf"{planned}. Adapters .* Quantize with nf4, rtn,",
    ):
        LoraRecover(**fields).predict_beside(left, "cpu", origin)
    with pytest.raises(
        StageError,
        match=rf"there are no gradients through {what}.* "
        r"Quantize with nf4, rtn, gptq or awq",
    ):
        run(LoraRecover(**fields), base, tmp_path / "done", source)


def test_four_bit_floats_have_gradients(tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]) -> None:
    source, base = tmp_path / "source", tmp_path / "base"
    run(Cast(dtype="bfloat16"), tiny_model("llama"), source)
    run(Mx(type="nvfp4"), source, base)
    report = run(LoraRecover(**fields), base, tmp_path / "done", source)
    assert report.details["held_out_after"]["divergence"] < report.details["held_out_before"]["divergence"]
    assert read_adapter(tmp_path / "done").tensors.popitem()[1].dtype == "BF16"  # type: ignore[union-attr]


def test_a_base_that_is_no_approximation_has_lost_nothing_that_could_be_made_up_for(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]
) -> None:
    stage = LoraRecover(**fields, initialization="loftq")
    flipped = changed_copy(tiny_model("llama"), tmp_path, lambda held: {name: -each for name, each in held.items()})
    with pytest.raises(
        StageError, match="its weights are 2.00 of their norm away from those of the recipe's first model"
    ):
        run(stage, flipped, tmp_path / "done", tiny_model("llama"))
    with pytest.raises(
        StageError,
        match=r"the layer is \[64, 64\], and the "
        r"recipe's first model has none of that name",
    ):
        run(stage, tiny_model("llama"), tmp_path / "other", tiny_model("gpt2"))


def test_a_teacher_with_other_tokens_is_refused(tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]) -> None:
    other = changed_copy(tiny_model("llama"), tmp_path, vocab_size=300)
    with pytest.raises(StageError, match="has a vocabulary of 300 tokens and the student one of 512"):
        LoraRecover(**fields, teacher={"name": str(other)}).predict(Checkpoint(tiny_model("llama")).shape, "cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "dora", "initialization": "loftq"}, "DoRA starts from the lengths of the base's weights"),
        ({"keep_zeros": True, "initialization": "loftq"}, "loftq fills zeros again that keep_zeros keeps"),
        ({"ranks": {"*": 0}}, "(?s)ranks.*greater than or equal to 1"),
        ({"parallel": "fsdp", "devices": 2}, "adapters are too small to be divided"),
        ({"divergence": 0}, "divergence and cross_entropy are both 0"),
    ],
)
def test_fields_that_contradict_each_other(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LoraRecover(**changes)


RECOVER = "lora_recover: {texts: [python-reference]}"


def recipe(tmp_path: Path, model: Path, *stages: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"description: d\nmodel: {model}\nstages:\n" + "".join(f"  - {stage}\n" for stage in stages))
    return path


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (("nf4", "lora_recover", "lora_recover"), "leaves one with packed weights and an adapter. Keep one of them."),
        (
            ("rtn", "lora_recover", "onnx"),
            "Take one of them out, or put lora_recover before the stage that packs the weights",
        ),
        (
            ("rtn", "lora_recover", "gptq"),
            "gptq reads a checkpoint with float weights and lora_recover leaves one with packed weights and",
        ),
        (
            ("rtn", "lora_recover", "cuda_graphs"),
            "the setting cuda_graphs knows no adapter beside packed weights, and lora_recover leaves",
        ),
        (("rtn", "lora_recover", "onnx_provider: cpu"), "the setting onnx_provider is applied to an ONNX model"),
    ],
)
def test_nothing_drops_an_adapter(tmp_path: Path, tiny_model: TinyModel, stages: tuple[str, ...], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe(recipe(tmp_path, tiny_model("llama"), *stages))


def test_formats_follow_what_it_reads(tmp_path: Path, tiny_model: TinyModel) -> None:
    for stages, formats in (
        ((RECOVER, "rtn"), ["checkpoint", "checkpoint", "quantized"]),
        (("rtn: {group_size: 32}", RECOVER, "compile"), ["checkpoint", "quantized", "adapted"]),
    ):
        plan = make_plan(
            load_recipe(recipe(tmp_path, tiny_model("llama"), *stages)).pinned(None), Store(tmp_path / "store"), "cpu"
        )
        assert [step.format for step in plan.steps] == formats


def test_an_adapted_model_takes_no_second_adapter(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]
) -> None:
    base, done = tmp_path / "base", tmp_path / "done"
    run(Rtn(bits=3, group_size=32), tiny_model("llama"), base)
    run(LoraRecover(**fields), base, done, tiny_model("llama"))
    store = Store(tmp_path / "store")
    with pytest.raises(
        StageError, match="lora_recover reads .*done is one with packed weights and an adapter. Start from"
    ):
        make_plan(load_recipe(recipe(tmp_path, done, RECOVER)).pinned(None), store, "cpu")
    with pytest.raises(StageError, match="cuda_graphs knows no adapter beside packed weights, and .*done has one"):
        make_plan(load_recipe(recipe(tmp_path, done, "cuda_graphs")).pinned(None), store, "cpu")


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


def test_it_needs_peft(tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.execute.unmet", lambda needs: [need for need in needs if need.startswith("peft")])
    plan = make_plan(
        load_recipe(recipe(tmp_path, tiny_model("llama"), RECOVER)).pinned(None), Store(tmp_path / "store"), "cpu"
    )
    with pytest.raises(
        MissingPackageError,
        match="lora_recover: the package `peft>=0.18` is not installed. Run: pip install 'peft>=0.18'",
    ):
        check_packages(plan)
