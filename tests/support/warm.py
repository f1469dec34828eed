"""Children that find torch and transformers imported: forks of one process that has imported them.

Such a child is a process of its own as ever, with its pid, group, environment, descriptors and
status; it only imports no library anew, which takes a core for seconds.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MOST_BYTES, MOST_FILES = 1 << 18, 32
PR_SET_CHILD_SUBREAPER = 36
START_PLAIN = subprocess.Popen
PRELOADED = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "optkit.measuring.fresh_process_worker",
    "optkit.measuring.measurement",
    "optkit.pipeline",
    "optkit.session",
    "optkit.stages.rtn",
    "optkit.training.loop",
    "optkit.training.worker",
    "optkit_cli.main",
    "optkit_cli.run",
    "optkit_evals.divergence",
    "optkit_evals.footprint",
    "optkit_evals.perplexity",
    "optkit_evals.throughput",
)


class WarmPopen(subprocess.Popen[Any]):
    """Starts our own Python warm, and all else as ever."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):  # type: ignore[no-untyped-def]
        _, shell, *pipes = rest[1:9]
        ours = None if shell or preexec_fn or isinstance(args, str | bytes | os.PathLike) else _our_python(args)
        if ours is None:
            START_PLAIN._execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[attr-defined]
            return
        reading, _, _, writing, _, complaining = pipes
        streams = [given if given >= 0 else usual for usual, given in enumerate((reading, writing, complaining))]
        order = {
            "words": ours[0],
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": {**(os.environ if env is None else env), **ours[1]},
            "leads": rest[-2],
            "places": [0, 1, 2, *pass_fds],
        }
        self.pid = _forked(json.dumps(order).encode(), [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _our_python(command: Sequence[str | os.PathLike[str]]) -> tuple[list[str], dict[str, str]] | None:
    """Return the words of a command of our Python, and the variables that a shell script in front of it sets."""
    first, *rest = map(os.fspath, command)
    if first == sys.executable:
        return rest, {}
    script = Path(first).read_bytes()[:4096] if Path(first).name == "python" else b""
    if not script.startswith(b"#!/bin/sh\n") or script.count(b"\n") > 2:
        return None
    words, variables = shlex.split(script.decode().partition("\n")[2]), dict[str, str]()
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    if words[:2] != ["exec", sys.executable]:
        return None
    given = {"$@": rest, **{f"${number}": [word] for number, word in enumerate(rest, 1)}}
    return [each for word in words[2:] for each in given.get(word, [word])], variables


@contextmanager
def warm_pythons() -> Iterator[None]:
    """Start our own Python warm meanwhile, whoever starts it."""
    with pytest.MonkeyPatch.context() as patched:
        if sys.platform == "linux":
            patched.setattr(subprocess, "Popen", WarmPopen)
        yield


@cache
def _server() -> tuple[socket.socket, subprocess.Popen[Any]]:
    """Start the process that has imported everything; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", __file__, str(theirs.fileno())]
    process = START_PLAIN(command, pass_fds=[theirs.fileno()], env=variables, stdin=subprocess.DEVNULL)
    theirs.close()
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours, process


def _forked(order: bytes, files: Sequence[int]) -> int:
    """Return the pid of a new child of this process."""
    adopt, (channel, _) = ctypes.CDLL(None).prctl, _server()
    adopt(PR_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(channel, [order], files)
        pid = int(channel.recv(32))
        channel.recv(32)  # whoever forked it is gone, so it is ours
    finally:
        adopt(PR_SET_CHILD_SUBREAPER, 0)
    return pid


def serve(channel: socket.socket) -> None:
    """Fork a child for each order."""
    places = sys.path[:]
    sys.path[:0] = [str(ROOT / place) for place in (".", "cli", "evals")]
    for name in PRELOADED:
        import_module(name)
    sys.path[:] = places
    gc.collect()
    gc.freeze()
    while True:
        order, files, _, _ = socket.recv_fds(channel, MOST_BYTES, MOST_FILES)
        if not order:
            return
        between = os.fork()
        if between == 0:
            if pid := os.fork():
                channel.send(str(pid).encode())
                os._exit(0)
            channel.close()
            _be(json.loads(order), files)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)
        channel.send(b"yours")


def _be(order: dict[str, Any], files: list[int]) -> None:
    status = 1
    try:
        if order["leads"]:
            os.setsid()
        _take(files, order["places"])
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        # that of the parent knows whether its own file could be sought in
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        if threads := os.environ.get("OMP_NUM_THREADS"):
            sys.modules["torch"].set_num_threads(int(threads))
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        _run(order["words"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except KeyboardInterrupt:
        traceback.print_exc()
        status = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(status)


def _take(files: Sequence[int], places: Sequence[int]) -> None:
    """Have the files at the places that they have in the parent."""
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, max(*places, *files) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, place in zip(above, places, strict=True):
        os.dup2(file, place)
        os.close(file)


def _run(words: list[str]) -> None:
    """Do what Python does with these words of a command line."""
    safe = "PYTHONSAFEPATH" in os.environ
    if words[0] == "-P":
        safe, words = True, words[1:]
    how, *rest = words
    sys.argv = ["-c", *rest[1:]] if how == "-c" else rest if how == "-m" else words
    if not safe:
        sys.path.insert(0, {"-c": "", "-m": str(Path.cwd())}.get(how, str(Path(how).parent)))
    if how == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        runpy.run_path(how, run_name="__main__")


def _leave(status: int) -> None:
    """End as Python does."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if status == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(status & 0xFF)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
