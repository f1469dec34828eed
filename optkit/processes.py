"""Ending a process together with everything that it started, from outside, or from inside where its parent is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Close the stdin of a process that leads its own group, kill what is left of the group, and wait for the process."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_with_parent() -> None:
    """Watch stdin, which ends when the parent is gone; this process, which leads its own group, then ends with all of it."""
    threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
