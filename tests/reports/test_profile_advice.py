"""What a profile advises, by what takes the time."""

from pathlib import Path

import pytest
from optkit_cli.output import plain_text
from optkit_cli.profile_view import profile_view

from optkit.reports.profiling import Line, Phase, ProfileReport
from optkit.reports.profiling.advice import Circumstances, advise
from optkit.reports.profiling.run import phase_of
from optkit.reports.profiling.torch_trace import Traced

GPU = Circumstances(device="cuda", compiled=None, quantized=False, dtype="bfloat16", attention="sdpa")
CPU = Circumstances(device="cpu", compiled=None, quantized=False, dtype="float32", attention="sdpa")


def phase(known: Circumstances, name: str = "decode", idle: float = 0.0, **shares: float) -> Phase:
    """A phase of one second and ten steps with these shares."""
    lines = tuple(Line(name=kind, kind=kind, seconds=share, calls=100) for kind, share in shares.items())  # type: ignore[arg-type]
    return phase_of(name, 10, 1.0, Traced(1.0, 1.0 - idle, lines), known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            phase(GPU, idle=0.6, matmul=0.4),
            "The GPU waits for launches 60% of the time, between 10 kernels a step: try `- cuda_graphs` or `- ",
        ),
        (
            phase(GPU, "prefill", idle=0.6, matmul=0.4),
            "between 10 kernels a step: try a larger batch or longer prompts; prompts are never compiled.",
        ),
        (
            phase(Circumstances("cuda", "reduce-overhead", False, "bfloat16", "sdpa"), idle=0.5, matmul=0.5),
            "although the step is compiled (reduce-",
        ),
        (
            phase(CPU, idle=0.5, matmul=0.5),
            "Python and torch's dispatcher take 50%, between 10 operations a step: try `- compile: {devices: [cpu]}`",
        ),
        (
            phase(GPU, matmul=0.9),
            "Matrix products take 100%, which is reading the weights once for each step: try 4-bit weights",
        ),
        (
            phase(Circumstances("cuda", None, True, "bfloat16", "sdpa"), matmul=0.9),
            "with quantized weights already: a larger batch shares",
        ),
        (phase(CPU, matmul=0.9), "in float32: try `- cast: {dtype: bfloat16}` and then 4-bit weights"),
        (
            phase(GPU, "prefill", matmul=0.9),
            "prompts are bound by arithmetic, so try 8-bit inputs and weights (`- fp8` or `- smoothquant`)",
        ),
        (phase(GPU, attention=0.9), "Attention takes 100%, which is reading the KV cache: try `- kv_cache: int8`"),
        (
            phase(GPU, "prefill", attention=0.9),
            "try `- attention: flash_attention_2` if it is installed, or shorter prompts",
        ),
        (
            phase(Circumstances("cuda", None, False, "bfloat16", "eager"), attention=0.9),
            "as plain products: try `- attention: sdpa`",
        ),
        (phase(GPU, copies=0.9), "most of them of a KV cache that grows: try `- compile: {mode: default}`"),
        (
            phase(GPU, "prefill", copies=0.9),
            "Copies and casts take 100%: look at the first lines of the table for what is copied.",
        ),
        (
            phase(GPU, elementwise=0.5, norm=0.4),
            "small operations take 100%: try `- compile: {mode: default}`, which fuses them.",
        ),
        (phase(GPU, "prefill", norm=0.9), "small operations take 100%: a larger batch shares them."),
        (
            phase(GPU, matmul=0.28, attention=0.24, copies=0.24, elementwise=0.24),
            "Nothing stands out: the largest part is matmul, 28%.",
        ),
        (
            phase(Circumstances("cpu", None, False, "float32", "", "onnxruntime"), idle=0.5),
            "between nodes (0 a step): try `onnx_optimize`",
        ),
        (
            phase(Circumstances("cpu", None, False, "float32", "", "onnxruntime"), matmul=1),
            "try `- onnx_quantize`, or an export in 4 bits",
        ),
        (
            phase(Circumstances("cpu", None, False, "float32", "", "onnxruntime"), norm=1),
            "small operations take 100%: try `onnx_optimize`",
        ),
    ],
)
def test_advice_names_the_setting_to_try(found: Phase, said: str) -> None:
    assert said in found.advice


def test_kernels_that_torch_does_not_see_are_not_taken_for_python() -> None:
    lines = (Line(name="aten::clone", kind="copies", seconds=0.01, calls=30),)
    hidden = phase_of("decode", 10, 1.0, Traced(1.0, 0.01, lines), CPU)
    assert hidden.advice.startswith(
        "A step is 3 operations that torch sees; the rest, 99%, is kernels that are called past it: the eval `roof"
    )
    report = ProfileReport(
        model="m",
        device="cpu",
        device_name="c",
        engine="torch",
        batch=1,
        prompt=1,
        new_tokens=11,
        phases=(hidden,),
        settings=(),
        notes=(),
        files=(),
    )
    assert "copies 1%, not seen by torch 99%" in plain_text(*profile_view(report, Path("out")))


def test_nothing_is_said_of_nothing() -> None:
    assert advise(phase(GPU), GPU).startswith("Nothing stands out")
