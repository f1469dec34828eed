"""Joined experts of Llama 4, which lie one by one as soon as a layer is packed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from optkit.errors import StageError
from optkit.model.apart import CheckpointApart, parts_of
from optkit.model.checkpoint import Checkpoint
from optkit.model.inventory import take_inventory
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stages.auto_bits import AutoBits
from optkit.stages.fp8 import Fp8
from optkit.stages.gptq import Gptq
from optkit.stages.int8 import Int8
from optkit.stages.qat import Qat
from optkit.stages.rtn import Rtn
from tests.support.planning import plan_of
from tests.support.predictions import predicted
from tests.support.running import run_stage
from tests.support.vision_models import save_vision_model
from tests.zoo.models import TOKENS, plain_logits, save_model

TEXT = Calibration(dataset="python-reference", samples=4, sequence_length=64)
STAGES = [
    Rtn(group_size=16),
    Gptq(group_size=16, calibration=TEXT),
    Fp8(activations="none"),
    Int8(exclude=("*.experts.*",)),
]
EXPERT = "model.layers.1.feed_forward.experts.2.gate_proj"


def test_the_parts_are_those_that_the_joined_experts_compute_with(tmp_path: Path) -> None:
    source = save_model("llama4_text", tmp_path / "source")
    whole, apart = Checkpoint(source), CheckpointApart(source)
    holder = EXPERT.rpartition(".")[0]
    joined, width = whole.read(f"{holder.rpartition('.')[0]}.gate_up_proj")[2], apart.read(f"{EXPERT}.weight").shape[0]
    assert torch.equal(apart.read(f"{EXPERT}.weight"), joined[:, :width].T)
    assert torch.equal(apart.read(f"{holder}.up_proj.weight"), joined[:, width:].T)
    assert torch.equal(
        apart.read(f"{holder}.down_proj.weight"), whole.read(f"{holder.rpartition('.')[0]}.down_proj")[2].T
    )
    assert apart.shape.size_bytes == whole.shape.size_bytes
    assert not parts_of(Checkpoint(save_model("mixtral", tmp_path / "other")).shape)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.kind)
def test_transformers_opens_what_is_written_and_computes_the_same(stage: Any, tmp_path: Path) -> None:
    source, target = save_model("llama4_text", tmp_path / "source"), tmp_path / "packed"
    report = run_stage(stage, source, target)
    predicted(stage, source, target)
    before, after = Checkpoint(source), Checkpoint(target)
    assert take_inventory(before.shape, after.shape, {}).lost == []
    assert any(name.startswith(f"{EXPERT}.") for name in after.tensors)
    assert ("excluded" in report.skipped.values()) == (stage.kind == "int8")
    logits, whole = plain_logits(target), plain_logits(source)
    assert (open_session(target).logits(TOKENS) - logits).abs().max() < 1e-3  # codes are products of 16-bit integers
    assert 1e-3 < (logits - whole).abs().max() < 1.5


def test_floats_of_experts_that_lie_one_by_one_are_refused(tmp_path: Path) -> None:
    source, target = save_model("llama4_text", tmp_path / "source"), tmp_path / "packed"
    run_stage(Rtn(group_size=16), source, target)
    for stages in ("dequantize: float32", "cast: bfloat16", "prune: {sparsity: 0.5, method: magnitude}"):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"model: {target}\nstages: [{{{stages}}}]", encoding="utf-8")
        said = r"experts\.0\..*: its float weights would lie expert by expert\. .* a float llama4_text joined\. Start"
        with pytest.raises(StageError, match=said):
            plan_of(recipe, tmp_path / "store")


def test_an_expert_counts_the_tokens_that_the_router_sends_to_it(tmp_path: Path) -> None:
    source, target = save_model("llama4_text", tmp_path / "source"), tmp_path / "packed"
    (tokens,) = run_stage(Gptq(group_size=16, calibration=TEXT), source, target).details["expert_tokens"].values()
    assert sum(tokens) == 2 * 4 * 64  # two experts each


def test_the_text_of_a_vision_language_model_is_packed(tmp_path: Path) -> None:
    source, target = save_vision_model("llama4", tmp_path / "source"), tmp_path / "packed"
    stage = Rtn(group_size=16)
    report = run_stage(stage, source, target)
    predicted(stage, source, target)
    assert any(".experts.0." in name and "weight_packed" in name for name in Checkpoint(target).tensors)
    assert "outside the decoder blocks" in report.skipped.values()
    with torch.no_grad():
        logits = AutoModelForImageTextToText.from_pretrained(target)(TOKENS).logits
    assert (open_session(target).logits(TOKENS) - logits).abs().max() < 1e-3


@pytest.mark.parametrize("stage", [AutoBits(average_bits=4.5, calibration=TEXT), Qat(group_size=16)])
def test_stages_that_open_the_model_itself_refuse_it_in_the_plan(stage: Any, tmp_path: Path) -> None:
    with pytest.raises(
        StageError, match=r"puts other modules in the place of its experts .*Take rtn, gptq, awq or fp8"
    ):
        stage.predict(Checkpoint(save_model("llama4_text", tmp_path / "source")).shape, "cpu")


def test_that_all_experts_see_all_tokens_is_refused_in_the_plan(tmp_path: Path) -> None:
    stage = Gptq(group_size=16, calibration=TEXT.model_copy(update={"experts": "all"}))
    message = r"^calibration\.experts: the model has no experts that .* each its own tokens alone\. Leave it out\.$"
    with pytest.raises(StageError, match=message):
        stage.predict(Checkpoint(save_model("llama4_text", tmp_path / "source")).shape, "cpu")
