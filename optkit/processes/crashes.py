"""Exceptions that are no optkit error, told by a process to the one that started it: in a line, and
with the traceback for `--debug`.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from optkit.common.limits import NO_ROOM, errno_of, is_out_of_memory

Error = TypeVar("Error", bound=BaseException)


class ChildError(Exception):
    """What ended another process that we started; its message names the process, the exception and
    the place.
    """


def one_line(error: BaseException) -> str:
    """Return e.g. `ZeroDivisionError at rank.py:12: division by zero`."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" at {Path(last[0].filename).name}:{last[0].lineno}" if last else ""
    what = " ".join(str(error).split())
    return f"{type(error).__name__}{place}: {what}" if what else f"{type(error).__name__}{place}"


def told_crash(error: BaseException) -> dict[str, Any]:
    """Return an exception as JSON values."""
    trace = "".join(traceback.format_exception(error))
    return {"what": one_line(error), "trace": trace, "no_memory": is_out_of_memory(error), "errno": errno_of(error)}


def heard_crash(said: Mapping[str, Any], process: str) -> Exception:
    """Return what `told_crash` told of a process: memory or room that ran out stays that,
    everything else is a ChildError.
    """
    if said["no_memory"]:
        return with_trace(MemoryError(said["what"]), said, process)
    if said["errno"] in NO_ROOM:
        return with_trace(OSError(said["errno"], os.strerror(said["errno"])), said, process)
    return with_trace(ChildError(f"{process} failed with {said['what']}"), said, process)


def with_trace(error: Error, said: Mapping[str, Any], process: str) -> Error:
    """Return an error with the traceback of another process, which is printed below its own."""
    if said.get("trace"):
        error.add_note(f"\nIn {process}:\n{said['trace']}")
    return error
