"""The most memory in use while something ran: torch's on a GPU, the resident size on a CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

PROCESS = Path("/proc/self")


@dataclass
class Peak:
    """Filled in when the watched work has ended."""

    size_bytes: int | None = None
    reserved_bytes: int | None = None
    """What torch held of a GPU to allocate from."""
    unknown: str = ""
    """Why there is no number."""
    each: tuple[int, ...] = ()
    """Of each device or process, if the model is split over several."""


@runtime_checkable
class PeakSession(Protocol):
    """A session whose memory is that of other processes."""

    def watched_peak(self) -> AbstractContextManager[Peak]:
        """Watch the peak of all of them from entering to leaving."""


def peak_of(session: Any) -> AbstractContextManager[Peak]:
    """Watch the peak of an opened model (`optkit.measure.Opened`), whatever processes it runs in."""
    if isinstance(session, PeakSession):
        return session.watched_peak()
    return watched_peak(session.device, session.hidden_memory)


@contextmanager
def watched_peak(device: str, hidden: str = "") -> Iterator[Peak]:
    """Watch the peak from entering to leaving; `hidden` says why torch cannot tell that of a GPU.

    On Linux `5` in clear_refs resets the resident-set high-water mark (man 5 proc).
    """
    peak = Peak(unknown=hidden)
    if hidden:
        yield peak
        return
    if device != "cpu":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.size_bytes = int(torch.cuda.max_memory_allocated(device))
        peak.reserved_bytes = int(torch.cuda.max_memory_reserved(device))
        return
    try:
        (PROCESS / "clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        peak.unknown = f"the system cannot reset the resident-set high-water mark ({error})"
    yield peak
    if not peak.unknown:
        status = PROCESS / "status"
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
        if found:
            peak.size_bytes = int(found[1]) * 1024
        else:
            peak.unknown = f"there is no VmHWM in {status}"
