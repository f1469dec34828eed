"""Stage `gptq` with `earlier_errors`: layers make up for what was rounded in front of them."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from safetensors.torch import load_file

from optkit.algorithms import column_kernels
from optkit.errors import StageError
from optkit.kernels.cpu.native import why_not_native
from optkit.model.blocks import BlockInputs
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stage import Context, Report
from optkit.stages.gptq import Gptq
from optkit.stages.quantizing import hessians
from optkit.stages.quantizing.earlier_errors import EarlierErrors, added_to
from optkit.stages.quantizing.overrides import Override
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.predictions import predicted
from tests.support.running import run_stage


def quantize(source: Path, target: Path, text: Calibration, **fields: Any) -> Report:
    return run_stage(Gptq(bits=3, group_size=32, calibration=text, **fields), source, target)


def test_hidden_states_come_nearer_to_the_unmodified_ones(
    tiny_model: TinyModel, text: Calibration, tmp_path: Path
) -> None:
    source, tokens = tiny_model("llama"), text.tokens(tiny_model("llama"), None)
    quantize(source, tmp_path / "plain", text, true_sequential=True)
    quantize(source, tmp_path / "moved", text, earlier_errors=0.5)
    predicted(Gptq(bits=3, group_size=32, calibration=text, earlier_errors=0.5), source, tmp_path / "moved")
    original, plain, moved = (
        open_session(place).logits(tokens) for place in (source, tmp_path / "plain", tmp_path / "moved")
    )
    assert (moved - original).square().mean() < 0.95 * (plain - original).square().mean()


def entered(source: Path, index: int = 0) -> tuple[Skeleton, BlockInputs]:
    """Return a skeleton with a loaded block, and what goes into it."""
    skeleton = Skeleton(Checkpoint(source))
    inputs = skeleton.capture_inputs(torch.arange(96).view(4, 24), "cpu")
    skeleton.load_(skeleton.blocks[index].name, "cpu")
    return skeleton, inputs


@pytest.mark.parametrize(
    ("kind", "writers"),
    [
        ("llama", {"self_attn.o_proj": "", "mlp.down_proj": "post_attention_layernorm"}),
        ("gpt2", {"attn.c_proj": "", "mlp.c_proj": "ln_2"}),
        ("gemma2", {}),  # a norm stands between the outputs and the sum
    ],
)
def test_which_outputs_are_added_to_hidden_states(tiny_model: TinyModel, kind: str, writers: dict[str, str]) -> None:
    skeleton, inputs = entered(tiny_model(kind))
    block, batch = skeleton.blocks[0], inputs.batches[0]
    found = added_to(skeleton, 0, inputs.hidden[batch.rows], batch.calls[0], skeleton.linears(block))
    names = {module: name for name, module in block.module.named_modules()}
    prefix = f"{block.name}."
    assert {name.removeprefix(prefix): names[source] if source else "" for name, source in found.items()} == writers


def test_a_weight_stays_where_both_models_are_the_same(tiny_model: TinyModel) -> None:
    skeleton, inputs = entered(tiny_model("llama"))
    modules = skeleton.linears(skeleton.blocks[0])
    before = {name: module.weight.clone() for name, module in modules.items()}
    earlier = EarlierErrors(skeleton, inputs, 1.0, 0.01, True, "auto", lambda name: False)
    with torch.no_grad():
        earlier.enter_(0, inputs, modules)
        hessians = earlier.move_(0, inputs, modules)
    q, k, o = (hessians[f"{skeleton.blocks[0].name}.self_attn.{leaf}_proj"] for leaf in "qko")
    assert q is k is not o
    assert q.tokens == 96
    assert all(torch.equal(module.weight, before[name]) for name, module in modules.items())


def test_the_first_block_of_a_process_has_the_kernels_of_all(
    tiny_model: TinyModel, text: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why_not_native()
    operators = column_kernels._compiled
    quantize(tiny_model("llama"), tmp_path / "later", text, effort="balanced")
    monkeypatch.setattr(column_kernels, "_compiled", None)
    monkeypatch.setattr(hessians, "why_not_native", lambda: column_kernels.use_compiled(operators))
    quantize(tiny_model("llama"), tmp_path / "first", text, effort="balanced")
    later, first = (load_file(tmp_path / name / "model.safetensors") for name in ("later", "first"))
    assert all(torch.equal(tensor, first[name]) for name, tensor in later.items())


def test_a_run_that_goes_on_gives_the_same_weights(
    tiny_model: TinyModel, text: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, stage = tiny_model("llama"), Gptq(bits=3, group_size=32, calibration=text, earlier_errors=0.5)
    (tmp_path / "kept").mkdir()
    run_stage(stage, source, tmp_path / "whole")
    context, leave, calls = Context(workspace=tmp_path / "kept"), EarlierErrors.leave_, []

    def halt(self: EarlierErrors, index: int, inputs: BlockInputs) -> None:
        leave(self, index, inputs)
        calls.append(index)
        if index == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(EarlierErrors, "leave_", halt)
        with pytest.raises(KeyboardInterrupt):
            run_stage(stage, source, tmp_path / "halted", context)
    assert calls == [0, 1]
    run_stage(stage, source, tmp_path / "resumed", context)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_layers_that_are_rounded_to_nearest_stay_as_they_are(
    tiny_model: TinyModel, text: Calibration, tmp_path: Path
) -> None:
    source, few = tiny_model("llama"), text.model_copy(update={"samples": 1, "sequence_length": 32})
    run_stage(Rtn(bits=3, group_size=32), source, tmp_path / "rtn")
    quantize(source, tmp_path / "few", few, earlier_errors=1, scale_search="minmax")
    quantize(source, tmp_path / "said", text, earlier_errors=1, overrides={"*.down_proj": Override(method="rtn")})
    nearest, few_tokens, said = (load_file(tmp_path / name / "model.safetensors") for name in ("rtn", "few", "said"))
    assert all(torch.equal(tensor, few_tokens[name]) for name, tensor in nearest.items())
    kept = {name: torch.equal(tensor, said[name]) for name, tensor in nearest.items() if name.endswith("weight_packed")}
    assert all(same == ("down_proj" in name) for name, same in kept.items())


def test_experts_are_quantized_as_without(tiny_model: TinyModel, text: Calibration, tmp_path: Path) -> None:
    report = quantize(tiny_model("qwen2_moe"), tmp_path / "moved", text, earlier_errors=0.5)
    assert any(".experts." in name for name in report.details["losses"])


@pytest.mark.parametrize("kind", ["llama", "qwen2_moe"])
def test_parts_that_are_not_run_again_would_return_the_same(
    tiny_model: TinyModel, text: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    attend, calls = functional.scaled_dot_product_attention, []

    def count(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        return attend(*arguments, **keywords)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", count)
    quantize(tiny_model(kind), tmp_path / "once", text, earlier_errors=0.5)
    once = len(calls)
    monkeypatch.setattr(EarlierErrors, "_skipping", lambda *_, **__: nullcontext())
    quantize(tiny_model(kind), tmp_path / "again", text, earlier_errors=0.5)
    assert once < len(calls) - once
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "again"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_several_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="earlier_errors, which effort: balanced picks, .* on one device. Leave out"):
        Gptq(effort="balanced", devices=2)


def test_layers_that_are_not_rounded_in_turn_are_refused() -> None:
    for fields in ({"effort": "balanced"}, {"earlier_errors": 0.5}):
        with pytest.raises(ValueError, match="so true_sequential: false would not be read. Leave it out"):
            Gptq(true_sequential=False, **fields)
    assert Gptq(true_sequential=False, earlier_errors=0.5, backend="gptqmodel", format="gptq").earlier_errors == 0.5


def test_encoder_decoders_are_refused(tiny_encoder_decoder: TinyModel, text: Calibration) -> None:
    stage = Gptq(calibration=text, effort="balanced")
    with pytest.raises(StageError) as refused:
        stage.predict(Checkpoint(tiny_encoder_decoder("BartForConditionalGeneration")).shape, "cpu")
    assert str(refused.value) == (
        "gptq.earlier_errors: blocks of encoder-decoders are not held to those of the unmodified model. "
        "A decoder's targets would be those of another encoder. Leave out earlier_errors, or effort."
    )


def test_it_is_not_written_if_it_is_off(text: Calibration) -> None:
    assert "earlier_errors" not in Gptq(calibration=text).model_dump()
    assert Gptq(calibration=text, earlier_errors=0.5).model_dump()["earlier_errors"] == 0.5
