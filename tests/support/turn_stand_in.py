"""Stands in for `optkit.measuring.fresh_process_worker`: no torch and no model; the order's directory says what
becomes of it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from optkit.common.attachment import Attachment
from optkit.errors import MissingPackageError, ResourceError
from optkit.processes.child_program import Parent

METRIC = {
    "name": "speed",
    "value": 0.1,
    "unit": "tokens/s",
    "higher_is_better": True,
    "protocol": "p",
    "samples": [0.1, 1 / 3],
}


class OwnError(ResourceError):
    """An error that optkit does not have."""


def work(parent: Parent) -> Any:
    order = parent.order()
    match Path(order["directory"]).name:
        case "good":
            parent.say("opened")
            if order["turn"] == 0:
                with parent.task("throughput, turn 1 of 2", 1):
                    time.sleep(0.05)
            environment = {
                "threads": order["threads"],
                "waiting": os.environ["OPTKIT_PARENT_ON_GPU"],
                "path": sys.path,
                "policy": os.environ.get("OMP_WAIT_POLICY"),
            }
            answer = {
                "metrics": [METRIC],
                "attachments": [Attachment("raw.bin", bytes([0, 255])).to_json()],
                "notes": [json.dumps(order)],
                "session_notes": ["opened"],
                "environment": environment,
            }
            return [answer for _ in order["evals"]]
        case "no memory":
            raise OwnError("memory ran out", where="here", why="So it is", remedy="Lower it")
        case "no package":
            raise MissingPackageError("torch", where="there")
        case "bug":
            raise ZeroDivisionError("so")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "lost":
            os._exit(7)
        case "long":
            try:
                parent.say(str(os.getpid()))
                time.sleep(60)
            except KeyboardInterrupt:
                Path(order["directory"]).write_text("cleaned up")
    return None
