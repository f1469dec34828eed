"""One plain sentence on what holds a phase back, with the setting to try."""

from __future__ import annotations

from dataclasses import dataclass

from optkit.reports.profiling.profile_report import KINDS, Phase

WAITING = 0.3
"""Share of idle time from which on it is what to cure."""
LEADING = 0.3
"""Share of a kind of operation from which on it is worth a sentence."""


@dataclass(frozen=True)
class Circumstances:
    """What is known of the model that was profiled."""

    device: str
    compiled: str | None
    """What makes one call of a step, e.g. `reduce-overhead` or `cuda_graphs`; None if torch runs it
    operation by operation.
    """
    quantized: bool
    """Packed or rounded weights."""
    dtype: str
    """What it computes in, e.g. `float32`."""
    attention: str
    """Implementation, e.g. `eager`."""
    engine: str = "torch"


def advise(phase: Phase, known: Circumstances) -> str:
    """Return the sentence."""
    if phase.idle >= WAITING:
        return _waiting(phase, known)
    rules = {
        "matmul": (phase.share("matmul"), _matmul),
        "attention": (phase.share("attention"), _attention),
        "copies": (phase.share("copies"), _copies),
        "elementwise": (phase.share("elementwise", "norm", "other"), _small),
    }
    share, sentence = max(rules.values(), key=lambda rule: rule[0])
    if share < LEADING:
        first = max(KINDS, key=phase.share)
        return (
            f"Nothing stands out: the largest part is {first}, {phase.share(first):.0%}. `optkit roofline` "
            "says what is left to gain."
        )
    return sentence(phase, known, share)


def _waiting(phase: Phase, known: Circumstances) -> str:
    each = phase.calls / phase.steps
    if known.engine == "onnxruntime":
        return (
            f"ONNX Runtime spends {phase.idle:.0%} between nodes ({each:,.0f} a step): try "
            "`onnx_optimize`, which fuses them."
        )
    if known.device == "cpu" and phase.hidden:
        what = (
            f"A step is {each:,.0f} operations that torch sees; the rest, {phase.idle:.0%}, is "
            "kernels that are called past it"
        )
        return f"{what}: the eval `roofline` says how near their limit they are."
    if known.device == "cpu":
        what = f"Python and torch's dispatcher take {phase.idle:.0%}, between {each:,.0f} operations a step"
        cure = "a larger batch" if known.compiled else "`- compile: {devices: [cpu]}`, which makes one call of them"
        return f"{what}: try {cure}."
    what = f"The GPU waits for launches {phase.idle:.0%} of the time, between {each:,.0f} kernels a step"
    if phase.name == "prefill":
        return f"{what}: try a larger batch or longer prompts; prompts are never compiled."
    if known.compiled in (None, "default"):
        return (
            f"{what}: try `- cuda_graphs` or `- compile: {{mode: reduce-overhead}}`, which make one CUDA graph of them."
        )
    return f"{what}, although the step is compiled ({known.compiled}): try a larger batch."


def _matmul(phase: Phase, known: Circumstances, share: float) -> str:
    what = f"Matrix products take {share:.0%}"
    if known.engine == "onnxruntime":
        return f"{what}: try `- onnx_quantize`, or an export in 4 bits, unless the weights are in 4 bits already."
    if known.dtype == "float32" and not known.quantized:
        half = "`- cast: {dtype: bfloat16}`"
        also = " and then 4-bit weights (`- gptq: {bits: 4}`)" if phase.name == "decode" else ""
        return f"{what}, in float32: try {half}{also}."
    if phase.name == "prefill":
        return f"{what}: prompts are bound by arithmetic, so try 8-bit inputs and weights (`- fp8` or `- smoothquant`)."
    if not known.quantized:
        return (
            f"{what}, which is reading the weights once for each step: try 4-bit weights (`- gptq: "
            f"{{bits: 4, group_size: 128}}`)."
        )
    return (
        f"{what}, with quantized weights already: a larger batch shares their reading; `optkit roofline` has the limit."
    )


def _attention(phase: Phase, known: Circumstances, share: float) -> str:
    what = f"Attention takes {share:.0%}"
    if known.attention == "eager":
        return f"{what}, as plain products: try `- attention: sdpa`."
    if phase.name == "decode":
        return f"{what}, which is reading the KV cache: try `- kv_cache: int8`, a shorter context or a smaller batch."
    return f"{what}: try `- attention: flash_attention_2` if it is installed, or shorter prompts."


def _copies(phase: Phase, known: Circumstances, share: float) -> str:
    what = f"Copies and casts take {share:.0%}"
    if phase.name == "decode" and known.engine == "torch" and not known.compiled:
        compiled = "{devices: [cpu]}" if known.device == "cpu" else "{mode: default}"
        return (
            f"{what}, most of them of a KV cache that grows: try `- compile: {compiled}`, whose "
            "cache has its full length."
        )
    return f"{what}: look at the first lines of the table for what is copied."


def _small(phase: Phase, known: Circumstances, share: float) -> str:
    what = f"Norms, activations and other small operations take {share:.0%}"
    if known.engine == "onnxruntime":
        return f"{what}: try `onnx_optimize`, which fuses them."
    if known.compiled or phase.name == "prefill":
        return f"{what}: a larger batch shares them."
    devices = "{devices: [cpu]}" if known.device == "cpu" else "{mode: default}"
    return f"{what}: try `- compile: {devices}`, which fuses them."
