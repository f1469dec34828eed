"""The operations of a training step, against torch's own counter, and what share of a rate they
are.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from optkit.devices.datasheets import DEVICES, DRIVER_NAMES, Device, datasheet_of
from optkit.model.attention import attention_of
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape
from optkit.training.flops import StepFlops, forward_flops, step_flops
from optkit.training.training_report import roof_of, speed_record

TinyModel = Callable[[str], Path]
DENSE = ("llama", "qwen2", "gemma", "gpt2", "gptj", "opt")
BATCH, LENGTH = 2, 7


def counted(
    directory: Path,
    *,
    checkpointing: bool = False,
    frozen: bool = False,
    frozen_head: bool = False,
    backward: bool = True,
) -> int:
    """Let torch count one step; its eager attention computes pairs that a causal mask throws away
    too.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").train()
    if frozen:
        model.requires_grad_(False)
        model.enable_input_require_grads()
    if frozen_head:
        model.get_output_embeddings().requires_grad_(False)
    if checkpointing:
        model.gradient_checkpointing_enable()
    tokens = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(False):
        logits = model(tokens, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


def masked(shape: ModelShape) -> int:
    """Count what torch counts beside: attention to later tokens."""
    blocks = len({shape.block(name) for name in shape.tensors} - {None})
    return sum(layer.flops(LENGTH * LENGTH - layer.pairs(LENGTH, 0)) for layer in attention_of(shape.config, blocks)[0])


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize(("checkpointing", "frozen"), [(False, False), (True, False), (False, True), (True, True)])
def test_operations_of_a_step_are_those_that_torch_counts(
    tiny_model: TinyModel, kind: str, checkpointing: bool, frozen: bool
) -> None:
    shape = Checkpoint(tiny_model(kind)).shape
    step = step_flops(shape, LENGTH, recomputed=checkpointing, frozen=frozen)
    beside = (4 if checkpointing else 3) * masked(shape)
    found = counted(tiny_model(kind), checkpointing=checkpointing, frozen=frozen)
    assert found == pytest.approx(BATCH * (step.hardware + beside), rel=0.002)


def test_a_step_is_three_forwards_and_four_with_gradient_checkpointing(tiny_model: TinyModel) -> None:
    shape = Checkpoint(tiny_model("llama")).shape
    forward = forward_flops(shape, LENGTH)
    plain, again = step_flops(shape, LENGTH), step_flops(shape, LENGTH, recomputed=True)
    assert plain.model == plain.hardware == 3 * forward.total
    assert again.model == plain.model
    assert again.hardware == 4 * forward.total - forward.head
    assert (
        again.formula == f"3.0 x forward, {again.hardware / forward.total:.1f} "
        "x with what gradient checkpointing computes again"
    )


def test_frozen_weights_need_no_gradients_of_their_own(tiny_model: TinyModel) -> None:
    shape = Checkpoint(tiny_model("qwen2")).shape
    matrices = forward_flops(shape, LENGTH).blocks + forward_flops(shape, LENGTH).head
    whole, frozen = step_flops(shape, LENGTH), step_flops(shape, LENGTH, frozen=True)
    assert whole.model - frozen.model == matrices
    adapted = step_flops(shape, LENGTH, frozen=True, adapter_elements=100)
    assert adapted.model - frozen.model == 6 * 100 * LENGTH


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_frozen_lm_head_needs_none(tiny_model: TinyModel, kind: str) -> None:
    shape = Checkpoint(tiny_model(kind)).shape
    step = step_flops(shape, LENGTH, frozen_head=True)
    found = counted(tiny_model(kind), frozen_head=True)
    assert found == pytest.approx(BATCH * (step.model + 3 * masked(shape)), rel=0.002)


def test_a_teacher_is_counted_apart(tiny_model: TinyModel) -> None:
    student, teacher = (Checkpoint(tiny_model(kind)).shape for kind in ("llama", "qwen2"))
    step = step_flops(student, LENGTH, teacher=teacher)
    assert step.teacher == forward_flops(teacher, LENGTH).total
    assert step.hardware == step.model + step.teacher
    assert step.formula.endswith("x more for the teacher")


def test_a_token_meets_the_experts_that_it_is_sent_to(tiny_model: TinyModel) -> None:
    shape = Checkpoint(tiny_model("mixtral")).shape
    experts = sum(info.elements for name, info in shape.tensors.items() if ".experts." in name)
    every = sum(info.elements for name, info in shape.tensors.items() if shape.block(name) and "norm" not in name)
    assert forward_flops(shape, 1).blocks == 2 * (every - experts / 2)


def test_speed_is_a_share_of_the_rate_of_each_device() -> None:
    peak = Device("a device", 1e12, {"fp32": 1e12, "bf16": 4e12}, 1e9, "its datasheet")
    sequence = StepFlops(1e9, 2e9, 0.9e9, 0.1e9)
    speed = speed_record(1000, 2.0, sequence, length=10, devices=2, peak=peak, arithmetic="bf16")
    assert speed.tokens_per_s == 500
    assert speed.tflops_per_s == pytest.approx(3e9 * 50 / 2 / 1e12)
    assert speed.hardware_tflops_per_s == pytest.approx(4e9 * 50 / 2 / 1e12)
    assert speed.mfu == pytest.approx(3e9 * 50 / 2 / 4e12)
    assert speed.hfu == pytest.approx(4e9 * 50 / 2 / 4e12)
    assert speed.peak == "bf16 of a device, its datasheet"
    assert speed.peak_tflops_per_s == 4
    assert speed_record(1000, 2.0, StepFlops(1e9, 2e9, 0, 0), length=10).mfu is None


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "NVIDIA H200": "h200",
        "NVIDIA H200 NVL": "h200-nvl",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA A100-SXM4-80GB": "a100-80gb",
        "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
        "NVIDIA A100-PCIE-40GB": "a100-40gb",
        "NVIDIA A10": "a10",
        "NVIDIA L4": "l4",
        "NVIDIA L40S": "l40s",
        "Tesla T4": "t4",
        "NVIDIA GeForce RTX 4090": "rtx4090",
    }.items(),
)
def test_a_device_is_found_by_the_name_that_the_driver_has_for_it(name: str, expected: str) -> None:
    assert datasheet_of(name) is DEVICES[expected]


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 D", "NVIDIA A1000", "NVIDIA L40", "AMD EPYC", "NVIDIA T400"])
def test_a_device_that_is_not_in_the_table_is_not_taken_for_another(name: str) -> None:
    assert datasheet_of(name) is None
    assert set(DRIVER_NAMES.values()) <= set(DEVICES)


def test_the_rate_of_a_cpu_is_known_where_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optkit.devices import kept_roofs, measured, roof

    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path))
    assert roof_of("cpu") is None
    rate = roof.Rate(value=5e9, low=5e9, high=5e9, repeats=1)
    monkeypatch.setattr(
        measured, "measure_roof", lambda *_: roof.Roof(reading=rate, copying=rate, products={"fp32": rate})
    )
    kept_roofs.measured_device("cpu")
    found = roof_of("cpu")
    assert found is not None
    assert found.rate("fp32") == 5e9
