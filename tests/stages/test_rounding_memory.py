"""What rounding holds at once, beside what plans say."""

from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from optkit.algorithms.grid import Grid
from optkit.algorithms.hessian import Hessian
from optkit.algorithms.microscaling import nvfp4_global_scale, quantize_mxfp4, quantize_nvfp4
from optkit.algorithms.scale_search import CHUNK
from optkit.model.linear_layers import EXPERTS, Layer
from optkit.model.shape import TensorInfo
from optkit.model.together import ALONE
from optkit.stages import mx, rtn
from optkit.stages.gptq import Gptq
from optkit.stages.quantizing import compensation
from optkit.stages.quantizing.compensation import Compensation
from optkit.stages.quantizing.stacks import EXPERTS_AT_ONCE, work_bytes
from optkit.stages.rtn import Rtn
from tests.support.allocated import Allocated


@pytest.mark.parametrize(
    ("name", "count", "outputs", "inputs"),
    [("mlp.down_proj", 1, 256, 1024), ("mlp.up_proj", 1, 1024, 512), (f"mlp{EXPERTS}0.up_proj", 4, 512, 512)],
)
def test_plans_know_what_rounding_holds(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int, outputs: int, inputs: int
) -> None:
    torch.manual_seed(0)
    stage: Any = Gptq(group_size=128)
    names = [f"model.layers.{index}.{name}" for index in range(count)]
    layers = {each: Layer(each, outputs, inputs, False) for each in names}
    hessians = {each: Hessian(inputs) for each in names}
    for each in hessians.values():
        each.add(torch.randn(2 * inputs, inputs))
    job = Mock(together=ALONE, formats={each: stage.layer_format(layers[each]) for each in names})
    job.selection.layers, job.context.device = layers, "cpu"
    job.details = {"losses": {}, "rounded_to_nearest": {}}
    monkeypatch.setattr(compensation, "packed_grid", lambda *_: Grid(4, 128, True))
    modules = {each: nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16) for each in names}
    with torch.no_grad(), Allocated() as allocated:
        Compensation(job, stage, lambda _: False, counts_zeros=False).round_(modules, hessians)
    assert len(job.details["losses"]) == count
    planned = work_bytes([layers[names[0]]], count, "cpu", EXPERTS_AT_ONCE["cpu"])
    planned += sum(each.matrix().nbytes for each in hessians.values())  # which means take the place of
    assert planned == pytest.approx(allocated.peak, rel=0.1)


def test_plans_know_what_rounding_to_nearest_holds() -> None:
    layer = Layer("mlp.up_proj", 256, 512, False)
    stored = torch.randn(256, 512, dtype=torch.bfloat16)
    job: Any = Mock(
        selection=Mock(layers={layer.name: layer}), context=Mock(device="cpu"), read=lambda _: stored.clone()
    )
    job.weight = lambda name: name
    job.formats = {layer.name: Rtn(group_size=128).layer_format(layer)}
    job.skeleton.checkpoint.tensors = {layer.name: TensorInfo("BF16", (256, 512))}
    with torch.no_grad(), Allocated() as allocated:
        Rtn(group_size=128).rounded_layers(job, [layer.name])
    assert rtn.WORK_BYTES * stored.numel() == pytest.approx(allocated.peak, rel=0.05)


def test_plans_know_what_rounding_to_four_bit_floats_holds() -> None:
    assert {device: CHUNK[device] for device in mx.AT_ONCE} == mx.AT_ONCE
    weight = torch.randn(256, 512, dtype=torch.bfloat16)
    for rounded in (quantize_mxfp4, partial(quantize_nvfp4, global_scale=nvfp4_global_scale([weight]))):
        with torch.no_grad(), Allocated() as allocated:
            rounded(weight, search=True)
        assert mx.WORK_BYTES * weight.numel() == pytest.approx(allocated.peak, rel=0.05)
