"""Wait for what other processes do, with more patience than a busy machine needs."""

import time
from collections.abc import Callable

import psutil

PATIENCE_S = 120


def wait_until(holds: Callable[[], bool]) -> bool:
    """Return True as soon as it holds, False when patience has ended."""
    until = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def is_gone(pid: int) -> bool:
    """Say whether a process is gone, or dead and not yet waited for."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def ended(*pids: int) -> bool:
    """Wait until all of these processes are gone; False if one stays."""
    return wait_until(lambda: all(map(is_gone, pids)))
