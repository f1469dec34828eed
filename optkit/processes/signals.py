"""Being asked to stop: a signal sets a flag, and safe points read it.
What reaches none of them is ended.

A handler that raises does so wherever the main thread happens to be. Inside a `__del__` Python
prints the exception and drops it, and the run goes on. So the handlers of `listening` raise
nothing. A thread hears of the signal, even while the main thread is in a call of C:

    at once          it says so on stderr, and sets the flag; `check`, the safe point, raises in the main thread
    after 1 s        it ends the processes that were started, so that whoever waits for one of them goes on to
                     a safe point
    after 4 s        it ends this process; the store takes no harm, as it takes none from `kill -9`
    a second signal  ends this process at once

A program that imports optkit installs nothing: there Ctrl-C is Python's plain KeyboardInterrupt.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHILDREN_S = 1.0
"""How long after a signal the main thread may take to end the processes that it started."""
END_S = 4.0
"""How long after a signal this process may take to end."""
SAME_S = 0.25
"""Signals so close together are one request: `timeout` sends its own to the process and to its
group.
"""
POLL_S = 0.05
KEPT = "finished steps are kept, run the same command again to go on"
SHOW_CURSOR = "\x1b[?25h"


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived; whatever clears up on Ctrl-C clears up on these too."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number


@dataclass
class _Listening:
    """One use of `listening`: its pipe, and the request that came through it."""

    reading: int
    writing: int
    number: int = 0
    """The signal that arrived first; 0 before."""
    raised: bool = False
    over: bool = False
    """The work is done: what is left of this process may be ended at any time."""
    last_words: list[Callable[[], None]] = field(default_factory=list)


_current: _Listening | None = None
_groups: set[int] = set()


def check() -> None:
    """A safe point: raise KeyboardInterrupt or Terminated once if a signal has asked for the end.
    It is raised in the main thread.
    """
    now = _current
    if now and now.number and not now.raised and threading.current_thread() is threading.main_thread():
        now.raised = True
        raise request()


def request() -> KeyboardInterrupt:
    """Return what stands for the signal that asked for the end; call it only if `asked`."""
    number = _current.number if _current else 0
    return Terminated(number) if number and number != signal.SIGINT else KeyboardInterrupt()


def asked() -> bool:
    """Say whether a signal has asked for the end."""
    return bool(_current and _current.number)


def said_of(error: KeyboardInterrupt) -> tuple[str, int]:
    """Return `interrupted` or `terminated`, and the exit status that shells give to the signal."""
    return ("terminated", 128 + error.number) if isinstance(error, Terminated) else ("interrupted", 128 + signal.SIGINT)


def take_lock(file: IO[str] | IO[bytes], how: int) -> None:
    """Wait until a lock of `fcntl` is free, and take it; a safe point while it waits."""
    while True:
        try:
            return fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            check()
            time.sleep(POLL_S)


def adopt(leader: int) -> None:
    """Have a group of processes ended when this process is asked to end."""
    _groups.add(leader)


def release(leader: int) -> None:
    """Forget a group of processes, which has ended."""
    _groups.discard(leader)


def before_the_end(say: Callable[[], None]) -> None:
    """Have something called in the thread that ends this process.
    It is called if the main thread does not end it in time.
    """
    if _current:
        _current.last_words.append(say)


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Hear signals inside the block as this module says.
    A block inside another one, or outside of the main thread, adds nothing.
    """
    if _current or threading.current_thread() is not threading.main_thread():
        yield
        return
    close = listen()
    try:
        yield
    finally:
        close()


def listen() -> Callable[[], None]:
    """Hear signals from now on; returns what puts things as they were. Signals that this process
    was started to ignore stay ignored.
    """
    global _current
    now = _Listening(*os.pipe())
    os.set_blocking(now.writing, False)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = [number for number in SIGNALS if before[number] not in (signal.SIG_IGN, None)]
    waker = signal.set_wakeup_fd(now.writing, warn_on_full_buffer=False)
    _current = now
    watcher = threading.Thread(target=_watch, args=(now,), name="signals", daemon=True)
    atexit.register(_default)  # what is registered first is called last, when no thread runs any more
    for number in heard:
        signal.signal(number, _nothing)
    watcher.start()

    def close() -> None:
        global _current
        atexit.unregister(_default)
        for number in heard:
            signal.signal(number, before[number])
        signal.set_wakeup_fd(waker)
        if _current is now:
            os.write(now.writing, b"\0")
            watcher.join()
            _current = None
        os.close(now.reading)
        os.close(now.writing)

    return close


def work_is_done() -> None:
    """Let a signal end this process at once from now on."""
    if _current:
        _current.over = True


def _default() -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is _nothing:
            signal.signal(number, signal.SIG_DFL)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Stand as a handler, so that Python writes the signal's number into the pipe.
    Blocking calls go on.
    """


def _hold_back() -> None:
    """Let signals wait while a process forks: a new one must not write into the pipe of its parent."""
    if _current:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _let_through() -> None:
    if _current:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _forget() -> None:
    """Leave a forked process without the pipe of its parent, and with none of its children."""
    global _current
    if _current:
        signal.set_wakeup_fd(-1)
        _default()
        _let_through()
        _current = None
    _groups.clear()


os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_forget)


def _watch(now: _Listening) -> None:
    number = _heard(now, None)
    if not number:
        return
    now.number = number
    if now.over:
        _end_now(now)
    started = time.monotonic()
    _say(f"{said_of(request())[0]}: stopping; a second signal ends at once")
    for after in (SAME_S, CHILDREN_S, END_S):
        number = _heard(now, started + after)
        if number == 0:
            return
        if number and after > SAME_S:
            break
        if after == CHILDREN_S:
            end_children()
    _end_now(now)


def _heard(now: _Listening, until: float | None) -> int | None:
    """Return the next signal, 0 if the block has ended, None if nothing came until that time."""
    poll = select.poll()
    poll.register(now.reading, select.POLLIN)
    left = None if until is None else max(0.0, (until - time.monotonic()) * 1e3)
    return os.read(now.reading, 1)[0] if poll.poll(left) else None


def end_children() -> None:
    """End every group of processes that was started."""
    for leader in tuple(_groups):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def _end_now(now: _Listening) -> None:
    end_children()
    word, status = said_of(request())
    for say in now.last_words:
        with contextlib.suppress(Exception):
            say()
    _say(f"{SHOW_CURSOR if os.isatty(2) else ''}{word}; {KEPT}")
    os._exit(status)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
