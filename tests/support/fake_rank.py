"""Stands in for `optkit.session.rank_worker` without torch: does what the directory's name says, so that
every way to fail is quick.
"""

import os
import signal
import sys
import time
from functools import partial
from typing import Any

from optkit.errors import EvalError, ResourceError, SourceError
from optkit.processes.child_program import Parent, answer


def work(parent: Parent) -> None:
    job = parent.order()
    mode, rank = job["directory"], job["rank"]
    if mode == "refused":
        raise SourceError("weights are missing", where="somewhere")
    if mode == "half refused" and rank == 1:
        raise ResourceError("out of memory", where="somewhere")
    if mode == "half refused":
        time.sleep(600)
    parent.tell("result", value={"rank": rank, "pid": os.getpid()})
    while True:
        answer(parent, partial(called, rank, **parent.order()))


def called(rank: int, call: str, value: Any = None) -> Any:
    if call == "echo":
        return [rank, value]
    if call == "fail":
        raise EvalError("too long", where="somewhere")
    if call == "raise":
        raise ValueError("odd")
    if call == "die" and rank == 1:
        sys.stdout.write("the last words\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if call == "leave" and rank == 1:
        os._exit(7)
    if rank == 1 or call != "hang":
        time.sleep(600)
    return None
