"""Recipes that start from packed weights: when their float weights are made, and what is said of it."""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import optkit
from optkit.artifact import read_artifact, recorded_recipe
from optkit.errors import RecipeError, SourceError, StageError
from optkit.plan import Plan
from optkit.stages.rtn import Rtn
from optkit.store.store import Store
from tests.conftest import TinyModel
from tests.support.changes import change_json
from tests.support.packed_models import fp8, rewritten, save_packed
from tests.support.planning import plan_of
from tests.support.running import run_stage

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


@pytest.fixture(scope="module")
def deepseek(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny model in FP8 blocks."""
    return rewritten(tiny_model("llama"), tmp_path_factory.mktemp("fp8") / "fp8", fp8, **FP8)


@pytest.fixture(scope="module")
def packed(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny model in pack-quantized."""
    root = tmp_path_factory.mktemp("packed")
    save_packed(tiny_model("llama"), root / "packed", root / "plain")
    return root / "packed"


def plan(tmp_path: Path, model: Path, *stages: Any) -> Plan:
    return plan_of(
        {"name": "r", "model": str(model), "stages": list(stages), "evals": ["footprint"]}, tmp_path / "store"
    )


def kinds(plan: Plan) -> list[str]:
    return [step.kind for step in plan.steps]


def test_a_stage_that_reads_tensors_makes_the_floats_itself(deepseek: Path, packed: Path, tmp_path: Path) -> None:
    for model in (deepseek, packed):
        found = plan(tmp_path, model, "sdpa", {"rtn": {"group_size": 32}})
        by_hand = plan(tmp_path, model, "dequantize", {"rtn": {"group_size": 32}})
        assert kinds(found) == ["model", "rtn"]
        assert found.steps[-1].key == by_hand.steps[-1].key  # the same weights
        assert found.disk_bytes == by_hand.steps[-1].cost.disk_bytes < by_hand.disk_bytes
        assert by_hand.steps[-1].cost.ram_bytes <= found.ram_bytes < 2 * by_hand.ram_bytes
    assert plan(tmp_path, deepseek, "rtn").steps[1].cost.notes[:1] == (
        "the weights, packed by fp8, are read as bfloat16, tensor by tensor; the packed model rounds "
        "what goes into its layers too, the float one does not",
    )


def test_a_stage_that_opens_a_directory_gets_a_float_checkpoint(deepseek: Path, tmp_path: Path) -> None:
    stages: Any
    for stages in (
        [{"rtn": {"backend": "llmcompressor"}}],
        [{"onnx": {}}],
        [{"distill": {"texts": ["python-reference"]}}],
    ):
        found = plan(tmp_path, deepseek, *stages)
        assert kinds(found) == ["model", "dequantize", *stages[0]]
        assert found.steps[1].cost.disk_bytes == found.steps[1].size_bytes > found.steps[0].size_bytes


STAGES = {
    "rtn": {"group_size": 32}, "fp8": {}, "rotate": {}, "cast": {"dtype": "float32"}, "gguf": {},
    "prune": {"method": "magnitude"},
    "gptq": {"group_size": 32, "calibration": {"samples": 4, "sequence_length": 32}},
}  # fmt: skip


@pytest.mark.parametrize("kind", STAGES)
def test_what_is_left_is_what_is_left_behind_dequantize(
    deepseek: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and runs away from it all. " * 100)
    fields = {**STAGES[kind]}
    fields |= {"calibration": {**fields["calibration"], "dataset": str(text)}} if "calibration" in fields else {}
    left = []
    for before in ([], ["dequantize"]):
        stages, store = [*before, {kind: fields}], tmp_path / f"store {len(before)}"
        recipe = {"name": "r", "model": str(deepseek), "stages": stages, "attribution": False}
        step = optkit.run(recipe, out=tmp_path / f"out {len(before)}", store=store, device="cpu").steps[-1]
        files = Store(store).record(step.key)["files"]
        left.append({name: facts["sha256"] for name, facts in files.items()})
    assert left[0] == left[1]
    assert not list(temporary.glob("optkit-floats-*"))


def test_an_error_names_the_packed_model(deepseek: Path, tmp_path: Path) -> None:
    source = shutil.copytree(deepseek, tmp_path / "other")
    change_json(source / "config.json", hidden_act="none such")
    recipe = {"name": "r", "model": str(source), "stages": ["rotate"], "evals": ["footprint"]}
    with pytest.raises(SourceError, match="transformers cannot build LlamaForCausalLM") as raised:
        optkit.run(recipe, out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    assert raised.value.where == str(source)


def test_a_stage_that_keeps_codes_does_not(deepseek: Path, packed: Path, tmp_path: Path) -> None:
    scales = {"kv_scales": {"calibration": {"dataset": "python-reference"}}}
    assert kinds(plan(tmp_path, packed, scales, "sdpa")) == ["model", "kv_scales"]
    assert kinds(plan(tmp_path, packed, "gguf")) == ["model", "gguf"]
    assert kinds(plan(tmp_path, packed, "sdpa")) == ["model"]
    # nothing keeps codes that optkit does not open itself
    assert kinds(plan(tmp_path, deepseek, scales)) == ["model", "dequantize", "kv_scales"]


def test_what_nothing_opens_cannot_be_the_baseline(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = rewritten(tiny_model("llama"), tmp_path / "packed", fp8, quant_method="modelopt", quant_algo="FP8")
    with pytest.raises(SourceError, match=r"does not open weights packed by modelopt\. .*Run a recipe of `dequantize`"):
        plan(tmp_path, source, "rtn")


def test_float_models_are_left_alone(tiny_model: TinyModel, tmp_path: Path) -> None:
    assert kinds(plan(tmp_path, tiny_model("llama"), "rtn")) == ["model", "rtn"]
    with pytest.raises(StageError, match="dequantize reads one with packed weights and .* is a .* Take it out."):
        plan(tmp_path, tiny_model("llama"), "dequantize")
    with pytest.raises(RecipeError, match="rtn reads a checkpoint with float weights and mx leaves one with packed"):
        plan(tmp_path, tiny_model("llama"), "mx", "rtn")


def test_a_result_that_is_no_smaller_asks_to_act(tiny_model: TinyModel, tmp_path: Path) -> None:
    def mxfp4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: weight.bfloat16()}
        experts, inputs, outputs = weight.shape
        codes = torch.full((experts, outputs, inputs // 32, 16), 0x22, dtype=torch.uint8)
        scales = torch.full(codes.shape[:3], 121, dtype=torch.uint8)
        return {f"{name}_blocks": codes, f"{name}_scales": scales}

    model = rewritten(tiny_model("gpt_oss"), tmp_path / "mxfp4", mxfp4, quant_method="mxfp4")
    recipe = {"name": "r", "model": str(model), "stages": [{"rtn": {"group_size": 16}}], "evals": ["footprint"]}
    notes = plan(tmp_path, model, *recipe["stages"]).steps[-1].cost.notes
    assert re.match(
        r"most weights stay float: 398 kB of the \d+ kB that it leaves, such as "
        r"model\.layers\.0\.mlp\.experts\.gate_up_proj \[4, 64, 256\], are those of no linear layer",
        notes[-2],
    )
    assert re.match(
        r"it is [\d.]+ kB larger than the model that the recipe starts from, which has \d+ kB in mxfp4; deploy",
        notes[-1],
    )
    scorecard = optkit.run(recipe, out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    assert {f"rtn: {note}" for note in notes[-2:]} <= set(scorecard.warnings)
    whole = plan(tmp_path, tiny_model("mixtral"), {"rtn": {"group_size": 16}}).steps[-1].cost.notes
    assert not [note for note in whole if "most weights" in note or "larger" in note]


def test_a_run_says_what_is_read_and_measures_the_source_as_it_is(deepseek: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and runs away from it all. " * 100)
    evals = [{name: {"dataset": str(text), "window": 32, "windows": 4}} for name in ("perplexity", "divergence")]
    recipe = {"name": "r", "model": str(deepseek), "stages": [{"rtn": {"bits": 8, "group_size": 32}}], "evals": evals}
    scorecard = optkit.run(recipe, out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    assert [step.kind for step in scorecard.steps] == ["rtn"]
    assert any(note.startswith("rtn: the weights, packed by fp8, are read as bfloat16") for note in scorecard.notes)
    assert any("fp8: dequantized by transformers" in note for note in scorecard.baseline_notes)
    assert not scorecard.attribution  # one stage has all the damage
    assert [entry.kind for entry in recorded_recipe(read_artifact(tmp_path / "out")).transforms] == ["rtn"]


def test_a_step_by_hand_is_measured_alone(deepseek: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and runs away from it all. " * 100)
    evals = [{name: {"dataset": str(text), "window": 32, "windows": 4}} for name in ("perplexity", "divergence")]
    recipe = {
        "name": "r",
        "model": str(deepseek),
        "stages": ["dequantize", {"rtn": {"group_size": 32}}],
        "evals": evals,
    }
    scorecard = optkit.run(recipe, out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    unmodified, floats, _ = scorecard.attribution
    # transformers has no kernel for fp8 on a CPU, so that both are the same model
    assert unmodified.stage == "unmodified"
    assert floats.metrics[0].value == unmodified.metrics[0].value
    assert floats.metrics[1].value == pytest.approx(0, abs=1e-6)


def test_scales_of_activations_and_of_a_cache_are_named_as_dropped(tiny_model: TinyModel, tmp_path: Path) -> None:
    def static(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        beside = {name.replace("weight", "activation_scale"): torch.ones(1)}
        if "1.self_attn.k_proj" in name:
            beside["model.layers.1.self_attn.k_scale"] = torch.ones(1)
        return fp8(name, weight) | beside

    model = rewritten(tiny_model("llama"), tmp_path / "static", static, **FP8)
    recipe = {"name": "r", "model": str(model), "stages": [{"mx": {"scale_search": "minmax"}}]}
    scorecard = optkit.run(recipe, out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    dropped = scorecard.steps[0].report["dropped"]
    assert len(dropped) == 22
    assert dropped["model.layers.1.self_attn.k_scale"] == "a scale of the KV cache, which is of floats now"
    assert dropped["model.layers.0.mlp.up_proj.activation_scale"].startswith("a scale of activations")


def without_config(source: Path, target: Path, *, scales: bool) -> Path:
    shutil.copytree(source, target)
    change_json(target / "config.json", lambda config: config.pop("quantization_config"), dtype="float8_e4m3fn")
    kept = {n: t for n, t in load_file(source / "model.safetensors").items() if scales or "scale" not in n}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_scales_without_words_in_the_config_are_refused(deepseek: Path, tmp_path: Path) -> None:
    model = without_config(deepseek, tmp_path / "half", scales=True)
    what = "weight_scale_inv belongs to packed weights, and config.json has no quantization_config. What .* Take"
    with pytest.raises(SourceError, match=what):
        plan(tmp_path, model, "rtn")
    with pytest.raises(SourceError, match=what):
        run_stage(Rtn(), model, tmp_path / "target")


def test_float8_weights_without_scales_are_cast(deepseek: Path, tmp_path: Path) -> None:
    model = without_config(deepseek, tmp_path / "bare", scales=False)
    with pytest.raises(SourceError, match="is in F8_E4M3 without scales, and .* put `- bf16` before the other stages"):
        plan(tmp_path, model, "rtn")
    recipe = {"name": "r", "model": str(model), "stages": ["bf16", {"rtn": {"group_size": 32}}], "evals": ["footprint"]}
    optkit.run(recipe, out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    step = plan(tmp_path, model, "bf16").steps[-1]
    assert step.directory
    name = "model.layers.0.mlp.up_proj.weight"
    stored, cast = (load_file(each / "model.safetensors")[name] for each in (model, step.directory))
    assert torch.equal(cast, stored.to(torch.bfloat16))
    assert optkit.open_artifact(model, device="cpu").logits(torch.arange(8).view(1, 8)).isfinite().all()
