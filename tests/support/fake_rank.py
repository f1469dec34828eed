"""Stands in for `optkit.session.rank` without torch: does what the directory's name says, so that
every way to fail is quick.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

channel = Connection(int(sys.argv[1]))
job = json.loads(channel.recv_bytes())
mode, rank = job["directory"], job["rank"]


def say(**message: object) -> None:
    channel.send_bytes(json.dumps(message).encode())


def fail(kind: str, what: str) -> None:
    say(error={"class": kind, "what": what, "where": "somewhere", "why": "", "remedy": ""})


if mode == "refused":
    fail("SourceError", "weights are missing")
    sys.exit()
if mode == "half refused" and rank == 1:
    fail("ResourceError", "out of memory")
    sys.exit()
if mode == "half refused":
    time.sleep(600)
say(done={"rank": rank, "pid": os.getpid()})
while True:
    try:
        message = json.loads(channel.recv_bytes())
    except EOFError:
        break
    call = message["call"]
    if call == "echo":
        say(done=[rank, message["value"]])
    elif call == "fail":
        fail("EvalError", "too long")
    elif call == "raise":
        fail("", "ValueError: odd")
    elif call == "die" and rank == 1:
        sys.stdout.write("the last words\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    elif call == "leave" and rank == 1:
        sys.exit(7)
    elif call in ("hang", "die", "leave", "stop here"):
        if rank == 0 and call == "hang":
            say(done=None)
        else:
            time.sleep(600)
