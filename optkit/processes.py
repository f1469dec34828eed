"""Ending a process together with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Close the stdin of a process that leads its own group, kill what is left of the group, and wait for the process."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
