"""Scales that learn behind all blocks, on tiny models: gradients are those of the whole model, and
nothing but scales changes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForCausalLM

from optkit.algorithms.grid import Grid, QuantizedWeight, minmax_scales, round_to_nearest
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from optkit.model.skeleton_layers import float_weight
from optkit.source.calibration import Calibration
from optkit.stage import Report
from optkit.stages.gptq import Gptq
from optkit.stages.quantizing.learning import logit_tensors
from optkit.stages.quantizing.overrides import Override
from optkit.training import predicted_memory, scale_learning
from optkit.training.fake_quantization import Coded
from optkit.training.losses import divergence
from optkit.training.scale_learning import ScaleLearner
from tests.conftest import TinyModel
from tests.stages.test_gptq_stage import outputs, weights
from tests.support.live_memory import LiveBytes
from tests.support.running import run_stage
from tests.support.tiny_models import CONFIGS, save_tokenizer

GRID = Grid(2, 32, symmetric=False)


class Scaled(torch.nn.Module):
    """A weight as its steps times what its scales are, [out, groups]."""

    def __init__(self, weight: QuantizedWeight, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.steps = weight.codes.view(*weight.scales.shape, -1).float() - weight.zeros.float()[..., None]
        self.growth = torch.nn.Parameter(torch.zeros_like(weight.scales))
        self.scales = weight.scales

    def forward(self, stored: Tensor) -> Tensor:
        made = (self.steps * (self.scales * self.growth.exp())[..., None]).flatten(1)
        return made.T if self.transposed else made


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradients_are_those_of_the_whole_model(
    tiny_model: TinyModel, text: Calibration, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicted_memory, "LOGIT_BYTES", {"cpu": 4 * 512 * 40})  # logits of few tokens at once
    source = tiny_model(kind)
    tokens = text.tokens(source, None)[:2]
    skeleton, whole = Skeleton(Checkpoint(source)), Skeleton(Checkpoint(source))
    inputs = skeleton.capture_inputs(tokens, "cpu", 2)
    whole.load_("", "cpu")
    with torch.no_grad():
        teacher = whole.model(tokens).logits.log_softmax(-1)
    reference: dict[str, Scaled] = {}
    with ScaleLearner(skeleton, inputs) as learner:
        for block in whole.blocks:
            coded = {}
            for name, module in whole.linears(block).items():
                weight = float_weight(module)
                coded[name] = round_to_nearest(weight, *minmax_scales(weight, GRID), GRID)
                reference[name] = Scaled(coded[name], kind == "gpt2")
                parametrize.register_parametrization(module, "weight", reference[name])
            learner.put({name: Coded(weight, GRID) for name, weight in coded.items()}, lambda _: False)
        before, _ = learner.learn_(0, 0, lambda: None)
        with scale_learning.replaced_forward(learner._forwards):
            learner._descend(inputs.batches[0])
    loss = (
        kl_div(whole.model(tokens).logits.log_softmax(-1), teacher, log_target=True, reduction="sum") / tokens.numel()
    )
    loss.backward()
    assert before == pytest.approx(loss.item(), rel=1e-4)
    found = {name: layer.growth.grad for block in learner.layers for name, layer in block.items()}
    assert found.keys() == reference.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, reference[name].growth.grad, rtol=1e-3, atol=1e-7)


def quantize(source: Path, target: Path, text: Calibration, scale_steps: int, **fields: Any) -> Report:
    fields = {"bits": 2, "group_size": 32, "batch_size": 2, "learn": "blocks", "learning_steps": 2, **fields}
    return run_stage(Gptq(calibration=text, scale_steps=scale_steps, **fields), source, target)


@pytest.mark.parametrize("capped", [False, True])
def test_the_plan_counts_as_many_logits_as_a_gradient_holds(capped: bool) -> None:
    head, hidden = torch.randn(5000, 4), torch.randn(64, 4).requires_grad_()

    def logits() -> torch.Tensor:
        return (hidden @ head.T / 30).tanh() * 30 if capped else hidden @ head.T

    with LiveBytes() as live:
        with torch.no_grad():
            teacher = logits()
        torch.autograd.grad(divergence(logits(), teacher), hidden)
    config = {"model_type": "gemma2", "final_logit_softcapping": 30.0 if capped else None}
    assert round(live.peak / (4 * 5000 * 64)) == logit_tensors(config)


@pytest.mark.parametrize(("kind", "fields"), [("llama", {"symmetric": False}), ("mixtral", {"format": "gptq"})])
def test_scales_alone_change_and_the_model_comes_nearer(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, kind: str, fields: dict[str, Any]
) -> None:
    source, few = tiny_model(kind), text.model_copy(update={"samples": 4})
    report = quantize(source, tmp_path / "learned", few, 8, **fields)
    quantize(source, tmp_path / "blocks", few, 0, **fields)
    before, after = report.details["divergence"]
    assert after < before
    tokens = few.tokens(source, None)
    teacher = outputs(source, tokens).log_softmax(-1)
    ours, theirs = (
        kl_div(
            outputs(source, tokens, weights(tmp_path / place, 2)).log_softmax(-1),
            teacher,
            log_target=True,
            reduction="batchmean",
        )
        for place in ("learned", "blocks")
    )
    assert ours < theirs
    learned, blocks = (Checkpoint(tmp_path / place) for place in ("learned", "blocks"))
    assert learned.tensors == blocks.tensors
    changed = {name.rpartition(".")[2] for name in learned.tensors if not learned.read(name).equal(blocks.read(name))}
    assert changed == {"scales" if "format" in fields else "weight_scale"}


def test_steps_that_harm_are_not_taken(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_learning, "SCALE_RATE", 3.0)
    source, few = tiny_model("llama"), text.model_copy(update={"samples": 2})
    before, after = quantize(source, tmp_path / "wild", few, 3).details["divergence"]
    quantize(source, tmp_path / "blocks", few, 0)
    assert after == before
    assert (tmp_path / "wild/model.safetensors").read_bytes() == (tmp_path / "blocks/model.safetensors").read_bytes()


def test_layers_that_are_all_rounded_to_nearest_learn_nothing(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration
) -> None:
    few, nearest = text.model_copy(update={"samples": 2}), {"*": Override(method="rtn")}
    before, after = quantize(tiny_model("llama"), tmp_path / "kept", few, 3, overrides=nearest).details["divergence"]
    assert after == before > 0


def test_one_block_is_in_training_memory(tmp_path: Path, text: Calibration) -> None:
    peaks = []
    for layers in (2, 6):
        config = {**CONFIGS["llama"], "num_hidden_layers": layers}
        (source := tmp_path / f"{layers}").mkdir()
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
        weights_of_block = sum(each.numel() for each in model.model.layers[0].parameters())
        model.save_pretrained(source)
        save_tokenizer(source)
        del model
        with LiveBytes() as live:
            quantize(source, tmp_path / f"{layers} learned", text.model_copy(update={"samples": 2}), 1, copies=1)
        peaks.append(live.peak)
    assert (peaks[1] - peaks[0]) / 4 < 4 * weights_of_block  # less than another block's weights in float32
