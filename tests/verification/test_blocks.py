"""Blocks of an engine on optkit's own hidden states, where 4-bit inputs hide a wrong layer in the logits."""

import shutil
from pathlib import Path

import pytest
import torch

from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stages.mx import Mx
from optkit.verification.blocks import FURTHEST, problem_of, states_of
from optkit.verification.workers.open_in_transformers import differing_blocks
from tests.conftest import TinyModel
from tests.support.changes import changing
from tests.support.running import run_stage

TOKENS = torch.arange(40)[None]


@pytest.fixture(scope="module")
def packed(tiny_model: TinyModel, text: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model in NVFP4 whose layers round their inputs too."""
    place = tmp_path_factory.mktemp("packed")
    run_stage(Mx(activations="dynamic", calibration=text), tiny_model("llama bfloat16"), place / "nvfp4")
    return place / "nvfp4"


def shares(artifact: Path, states: torch.Tensor, place: Path) -> list[float]:
    from transformers import AutoModelForCausalLM

    states.numpy().tofile(place / "states")
    request = {"states": str(place / "states"), "states_shape": list(states.shape)}
    with torch.no_grad():
        return differing_blocks(AutoModelForCausalLM.from_pretrained(artifact), TOKENS, request)


def test_a_wrong_layer_is_found_in_its_block_alone(packed: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    states = states_of(open_session(packed), TOKENS)
    assert states is not None
    right = shares(packed, states, tmp_path)
    assert len(right) == len(states) - 1
    assert max(right) < 0.1
    assert problem_of(right) == ""
    wrong = Path(shutil.copytree(packed, tmp_path / "wrong"))
    with changing(wrong) as tensors:
        layer = f"model.layers.{len(right) - 1}.mlp.down_proj"
        for leaf in ("weight_packed", "weight_scale"):
            rows = tensors[f"{layer}.{leaf}"]
            tensors[f"{layer}.{leaf}"] = rows.view(torch.uint8).flip(0).view(rows.dtype)
    found = shares(wrong, states, tmp_path)
    assert max(found[:-1]) < 0.1
    assert found[-1] > FURTHEST
    assert problem_of(found) == (
        f"what block {len(right) - 1} adds to optkit's hidden states is off by {found[-1]:.2g} of itself, "
        "and rounding explains 0.3"
    )


def test_a_tower_as_deep_as_the_decoder_is_not_taken_for_it(tiny_model: TinyModel, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    states = states_of(open_session(tiny_model("llama")), TOKENS)
    assert states is not None
    states.numpy().tofile(tmp_path / "states")
    tower = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in states[1:])
    model._modules = {"vision_tower": tower, **model._modules}
    request = {"states": str(tmp_path / "states"), "states_shape": list(states.shape)}
    with torch.no_grad():
        found = differing_blocks(model, TOKENS, request)
    assert len(found) == len(tower)
    assert max(found) < 0.1


def test_blocks_that_the_engine_has_otherwise_are_not_compared(tiny_model: TinyModel, tmp_path: Path) -> None:
    states = states_of(open_session(tiny_model("llama")), TOKENS)
    assert states is not None
    assert shares(tiny_model("llama"), states[:-1], tmp_path) == []


def test_numbers_that_are_none_are_a_problem() -> None:
    assert problem_of([0.1, float("nan")]).startswith("what block 1 adds to optkit's hidden states is off by nan")
