"""Stands in for `optkit.sweep.executors.make_worker`: the name of the order's directory says what becomes of it."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from optkit.errors import ResourceError
from optkit.processes.child_program import Parent


def work(parent: Parent) -> Any:
    order = parent.order()
    os.write(1, b"printed\n")
    match name := Path(order["out"]).name:
        case "good":
            parent.say(f"{order['recipe']['name']}, {order['device']}, {name}")
            return {"verdict": "PASS"}
        case "no memory":
            raise ResourceError("memory ran out", where="rtn", remedy="Lower the samples")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crashed":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "bug":
            raise ZeroDivisionError("so")
        case "long":
            parent.say(str(os.getpid()))
            time.sleep(60)
    return None
