"""Stands in for `optkit.measuring.child`: no torch and no model; the order's directory says what
becomes of it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from optkit.errors import MissingPackageError, ResourceError
from optkit.measuring.child import Channel
from optkit.measuring.parent import told_error

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


def main() -> None:
    order = json.loads(sys.stdin.readline())
    with open(int(sys.argv[1]), "w", encoding="utf-8") as file:  # noqa: PTH123
        channel = Channel(file)
        match Path(order["directory"]).name:
            case "good":
                channel.say("opened")
                with channel.task("outer", 2, "runs") as outer, channel.task("inner", 1) as inner:
                    inner.advance()
                    outer.advance(2, "there")
                channel.warn("slow")
                environment = {
                    "threads": order["threads"],
                    "waiting": os.environ["OPTKIT_PARENT_ON_GPU"],
                    "path": sys.path,
                }
                answer = {
                    "metrics": [METRIC],
                    "notes": [json.dumps(order)],
                    "session_notes": ["opened"],
                    "environment": environment,
                }
                channel.tell("answer", evals=[answer for _ in order["evals"]])
            case "no memory":
                channel.tell(
                    "error", **told_error(OwnError("memory ran out", where="here", why="So it is", remedy="Lower it"))
                )
            case "no package":
                channel.tell("error", **told_error(MissingPackageError("torch", where="there")))
            case "bug":
                channel.tell(
                    "crash", what="ZeroDivisionError at x.py:3: so", trace="Traceback: all", no_memory=False, errno=None
                )
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "lost":
                sys.exit(7)
            case "long":
                try:
                    channel.say(str(os.getpid()))
                    time.sleep(60)
                except KeyboardInterrupt:
                    Path(order["directory"]).write_text("cleaned up")
            case "stubborn":
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                channel.say(str(os.getpid()))
                time.sleep(60)


if __name__ == "__main__":
    main()
