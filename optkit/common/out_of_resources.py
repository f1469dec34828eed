"""What an exception says of a limit of the machine: memory, disk, the size of a file.

Libraries say it in many ways.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from optkit.errors import ResourceError, opening_of

NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "unable to mmap",
)
"""What torch's RuntimeErrors say of an allocation on the CPU or a GPU, or of a memory map, that
failed; also C++ itself.
"""
NO_THREAD = "can't start new thread"
NO_SEGMENT = "failed to map segment"
"""What the loader of libraries says without memory."""
NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk's quota is used up",
    errno.EFBIG: "the file is larger than this process may write (ulimit -f)",
    errno.EMFILE: "more files are open than this process may have (ulimit -n)",
}
"""The system's number of a failed write -> what it means."""
UNNUMBERED = re.compile(r"problem writing element \d+ to file|\d+ requested and \d+ written")
"""What `numpy.ndarray.tofile` says of a failed write; it drops the system's number."""


def more_room(number: int | None, elsewhere: str = "use another disk") -> str:
    """Return what to do about a failed write."""
    if raised := {errno.EFBIG: "ulimit -f unlimited", errno.EMFILE: "ulimit -n 4096"}.get(number or 0):
        return f"Raise that limit, e.g. by `{raised}`"
    return f"Free some space, or {elsewhere}"


def room_error(error: BaseException, path: Path) -> OSError | None:
    """Return the OSError behind what a library says of a failed write of `path`.
    None if it says nothing of room.
    """
    number = errno_of(error)
    return OSError(number, NO_ROOM[number], str(path)) if number in NO_ROOM else None


def errno_of(error: BaseException) -> int | None:
    """Return the system's error number, of an OSError or as Rust writes it, `(os error 28)`.
    None if neither the error nor what it comes of has one.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, OSError) and UNNUMBERED.search(str(error)):
        return errno.ENOSPC
    if found := re.search(r"\(os error (\d+)\)", str(error)):
        return int(found[1])
    return None if error.__cause__ is None else errno_of(error.__cause__)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error is a failed allocation, in main memory or on a GPU, or comes of one."""
    if error.__cause__ is not None and is_out_of_memory(error.__cause__):
        return True
    if isinstance(error, MemoryError) or errno_of(error) == errno.ENOMEM:
        return True
    known: tuple[str, ...] = (*NO_MEMORY, NO_THREAD) if isinstance(error, RuntimeError) else ()
    if isinstance(error, ImportError | OSError):
        known = (NO_SEGMENT,)
    return any(part in str(error) for part in known)


@contextmanager
def memory_errors(what: str | Callable[[BaseException], str], where: str, remedy: str) -> Iterator[None]:
    """Turn an allocation that failed into a ResourceError that says what to lower.
    `what` was being done, or makes the message of the error.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        said = what(error) if callable(what) else f"out of memory {what}"
        raise ResourceError(said, where=where, why=opening_of(error), remedy=remedy) from error


def out_of_memory(where: str, device: str, remedy: str) -> AbstractContextManager[None]:
    """Return `memory_errors` for a layer or block, whose message names the memory that is full."""

    def which(error: BaseException) -> str:
        import torch

        on_gpu = isinstance(error, torch.OutOfMemoryError)
        return f"the memory of {device} is full" if on_gpu else "the main memory is full"

    return memory_errors(which, where, remedy)
