"""What doctor says of a model's shapes, of kernels, and of the links between processes (GPUs if
there are several).
"""

import json
from pathlib import Path

import pytest
import torch
from optkit_cli.doctor_view import diagnosis_view
from optkit_cli.main import main
from optkit_cli.output import plain_text

from optkit.errors import ResourceError, UsageError
from optkit.model.shape import ModelShape, TensorInfo
from optkit.reports.doctor import gpu_links as links_module
from optkit.reports.doctor import usable_kernels as kernel_parts_module
from optkit.reports.doctor.doctor import diagnose
from optkit.reports.doctor.gpu_links import LinkRate, all_reduce_rates, gpu_links
from optkit.reports.doctor.shapes import shape_problems
from optkit.reports.doctor.usable_kernels import kernel_parts
from tests.conftest import TinyModel

TILE = "{} is no multiple of 64: the last tile of a product is computed in vain"
SLOW = "{} are no multiple of 8: 16-bit products use slower kernels. Cure: none"


def problems(outputs: int, inputs: int, name: str = "model.layers.0.mlp.up_proj") -> list[str]:
    shapes = {f"{name}.weight": (outputs, inputs), "lm_head.weight": (512, 512)}
    found = shape_problems(ModelShape({}, {tensor: TensorInfo("BF16", shape) for tensor, shape in shapes.items()}))
    return [each.problem for each in found]


@pytest.mark.parametrize(
    ("outputs", "inputs", "said"),
    [
        (4096, 4096, []),
        (1001, 1024, ["1,001 is no multiple of 8: 16-bit products use slower kernels. Cure: none"]),
        (1000, 1024, ["1,000 is no multiple of 16: products in fp8 and int8 widen the weights at each call instead"]),
        (1008, 1024, ["1,008 is no multiple of 64: the last tile of a product is computed in vain"]),
        (512, 576, ["groups of 128 do not fit 576 inputs: quantize with group_size: 64"]),
        (512, 96, [TILE.format(96), "groups of 128 do not fit 96 inputs: quantize with group_size: 32"]),
        (13, 26, [SLOW.format("13 and 26"), "groups of 128 do not fit 26 inputs: quantize with group_size: -1"]),
    ],
)  # fmt: skip
def test_sizes_that_cost_speed(outputs: int, inputs: int, said: list[str]) -> None:
    assert problems(outputs, inputs) == said


def test_a_vocabulary_is_padded_and_has_no_groups() -> None:
    tensors = {"transformer.h.0.mlp.c_fc.weight": (768, 3072), "transformer.wte.weight": (50257, 768)}
    (found,) = shape_problems(
        ModelShape({"model_type": "gpt2"}, {name: TensorInfo("F32", shape) for name, shape in tensors.items()})
    )
    assert (found.layers, found.outputs, found.inputs) == ("lm_head", 50257, 768)
    assert found.problem == (
        "50,257 is no multiple of 8: 16-bit products use slower kernels."
        " Cure: pad the vocabulary to 50,304 (resize_token_embeddings(pad_to_multiple_of=64))"
    )


def test_layers_of_all_blocks_stand_together(tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--model", str(tiny_model("llama"))]) == 0
    shapes = json.loads(capsys.readouterr().out)["shapes"]
    assert ("model.layers.*.self_attn.k_proj", 3, 32, 64) in [
        (each["layers"], each["count"], each["outputs"], each["inputs"]) for each in shapes
    ]


def test_the_view_shows_shapes_and_links(tiny_model: TinyModel) -> None:
    rate = LinkRate(size_bytes=1 << 30, seconds=0.005, bus_bytes_per_s=214e9)
    found = diagnose().model_copy(update={"model": "m", "links": (rate,)})
    shown = plain_text(*diagnosis_view(found))
    assert "shapes of m\n  ok  every matrix is a multiple of 64 each way, and groups of 128 fit" in shown
    assert "1.07 GB  5.000 ms, 214 GB/s on the bus" in shown


def test_kernels_that_are_missing_say_what_happens_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(part.role == "kernel" for part in diagnose().parts[-3:])
    why_not = "g++ does not compile them (bad value 'x' for '-march=')"
    monkeypatch.setattr(kernel_parts_module, "why_not_native", lambda: why_not)
    for compiler, remedy in (("g++", ""), (None, "apt install g++")):
        monkeypatch.setattr(kernel_parts_module, "find_compiler", lambda _, found=compiler: found)
        own = {part.name: part for part in kernel_parts()}["optkit's own on cpu (C++)"]
        said = f"{why_not}; FBGEMM's and torch's take their place"
        assert (own.works, own.note, own.remedy) == (False, said, remedy)


def test_kernels_of_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_parts_module, "why_not_scaled", lambda *_: "not before 8.9")
    monkeypatch.setattr(kernel_parts_module, "why_not_integers", lambda *_: None)
    monkeypatch.setattr(kernel_parts_module, "find_spec", lambda _: None)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", None, raising=False)
    parts = {part.name: part for part in kernel_parts_module._of_gpu((7, 5))}
    old = "it needs compute capability 8.0, and this GPU has 7.5; weights are dequantized at each call"
    assert parts["int4 on cuda (optkit)"].note == old
    fp8 = parts["fp8 products on cuda (torch._scaled_mm)"]
    assert fp8.note == "not before 8.9; fp8 weights are widened at each call"
    assert parts["int8 products on cuda (torch._int_mm)"].works
    assert parts["triton"].remedy == "pip install triton"
    nvrtc = "this torch has no torch.cuda._compile_kernel; torch's own kernels"
    assert parts["CUDA C++ compiled here (NVRTC)"].note == nvrtc


def test_processes_sum_what_they_send_to_each_other() -> None:
    small, large = all_reduce_rates(2, "gloo", sizes=(1 << 12, 1 << 20))
    assert (small.size_bytes, large.size_bytes) == (1 << 12, 1 << 20)
    assert large.bus_bytes_per_s == pytest.approx((1 << 20) / large.seconds)  # 2 (n - 1) / n is 1 for two
    assert small.seconds > 0


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        ("raise RuntimeError('first line\\nNCCL error: unhandled system error')", "NCCL error: unhandled system error"),
        ("os._exit(7)", "ended with status 7 and without a result"),
    ],
)
def test_links_that_fail_are_told(ending: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails.py").write_text(f"import os\n\n\ndef work(parent):\n    {ending}\n", encoding="utf-8")
    monkeypatch.setattr(links_module, "WORKER", tmp_path / "fails.py")
    told = rf"links: 2 processes cannot exchange data by nccl\. .*{why}\. Run it again with NCCL_DEBUG"
    with pytest.raises(ResourceError, match=told):
        all_reduce_rates(2, "nccl")


def test_a_link_has_two_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        UsageError, match=r"--links: there are no two GPUs between which data could go\. torch sees 1 GPU here"
    ):
        gpu_links()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(links_module, "all_reduce_rates", lambda count, backend: (count, backend))
    assert gpu_links() == (2, "nccl")


@pytest.mark.gpu
def test_gpus_of_this_host() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert all(rate.bus_bytes_per_s > 1e9 for rate in gpu_links()[1:])
