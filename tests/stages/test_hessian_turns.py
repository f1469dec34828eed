"""Experts whose Hessians are more than there is room for: the text runs through their block again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.algorithms.hessian import Hessian
from optkit.model import calibration_memory
from optkit.model.calibration_memory import hessian_bytes, hessian_turns
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import layers_of
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.cast import Cast
from optkit.stages.fp8 import Fp8
from optkit.stages.gptq import Gptq
from optkit.stages.mx import Mx
from optkit.stages.prune import Prune
from optkit.stages.quantizing import hessians, stacks
from optkit.stages.quantizing.input_ranges import InputRange
from tests.support.changes import changing
from tests.support.running import run_stage

TEXT = Calibration(dataset="python-reference", samples=3, sequence_length=64)
STAGES = {
    "gptq": Gptq(calibration=TEXT),
    "true_sequential": Gptq(calibration=TEXT, true_sequential=True),
    "earlier_errors": Gptq(calibration=TEXT, earlier_errors=0.5),
    "fp8": Fp8(calibration=TEXT, rounding="gptq", activations="static"),
    "mx": Mx(calibration=TEXT, rounding="gptq", type="mxfp4"),
    "prune": Prune(calibration=TEXT, method="sparsegpt", sparsity=0.5),
}


@pytest.fixture(scope="module")
def sources(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models in bfloat16; in the first block of `mixtral` two of four experts see all tokens."""
    found = {}
    for kind in ("mixtral", "gpt_oss"):
        shutil.copytree(tiny_model(kind), source := tmp_path_factory.mktemp("turns") / kind)
        with changing(source) as tensors:
            for router in (name for name in tensors if name.endswith("0.block_sparse_moe.gate.weight")):
                tensors[router] = torch.zeros_like(tensors[router])
        found[kind] = source.parent / f"{kind}-bfloat16"
        run_stage(Cast(dtype="bfloat16"), source, found[kind])
    return found


@pytest.mark.parametrize(("kind", "stage"), [*(("mixtral", stage) for stage in STAGES), ("gpt_oss", "mx")])
def test_codes_are_those_of_hessians_that_are_held_at_once(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stage: str
) -> None:
    monkeypatch.setattr(stacks, "EXPERTS_AT_ONCE", {"cpu": 1, "cuda": 1})
    watch, held, found = hessians.watch_inputs, list[int](), list[bytes]()

    def watched(*given: Any) -> dict[str, Any]:
        seen = watch(*given)
        large = [name for name, each in seen.items() if ".experts." in name and isinstance(each, (Hessian, InputRange))]
        held.append(len({name.split(".experts.")[1].split(".")[0] for name in large}))
        return seen

    monkeypatch.setattr(hessians, "watch_inputs", watched)
    for most in (1 << 34, 1):
        monkeypatch.setattr(calibration_memory, "HESSIANS_AT_ONCE", most)
        held.clear()
        (target := tmp_path / str(most)).mkdir()
        STAGES[stage].run(sources[kind], target, Context())
        found.append((target / "model.safetensors").read_bytes())
        assert max(held) == (1 if most == 1 else 4)
    assert found[0] == found[1]


def test_without_hessians_the_text_runs_through_a_block_once(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_memory, "HESSIANS_AT_ONCE", 1)
    watch, blocks = hessians.watch_inputs, list[int]()

    def watched(*given: Any) -> dict[str, Any]:
        blocks.append(given[1])
        return watch(*given)

    monkeypatch.setattr(hessians, "watch_inputs", watched)
    Fp8(calibration=TEXT, activations="static").run(sources["mixtral"], tmp_path, Context())
    assert blocks == [0, 1]


def test_turns_hold_whole_experts_and_what_feeds_them_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = {"gate_proj": 8, "up_proj": 8, "down_proj": 4}
    experts = {f"b.mlp.experts.{index}.{leaf}": inputs for index in range(3) for leaf, inputs in leaves.items()}
    inputs = {"b.q_proj": 8, **experts, "b.mlp.shared_experts.up_proj": 8}
    assert hessian_turns(inputs) == [list(inputs)]
    monkeypatch.setattr(calibration_memory, "HESSIANS_AT_ONCE", 2 * 4 * (64 + 16))
    first, last = hessian_turns(inputs)
    assert first == list(experts)[:6]
    assert last == [*list(experts)[6:], "b.q_proj", "b.mlp.shared_experts.up_proj"]


def test_a_plan_counts_the_largest_turn(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Checkpoint(tiny_model("mixtral")).shape
    layers = {name: layer for name, layer in layers_of(shape).items() if not layer.router}
    width = shape.config["hidden_size"]
    expert = 4 * (width**2 + shape.config["intermediate_size"] ** 2)
    whole = hessian_bytes(shape, layers, at_once=True)
    assert whole == 4 * expert + 2 * 4 * width**2, "of q, k and v, and of o"
    assert hessian_bytes(shape, layers, at_once=False) == whole
    monkeypatch.setattr(calibration_memory, "HESSIANS_AT_ONCE", expert)
    assert hessian_bytes(shape, layers, at_once=True) == whole
    assert hessian_bytes(shape, layers, at_once=False) == expert + 2 * 4 * width**2
