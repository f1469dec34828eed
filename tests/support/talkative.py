"""A child that does what its order says; it imports nothing of optkit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def work(parent):
    order = parent.order()
    return globals()[order.pop("do")](parent, **order)


def result(parent, value):
    return value


def sum_two(parent, first):
    return first + parent.order()["second"]


def progress(parent):
    parent.say("opened")
    with parent.task("outer", 2, "runs") as outer, parent.task("inner", 1) as inner:
        inner.advance()
        outer.advance(2, "there")
    parent.warn("slow")
    parent.tell("read", part="layer 3")
    parent.task("left open", 1)


def printing(parent):
    sys.stdout.write('{"type": "error"}\n')
    sys.stdout.flush()
    os.write(1, b"noise of fd 1\n")
    os.write(2, b"noise of fd 2\n")
    subprocess.run([sys.executable, "-c", "print('noise of a child')"], check=True)
    return sys.stdin.read()


def environment(parent):
    import gc
    import importlib.util

    collected = gc.isenabled() and gc.get_freeze_count() > 0
    return {
        "collected": collected,
        "optkit": importlib.util.find_spec("optkit") is not None,
        "path": sys.path,
        "argv": sys.argv,
    }


def python_error(parent, code):
    exec(code)


def optkit_error(parent):
    class OptkitError(Exception):
        pass

    class ResourceError(OptkitError):
        pass

    class OwnError(ResourceError):
        """An error that optkit does not have."""

    error = OwnError("here: memory ran out. So it is. Lower it.")
    vars(error).update(what="memory ran out", where="here", why="So it is", remedy="Lower it", number=3)
    raise error


def end(parent, status=None, number=None, words=()):
    for word in words:
        os.write(2, f"{word}\n".encode())
    if number:
        os.kill(os.getpid(), number)
    os._exit(status)


def half_a_line(parent):
    os.write(int(sys.argv[1]), b'{"type": "result", "val')
    os._exit(0)


def leave_a_child(parent):
    """Be killed while a process that was forked has the channel open."""
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


def sleep(parent, place, stubborn=False):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    if stubborn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        parent.say(f"{os.getpid()} {child.pid}")
        time.sleep(300)
    except KeyboardInterrupt:
        Path(place).write_text("cleaned up", encoding="utf-8")
        raise
