"""GPTQ of blocks that run through the text once, beside what transformers gives their layers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optkit.algorithms import hessian
from optkit.algorithms.grid import Grid, QuantizedWeight, minmax_scales, round_to_nearest
from optkit.environment import cpu_has
from optkit.kernels.cpu.native import why_not_native
from optkit.kernels.cpu.prompts import PromptPass
from optkit.model.checkpoint import Checkpoint
from optkit.model.replaced_forward import hooked
from optkit.model.skeleton import Skeleton
from optkit.source.calibration import Calibration
from optkit.stage import Report
from optkit.stages.gptq import Gptq
from optkit.stages.quantizing import hessians
from optkit.stages.quantizing.calibration_products import is_prompt
from optkit.stages.quantizing.one_pass import one_pass
from tests.conftest import TinyModel
from tests.support.running import run_stage

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))


def rounded_(module: nn.Module) -> QuantizedWeight:
    """Round a layer to nearest in 4 bits, put it there and return it."""
    assert isinstance(module, nn.Linear)
    grid = Grid(4, 16, symmetric=False)
    found = round_to_nearest(module.weight, *minmax_scales(module.weight, grid), grid)
    module.weight = nn.Parameter(found.dequantize(), requires_grad=False)
    return found


@pytest.mark.parametrize("left_out", ["", "gate_proj", "self_attn"])
def test_layers_see_the_errors_of_those_before_them(tiny_model: TinyModel, left_out: str) -> None:
    skeleton = Skeleton(Checkpoint(tiny_model("llama")))
    tokens = torch.randint(0, 90, (5, 37), generator=torch.Generator().manual_seed(0))
    inputs = skeleton.capture_inputs(tokens, "cpu", 2)
    skeleton.load_(skeleton.blocks[0].name, "cpu")
    modules = skeleton.linears(skeleton.blocks[0])
    chosen = {name: each for name, each in modules.items() if not left_out or left_out not in name}
    expected, seen, turns = inputs.hidden.clone(), dict[str, list[Tensor]](), []
    assert is_prompt(skeleton, 0, inputs)

    hessians, quantized = {}, dict[str, QuantizedWeight]()
    for layers, found in one_pass(skeleton, 0, inputs, chosen, quantized, equal_tokens=False, advance=True):
        turns.append([name.rpartition(".")[2] for name in layers])
        hessians |= {name: each.matrix() for name, each in found.items()}
        quantized |= {name: rounded_(each) for name, each in layers.items()}

    def keep(name: str, _module: nn.Module, given: tuple[Any, ...]) -> None:
        seen.setdefault(name, []).append(given[0].flatten(0, 1))

    with hooked(each.register_forward_pre_hook(partial(keep, name)) for name, each in chosen.items()):
        skeleton.advance_(0, inputs, expected)
    torch.testing.assert_close(inputs.hidden, expected, rtol=1e-3, atol=1e-4)  # products of codes round rows to 16 bits
    for name, given in seen.items():
        rows = torch.cat(given).double()
        exact = rows.T @ rows / len(rows)
        sizes = exact.diagonal().sqrt()
        assert ((hessians[name] - exact).abs() <= 0.02 * sizes.outer(sizes)).all(), name
    all_turns = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    names = {name.rpartition(".")[2] for name in chosen}
    assert turns == [[leaf for leaf in turn if leaf in names] for turn in all_turns if names & {*turn}]


def quantize(source: Path, target: Path, text: Calibration, **fields: Any) -> Report:
    return run_stage(Gptq(group_size=32, calibration=text, **fields), source, target)


def test_blocks_that_nothing_reads_are_not_computed(
    tiny_model: TinyModel, text: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, own = set[int](), PromptPass.inputs_in_turn

    def run(blocks: PromptPass, index: int, given: Tensor) -> Any:
        computed.add(id(blocks.blocks[index]))
        return own(blocks, index, given)

    monkeypatch.setattr(PromptPass, "inputs_in_turn", run)
    quantize(tiny_model("llama"), tmp_path / "made", text, include=("*.layers.0.*",))
    assert len(computed) == 1


def test_the_report_says_that_layers_were_rounded_in_turn(
    tiny_model: TinyModel, text: Calibration, tmp_path: Path
) -> None:
    for kind, fields, said in (("llama", {}, 1), ("llama", {"true_sequential": False}, 0), ("gemma", {}, 0)):
        report = quantize(tiny_model(kind), tmp_path / f"{kind}{len(fields)}", text, **fields)
        assert report.details.get("true_sequential", False) is bool(said)
        assert report.details.get("hessians_of") == ("bfloat16" if cpu_has("avx512_bf16") else None)
        assert not report.notes  # a scorecard asks to act on them


def test_hessians_of_rounded_states_are_told_without_a_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessians, "why_not_native", lambda: "no compiler")
    for known in (True, False):
        monkeypatch.setattr(hessians, "cpu_has", lambda feature, known=known: known)
        told = {"hessians_of": "bfloat16"} if known else {}
        assert all(hessians.details_of_sums("cpu", torch.float32, equal) == told for equal in (True, False))


@pytest.mark.parametrize("cores", [True, False])
def test_hessians_that_tensor_cores_round_are_told(monkeypatch: pytest.MonkeyPatch, cores: bool) -> None:
    """A tensor on the meta device stands for one on a GPU with or without tensor cores."""
    monkeypatch.setattr(hessian, "has_tensor_cores", lambda tensor: cores)
    monkeypatch.setattr(hessian, "add_product_", lambda total, left, right: total.add_(left.float() @ right.float()))
    rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float32):
        for equal in (True, False):
            given = rows.to(dtype)
            summed = hessian.Hessian(32, equal_tokens=equal, rounded=True)
            with monkeypatch.context() as only:
                only.setattr(hessian.column_kernels, "multiplies_bfloat16", lambda tensor: False)
                summed.add(given)
            exact = given.double() / (given.double().square().mean(-1, keepdim=True).sqrt() if equal else 1)
            rounds = (summed.matrix() - exact.T @ exact / 64).abs().max() > 1e-4
            assert bool(rounds) is bool(hessians.details_of_sums("meta", dtype, equal)), (dtype, equal)
