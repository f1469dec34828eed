"""Stage `gptq` on tiny models: what calibration buys, what is reported, and what it says when it
cannot work.
"""

import weakref
from pathlib import Path
from threading import Event, current_thread
from time import sleep
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from optkit.algorithms.packing import unpack_compressed_tensors, unpack_gptq
from optkit.errors import SourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.awq import Awq
from optkit.stages.fp8 import Fp8
from optkit.stages.gptq import Gptq
from optkit.stages.quantizing import hessians as layer_inputs
from optkit.stages.quantizing import warming
from optkit.stages.quantizing.compensation import Compensation
from optkit.stages.quantizing.hessians import collect_hessians, turns_of
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel, Warnings
from tests.support.predictions import predicted
from tests.support.running import run_stage


def weights(directory: Path, bits: int = 4) -> dict[str, torch.Tensor]:
    """Return the weights that the packed ones stand for, by layer."""
    checkpoint = Checkpoint(directory)
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name in checkpoint.tensors:
        module, _, leaf = name.rpartition(".")
        layers.setdefault(module, {})[leaf] = checkpoint.read(name)
    return {
        module: (unpack_gptq(tensors, bits) if "qweight" in tensors else unpack_compressed_tensors(tensors, bits))
        .dequantize()
        .float()
        for module, tensors in layers.items()
        if {"qweight", "weight_packed"} & set(tensors)
    }


