"""Experts that a model stacks, in the MXFP4 layout in which gpt-oss is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.inventory import take_inventory
from optkit.model.size_notes import notes_on_size
from optkit.session import open_session
from optkit.stage import Context
from optkit.stages.cast import Cast
from optkit.stages.dequantize import Dequantize
from optkit.stages.mx import Mx
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.packed_models import rewritten
from tests.support.predictions import predicted
from tests.zoo.models import TOKENS, plain_logits, save_model

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
PACKED = Mx(type="mxfp4")


def made(stage: Any, source: Path, target: Path) -> dict[str, Tensor]:
    target.mkdir()
    stage.run(source, target, Context())
    return load_file(target / "model.safetensors")


@pytest.fixture(scope="module")
def floats(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("stacked") / "floats"
    made(Cast(dtype="bfloat16"), tiny_model("gpt_oss"), target)
    return target


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
        (
            {"exclude": ("*.0.*",)},
            {},
            "mx.exclude: the experts are rounded to nearest, all of them, and nothing else is packed. transf",
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
