"""A directory that several trainings can use: what a teacher said, for the next student.

PLACE/about.json    what it is, for `optkit store show`
PLACE/in_use        locked (flock) by the processes that read or write here;
                    `optkit store prune` leaves it then
PLACE/at_work       locked by the one that writes
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optkit.processes.signals import take_lock

ABOUT = "about.json"
IN_USE = "in_use"


class SharedPlace:
    """A directory that this process holds."""

    def __init__(self, place: Path) -> None:
        self.place = place

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold it for writing, after whoever does so already."""
        with (self.place / "at_work").open("a") as file:
            take_lock(file, fcntl.LOCK_EX)
            yield


@contextmanager
def shared_place(place: Path, about: Mapping[str, Any]) -> Iterator[SharedPlace]:
    """Hold a directory against deletion; it is made if missing."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / IN_USE).open("a") as held:
        take_lock(held, fcntl.LOCK_SH)
        (place / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        yield SharedPlace(place)
