"""Experts that a model stacks, in the MXFP4 layout in which gpt-oss is published."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from optkit.algorithms.microscaling import compensated, quantize_mxfp4
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.inventory import take_inventory
from optkit.model.size_notes import notes_on_size
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stages.cast import Cast
from optkit.stages.dequantize import Dequantize
from optkit.stages.mx import Mx
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.packed_models import rewritten
from tests.support.predictions import predicted
from tests.support.running import run_stage
from tests.zoo.models import TOKENS, plain_logits, save_model

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
PACKED = Mx(type="mxfp4")


def made(stage: Any, source: Path, target: Path) -> dict[str, Tensor]:
    run_stage(stage, source, target)
    return load_file(target / "model.safetensors")


@pytest.fixture(scope="module")
def floats(tiny_model: TinyModel) -> Path:
    return tiny_model("gpt_oss bfloat16")


def test_one_expert_is_read_at_a_time(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wholes: list[str] = []
    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name, *how: wholes.append(name) or read(self, name, *how))
    stored = made(PACKED, floats, tmp_path / "packed")
    assert sorted(wholes) == sorted(name for name in stored if not name.endswith(("_blocks", "_scales")))


def test_engines_open_what_is_written_and_compute_the_same(floats: Path, tmp_path: Path) -> None:
    stored = made(PACKED, floats, tmp_path / "packed")
    cost = predicted(PACKED, floats, tmp_path / "packed")
    assert cost.ram_bytes > 0
    before, after = Checkpoint(floats), Checkpoint(tmp_path / "packed")
    assert after.config["quantization_config"]["quant_method"] == "mxfp4"
    assert take_inventory(before.shape, after.shape, {}).lost == []
    for name in (name for name, info in before.tensors.items() if len(info.shape) == 3):
        codes, scales = stored[f"{name}_blocks"].int(), stored[f"{name}_scales"].int()
        values = torch.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).flatten(3) * 2.0 ** (scales - 127)[..., None]
        wanted = before.read(name).float()
        error = (values.flatten(2).mT - wanted).norm() / wanted.norm()
        assert 0 < error < 0.13  # of normal weights: rounding to E2M1 with the best power of two
    logits = open_session(tmp_path / "packed").logits(TOKENS)
    assert torch.equal(logits, plain_logits(tmp_path / "packed"))


def inputs_of_experts(source: Path, tokens: Tensor, block: int) -> dict[str, list[Tensor]]:
    """Return what goes into each expert of a block of transformers' model, by tensor and place."""
    from transformers import AutoModelForCausalLM
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    model, found = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, attn_implementation="eager"), {}

    def observe(module: GptOssExperts, given: tuple[Tensor, Tensor, Tensor]) -> None:
        hidden, chosen, _ = given
        for index in range(module.num_experts):
            rows = hidden[(chosen == index).any(-1)]
            found.setdefault("gate_up_proj", [[] for _ in range(4)])[index].append(rows)
            gated = module._apply_gate(rows @ module.gate_up_proj[index] + module.gate_up_proj_bias[index])
            found.setdefault("down_proj", [[] for _ in range(4)])[index].append(gated)

    model.model.layers[block].mlp.experts.register_forward_pre_hook(observe)
    with torch.no_grad():
        for part in tokens.split(8):
            model(part)
    return {leaf: [torch.cat(rows).float() for rows in experts] for leaf, experts in found.items()}


def float_expert(stored: dict[str, Tensor], name: str, index: int) -> Tensor:
    """Return float32 [out, in] of one of the experts that were written."""
    codes, scales = stored[f"{name}_blocks"][index].int(), stored[f"{name}_scales"][index].int()
    values = torch.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).flatten(2) * 2.0 ** (scales - 127)[..., None]
    return values.flatten(1)


