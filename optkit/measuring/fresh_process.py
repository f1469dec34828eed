"""A turn of timed evals in a Python process of its own. So nothing of before is in its numbers.

What this process has left behind (memory that an allocator keeps, compiled code, settings of
libraries) would be in the timings and in the peak of memory.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from optkit.common.frozen import described
from optkit.common.out_of_resources import is_out_of_memory
from optkit.devices.cpu_watch import PASSIVE, WAIT_POLICY, crowd
from optkit.devices.memory_watch import OPEN, MemoryTrace, MemoryWatch, PhasedProgress
from optkit.devices.nvml import WAITING
from optkit.environment import describe_environment
from optkit.errors import EvalError, OptkitError, ResourceError
from optkit.measure import Eval, EvalContext, Found, Opened, Turn
from optkit.model.memory import return_freed_memory
from optkit.processes.child import Child
from optkit.processes.commands import python_environment
from optkit.processes.crashes import ChildEndedError
from optkit.progress import asking
from optkit.stage import Setting

MODULE = "optkit.measuring.fresh_process_worker"
AGAIN = "run again with --retime on a quiet machine"
PATIENCE_S = 15.0
"""How long a process that is asked to end may take to clean up."""


@dataclass(frozen=True)
class Answer:
    """What an eval measured in a turn."""

    found: Found
    notes: tuple[str, ...]
    session_notes: tuple[str, ...]
    environment: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    """Those of the notes that ask someone to act."""
    memory: tuple[MemoryTrace, ...] = ()
    """Of the process that measured, in the first turn; of several evals the first has it."""
    seconds: float = 0.0
    """Of the turn, shared among its evals."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        others = {name: value for name, value in vars(self).items() if name != "found"}
        return {**self.found.to_json(), **to_jsonable_python(others)}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Answer:
        """Return what `to_json` described."""
        return TypeAdapter(cls).validate_python({**said, "found": Found.from_json(said)})


def answers(session: Opened, evals: Sequence[Eval], context: EvalContext, device: str, index: int) -> list[Answer]:
    """Run the turn `index` of each eval on an opened model, one after another."""
    found = []
    for each in evals:
        its = replace(context, turn=Turn(index, each.turns()), notes=[], warnings=[])
        results = Found.of(each, session, its)
        warnings = (*asking(session.notes), *its.warnings)
        found.append(Answer(results, tuple(its.notes), session.notes, describe_environment(device), warnings))
    return found


def measure_apart(
    directory: Path,
    settings: Sequence[Setting],
    evals: Sequence[Eval],
    device: str,
    trust_remote_code: bool,
    context: EvalContext,
    index: int,
) -> list[Answer]:
    """Open a model directory in a fresh process and return what each eval measured.
    It runs the turn `index` of each eval, one after another.

    Raises what opening and measuring raise, ResourceError if the system ends the process,
    EvalError if it ends otherwise.
    """
    order = {
        "directory": str(directory.absolute()),
        "settings": [described(setting) for setting in settings],
        "evals": [described(each) for each in evals],
        "device": device,
        "trust_remote_code": trust_remote_code,
        "seed": context.seed,
        "data": None if context.data is None else str(context.data.absolute()),
        "calibrated_on": [dict(text) for text in context.calibrated_on],
        "turn": index,
        "threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None,
    }
    others = crowd() if device == "cpu" else 0.0
    env = _variables(**({WAIT_POLICY: PASSIVE} if others else {}))
    with (
        MemoryWatch(OPEN, own=False) if index == 0 else nullcontext() as memory,
        Child(MODULE, name="the process that measured", env=env, patience_s=PATIENCE_S) as child,
    ):
        child.send(order)
        try:
            said = child.result(PhasedProgress(context.progress, memory) if memory else context.progress)
        except ChildEndedError as error:
            raise _ended(error, ", ".join(each.kind for each in evals)) from error
    first, *further = (Answer.from_json(each) for each in said)
    if others:
        line = (
            f"{evals[0].kind}: other programs used {others:.0%} of the cores as a turn began, so threads slept"
            f" while they waited; {AGAIN}"
        )
        asked = any(AGAIN in warning for warning in first.warnings)
        first = replace(
            first, notes=(*first.notes, line), warnings=first.warnings if asked else (*first.warnings, line)
        )
    return [replace(first, memory=memory.traces) if memory else first, *further]


def _variables(**changed: str) -> dict[str, str]:
    """Return the process's environment variables.
    Before that, it gives back the memory that this process does not use.
    """
    return python_environment(**{WAITING: str(int(_leave_memory()))}, **changed)


def _leave_memory() -> bool:
    """Give back what allocators of this process keep; return whether it is on a GPU."""
    gc.collect()
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and bool(torch.cuda.is_initialized())
    return_freed_memory("cuda" if on_gpu else "cpu")
    return on_gpu


def _ended(error: ChildEndedError, evals: str) -> OptkitError:
    if is_out_of_memory(error):
        return ResourceError(
            "the process that measured was ended by the system",
            where=evals,
            why="It does so when memory runs out",
            remedy="Lower batch_sizes, prompts or new_tokens, or measure a smaller model",
        )
    what = f"the process that measured {error.how} and without a result"
    return EvalError(what, where=evals, why=error.last_words)