def outputs(source: Path, tokens: torch.Tensor, changed: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Return the logits of a model whose layers have other weights; names are those of the
    checkpoint.
    """
    skeleton = Skeleton(Checkpoint(source))
    skeleton.load_("", "cpu")
    with torch.no_grad():
        for block in skeleton.blocks:
            for name, module in skeleton.linears(block).items():
                if changed and name in changed:
                    module.weight.copy_(changed[name].T if isinstance(module, Conv1D) else changed[name])
        return skeleton.model(tokens).logits


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "mixtral", "gpt2"])
@pytest.mark.parametrize("fields", [{}, {"true_sequential": True, "bits": 3, "group_size": 32}])
def test_outputs_stay_nearer_than_with_rounding(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, kind: str, fields: dict[str, Any]
) -> None:
    if kind == "gpt2":
        fields = fields | {"format": "gptq"}
    source, bits = tiny_model(kind), fields.get("bits", 4)
    report = run_stage(Gptq(calibration=text, **fields), source, tmp_path / "gptq")
    run_stage(
        Rtn(**{name: value for name, value in fields.items() if name != "true_sequential"}), source, tmp_path / "rtn"
    )
    tokens = text.tokens(source, None)[:8]
    original = outputs(source, tokens)
    ours, theirs = (
        (outputs(source, tokens, weights(tmp_path / place, bits)) - original).square().mean().item()
        for place in ("gptq", "rtn")
    )
    assert ours < (0.8 if kind != "mixtral" else 0.95) * theirs
    assert set(report.details["losses"]) == set(weights(tmp_path / "gptq", bits)) - set(
        report.details["rounded_to_nearest"]
    )
    assert all(0 <= loss < 0.2 for loss in report.details["losses"].values())
    assert report.calibrated_on == (text.identity(),)


def test_all_formats_and_options_write_what_was_predicted(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration
) -> None:
    source = tiny_model("llama")
    for number, fields in enumerate(
        (
            {"format": "gptq"},
            {"symmetric": False, "group_size": None, "bits": 2},
            {"scale_search": "minmax", "activation_order": False, "refinements": 0, "equal_tokens": False},
            {"scale_search": "mse", "batch_size": 3},
        )
    ):
        stage = Gptq(calibration=text, **fields)
        run_stage(stage, source, tmp_path / str(number))
        assert predicted(stage, source, tmp_path / str(number)).ram_bytes > 0


def test_result_does_not_depend_on_the_batch_size(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    losses = []
    for size in (1, 16):
        report = run_stage(
            Gptq(calibration=text, batch_size=size, refinements=0), tiny_model("llama"), tmp_path / str(size)
        )
        losses.append(sum(report.details["losses"].values()))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_blocks_behind_the_last_chosen_layer_are_not_run(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, advance = [], Skeleton.advance_
    monkeypatch.setattr(
        Skeleton, "advance_", lambda self, index, *given: (run.append(index), advance(self, index, *given))[1]
    )
    for include, expected in (("model.layers.1.*", [0]), ("*", [0, 1])):
        run.clear()
        run_stage(Gptq(calibration=text, include=(include,)), tiny_model("gemma3"), tmp_path / str(len(expected)))
        assert run == expected


def test_later_blocks_see_the_errors_of_earlier_ones(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    source = tiny_model("llama")
    run_stage(Gptq(calibration=text, bits=2), source, tmp_path / "whole")
    run_stage(Gptq(calibration=text, bits=2, include=("model.layers.2.*",)), source, tmp_path / "last")
    whole, last = weights(tmp_path / "whole", 2), weights(tmp_path / "last", 2)
    assert set(last) == {name for name in whole if ".2." in name}
    assert any(not torch.equal(last[name], whole[name]) for name in last)


def test_layers_with_one_input_share_a_hessian(tiny_model: TinyModel, text: Calibration) -> None:
    source = tiny_model("llama")
    skeleton = Skeleton(Checkpoint(source))
    inputs = skeleton.capture_inputs(text.tokens(source, None), "cpu", 5)
    skeleton.load_("model.layers.0", "cpu")
    seen: dict[str, list[torch.Tensor]] = {}
    linears = skeleton.linears(skeleton.blocks[0])
    collected = collect_hessians(skeleton, 0, inputs, linears, equal_tokens=False)
    hessians = {name.rpartition(".")[2]: hessian for name, hessian in collected.items()}
    assert hessians["q_proj"] is hessians["k_proj"] is hessians["v_proj"]
    assert hessians["gate_proj"] is hessians["up_proj"]
    assert len({id(hessian) for hessian in hessians.values()}) == 4
    for name, module in linears.items():
        module.register_forward_pre_hook(
            lambda _module, given, name=name: seen.setdefault(name, []).append(given[0].flatten(0, 1))
        )
    turns = [[name.rpartition(".")[2] for name in turn] for turn in turns_of(skeleton, 0, inputs, linears)]
    seen.clear()
    skeleton.advance_(0, inputs)
    for name, batches in seen.items():
        rows = torch.cat(batches)
        assert len(batches) == 4
        exact, found = rows.T @ rows / len(rows), hessians[name.rpartition(".")[2]].matrix()
        sizes = exact.diagonal().sqrt()
        assert ((found - exact).abs() <= 0.02 * sizes.outer(sizes)).all(), "rows in bfloat16 at the most"
    assert turns == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


@pytest.mark.parametrize("true_sequential", [False, True])
def test_hessians_are_gone_before_the_next_ones_are_made(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch, true_sequential: bool
) -> None:
    alive: weakref.WeakSet[layer_inputs.Hessian] = weakref.WeakSet()
    left = []

    class Seen(layer_inputs.Hessian):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            alive.add(self)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        left.append(len(alive))
        return collect_hessians(*arguments, **keywords)

    monkeypatch.setattr(layer_inputs, "Hessian", Seen)
    monkeypatch.setattr(layer_inputs, "collect_hessians", counted)
    run_stage(Gptq(calibration=text, true_sequential=true_sequential), tiny_model("gemma3"), tmp_path / "out")
    assert left == [0] * len(left)
    assert len(left) == (12 if true_sequential else 3)


def test_turns_of_experts_stand_side_by_side(tiny_model: TinyModel, text: Calibration) -> None:
    source = tiny_model("mixtral")
    skeleton = Skeleton(Checkpoint(source))
    inputs = skeleton.capture_inputs(text.tokens(source, None), "cpu", 8)
    skeleton.load_("model.layers.0", "cpu")
    turns = turns_of(skeleton, 0, inputs, skeleton.linears(skeleton.blocks[0]))
    ends = [{name.rpartition(".")[2] for name in turn} for turn in turns]
    assert ends == [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"w1", "w3"}, {"w2"}]
    assert len(turns[2]) == 8


def test_experts_that_saw_too_little_are_rounded_and_told(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration
) -> None:
    source, progress = tiny_model("mixtral"), Warnings()
    few = text.model_copy(update={"samples": 3})
    report = run_stage(Gptq(calibration=few), source, tmp_path / "gptq", Context(progress=progress))
    run_stage(Rtn(), source, tmp_path / "rtn")
    rounded, ours, theirs = report.details["rounded_to_nearest"], weights(tmp_path / "gptq"), weights(tmp_path / "rtn")
    assert rounded
    assert all(".experts." in name and tokens < 128 for name, tokens in rounded.items())
    assert len(progress.lines) == 1
    assert f"{len(rounded)} layers are rounded to nearest: they saw fewer than the 128" in progress.lines[0]
    assert report.notes[-1] == progress.lines[0]  # a scorecard says it too, also when the step is found in the store
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]) == (name in rounded)
    assert not set(rounded) & set(report.details["losses"])


def test_damping_that_was_raised_is_reported(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optkit.algorithms.hessian import Hessian

    whole = Hessian.matrix
    monkeypatch.setattr(
        Hessian, "matrix", lambda self: whole(self) - 0.03 * whole(self).diagonal().mean() * torch.eye(len(whole(self)))
    )
    progress = Warnings()
    report = run_stage(
        Gptq(calibration=text, damping=0.001, include=("*.0.*o_proj",)),
        tiny_model("llama"),
        tmp_path / "q",
        Context(progress=progress),
    )
    ((name, damping),) = report.details["raised_damping"].items()
    assert name == "model.layers.0.self_attn.o_proj"
    assert damping > 0.001
    assert progress.lines == [f"{name}: the Hessian needed a damping of {damping:g} instead of 0.001"]


def test_hessian_that_no_damping_mends_is_an_error(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optkit.algorithms.hessian import Hessian

    whole = Hessian.matrix
    monkeypatch.setattr(Hessian, "matrix", lambda self: -whole(self))
    with pytest.raises(
        StageError, match=r"layers.0.self_attn.q_proj: the Hessian is not positive definite.* Exclude the layer, or"
    ):
        run_stage(Gptq(calibration=text), tiny_model("llama"), tmp_path / "q")
    assert not list((tmp_path / "q").glob("*.safetensors"))


def test_activations_that_overflow_are_an_error(tmp_path: Path, model: Path, text: Calibration) -> None:
    tensors = {name: tensor.half() for name, tensor in load_file(model / "model.safetensors").items()}
    tensors["model.layers.0.mlp.down_proj.weight"] *= 30_000
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = (model / "config.json").read_text().replace('"float32"', '"float16"')
    (model / "config.json").write_text(config)
    message = (
        r"layers.1.*: the inputs of the layer are NaN or Inf .* Activations do not fit float16. Put "
        r"`- cast: \{dtype: bfloat16\}`"
    )
    with pytest.raises(StageError, match=message):
        run_stage(Gptq(calibration=text), model, tmp_path / "q")


def test_text_that_is_too_short_is_an_error(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    with pytest.raises(SourceError, match="Lower `samples`"):
        run_stage(Gptq(calibration=text.model_copy(update={"samples": 5000})), tiny_model("llama"), tmp_path / "q")


@pytest.mark.parametrize("stage", [Gptq, Awq, Fp8])
def test_the_text_is_read_once_beside_the_opening_of_the_model(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch, stage: type[Gptq]
) -> None:
    readers: list[str] = []

    def inputs(self: Calibration, *arguments: Any) -> torch.Tensor:
        readers.append(current_thread().name)
        return self.tokens(*arguments)

    monkeypatch.setattr(Calibration, "inputs", inputs)
    fields = {"activations": "static"} if stage is Fp8 else {}
    few = text.model_copy(update={"samples": 2})
    run_stage(stage(calibration=few, **fields), tiny_model("llama"), tmp_path / "q")
    assert readers == ["text_0"]


def test_fused_experts_are_reported(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    report = run_stage(Gptq(calibration=text, group_size=16), tiny_model("gpt_oss"), tmp_path / "q")
    fused = {name for name in report.skipped if name.endswith("experts")}
    assert len(fused) == 2
    assert "more than their matrices" in report.skipped[min(fused)]


def test_no_block_is_rounded_while_a_thread_loads_solvers(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, loaded = Event(), Event()

    def load(device: str) -> None:
        entered.wait(60)
        sleep(0.3)
        loaded.set()

    capture, rounded = Skeleton.capture_inputs, Compensation.round_

    def captured(*given: Any, **more: Any) -> Any:
        entered.set()
        return capture(*given, **more)

    def seen(*given: Any) -> Any:
        assert loaded.is_set()
        return rounded(*given)

    monkeypatch.setattr(warming, "_rehearse", load)
    monkeypatch.setattr(Skeleton, "capture_inputs", captured)
    monkeypatch.setattr(Compensation, "round_", seen)
    warming.warming.cache_clear()
    run_stage(Gptq(calibration=text), tiny_model("llama"), tmp_path / "q")


@pytest.mark.gpu
def test_gpu_gives_what_the_cpu_gives(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    losses = [
        sum(
            run_stage(Gptq(calibration=text), tiny_model("llama"), tmp_path / device, Context(device=device))
            .details["losses"]
            .values()
        )
        for device in ("cpu", "cuda")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