def test_gptq_rounds_each_expert_on_the_tokens_that_it_gets(floats: Path, text: Calibration, tmp_path: Path) -> None:
    stage = Mx(type="mxfp4", rounding="gptq", calibration=text)
    stored = made(stage, floats, tmp_path / "gptq")
    cost = predicted(stage, floats, tmp_path / "gptq")
    nearest = made(PACKED, floats, tmp_path / "nearest")
    assert cost.ram_bytes > predicted(PACKED, floats, tmp_path / "nearest").ram_bytes
    assert stored.keys() == nearest.keys()
    before, tokens = Checkpoint(floats), text.tokens(floats, None)
    for leaf, experts in inputs_of_experts(floats, tokens, 0).items():
        name = f"model.layers.0.mlp.experts.{leaf}"
        for index, rows in enumerate(experts):
            weight, hessian = before.read(name)[index].T.float().contiguous(), rows.T @ rows / len(rows)
            wanted = compensated(weight, quantize_mxfp4(weight, True, hessian.diagonal()), hessian).dequantize()
            ours, plain = (float_expert(each, name, index) for each in (stored, nearest))
            error, of_nearest, least = (
                float((rows @ (each - weight).T).square().sum()) for each in (ours, plain, wanted)
            )
            assert error < 0.8 * of_nearest
            assert error == pytest.approx(least, rel=0.02)  # sums of bfloat16 inputs differ by their order
    logits = open_session(tmp_path / "gptq").logits(TOKENS)
    assert torch.equal(logits, plain_logits(tmp_path / "gptq"))


def test_a_source_in_mxfp4_comes_out_without_error(tiny_model: TinyModel, tmp_path: Path) -> None:
    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: weight.bfloat16()}
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": torch.randint(115, 125, blocks.shape[:3]).byte()}

    torch.manual_seed(0)
    source = rewritten(tiny_model("gpt_oss"), tmp_path / "mxfp4", change, quant_method="mxfp4")
    before = made(Dequantize(), source, tmp_path / "floats")
    made(PACKED, tmp_path / "floats", tmp_path / "again")
    after = made(Dequantize(), tmp_path / "again", tmp_path / "again floats")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({"exclude": ("*.0.*",)}, {}, "mx.exclude: the experts are packed, all of them, and nothing else. transf"),
        (
            {"rounding": "gptq", "calibration": Calibration(dataset="c4", experts="all")},
            {},
            "mx.calibration.experts: the model has no experts that could see all tokens. The checkpoint stores them",
        ),
        (
            {"rounding": "gptq", "calibration": Calibration(dataset="c4"), "devices": 2},
            {},
            "mx.devices: 2 devices were asked for, and stacked experts are rounded on one. Sums of their inputs are",
        ),
        ({}, {"intermediate_size": 48}, "down_proj has 48 inputs, no multiple of 32. Blocks of mxfp4 are 32 inputs"),
    ],
)
def test_what_cannot_be_packed_so_is_refused_in_the_plan(
    fields: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    made(Cast(dtype="bfloat16"), save_model("gpt_oss", tmp_path / "model", **changes), tmp_path / "floats")
    with pytest.raises(StageError) as raised:
        Mx(type="mxfp4", **fields).predict(Checkpoint(tmp_path / "floats").shape, "cpu")
    assert message in str(raised.value)


def test_other_stages_say_what_packs_them(floats: Path) -> None:
    shape = Checkpoint(floats).shape
    left = Rtn(group_size=16).predict(shape, "cpu")[1]
    assert next(iter(notes_on_size(shape, shape, left))).endswith(
        "and it takes these alone; `mx: {type: mxfp4}` packs them, in the form in which such models are published"
    )


def test_experts_that_saw_few_tokens_are_told(floats: Path, text: Calibration, tmp_path: Path) -> None:
    few = text.model_copy(update={"samples": 1})
    report = run_stage(Mx(type="mxfp4", rounding="gptq", calibration=few), floats, tmp_path / "packed")
    told = f"{len(report.details['rounded_to_nearest'])} layers are rounded to nearest: they saw fewer than the 128 "
    assert report.notes[-1].startswith(told)
