"""Throughput under vLLM: the same artifact, in vLLM's own environment and process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from optkit.devices.peak_memory import Peak
from optkit.measure import EvalContext, Session
from optkit_evals.repeats import Repeats
from optkit_evals.timing import SETTLED, Timing
from optkit_evals.vllm import ask_vllm, build_text

UNPACKED = "Unquantized"
"""How the names of vLLM's methods for float weights begin."""


@dataclass(frozen=True)
class Asked:
    """What is measured."""

    cells: list[tuple[int, int, int]]
    """Batch, prompt, new tokens."""
    warmup: int
    repeats: int
    limit_s: float
    seed: int
    settled: float = SETTLED


def time_vllm(session: Session, asked: Asked, context: EvalContext) -> list[Repeats]:
    """Return what vLLM made of each configuration of the model that a session has open.
    Its version, dtype and kernels are noted.

    Warns if the weights are packed and no kernel for packed weights computes. Raises EvalError
    as `ask_vllm` does.
    """
    fields = {**asdict(asked), "vocabulary": session.vocabulary}
    said = ask_vllm(session, "time_in_vllm.py", fields, "throughput")
    context.notes.append(_note(said))
    kernels = said.get("kernels")
    if said.get("quantization") and kernels and all(name.startswith(UNPACKED) for name in kernels):
        context.warn(
            "throughput: the weights are packed, and vLLM has not one linear layer with a kernel for packed weights"
        )
    return [_repeats(cell) for cell in said["cells"]]


def _repeats(cell: Mapping[str, Any]) -> Repeats:
    timings = tuple(Timing(first, tuple(between)) for first, *between in cell["repeats"])
    unknown = Peak(unknown="vLLM takes a share of the memory that is fixed beforehand")
    return Repeats(timings, unknown, None)


def _note(said: Mapping[str, Any]) -> str:
    kernels = (
        ", ".join(f"{count:,} by {kernel}" for kernel, count in said.get("kernels", {}).items())
        or "by kernels that it does not tell"
    )
    return (
        f"throughput: {build_text(said)}, linear layers {kernels};"
        " prefix caching off, wall clock at each step of its engine"
    )
