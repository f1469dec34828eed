"""Entry of a rank: `python -P rank_start.py COMMANDS MEMORY`, two descriptors; run as a file, so
that nothing large is imported first.

It listens before torch is imported: this process ends with the socket, which is with its parent,
whatever it is at or waits for.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any


def listen(channel: Connection, asked: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Pass on messages; at their end the parent is gone, and so is this process at once."""
    try:
        while True:
            asked.put(json.loads(channel.recv_bytes()))
    except (EOFError, OSError):
        os._exit(1)


if __name__ == "__main__":
    commands, memory = (int(word) for word in sys.argv[1:])
    for descriptor in (commands, memory):
        os.set_inheritable(descriptor, False)
    to_parent = Connection(commands)
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(to_parent, messages), daemon=True).start()
    from optkit.session.rank import serve

    serve(to_parent, messages, memory)
