"""The store of this machine in front of one that several machines share.

A run never fails because of that one. What it cannot fetch it makes, what it cannot push stays here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from optkit.common.cache import default_store
from optkit.errors import ResourceError, StoreError
from optkit.progress import Progress, SilentProgress
from optkit.store.remote import METRICS, Remote, RemoteError, UnusableError, fetch_step, push_step
from optkit.store.store import Store

VARIABLE = "OPTKIT_STORE_REMOTE"
GOING_ON = {
    "fetch": "What is not here is made here",
    "push": "What is made stays here; give it later by `optkit store push --remote {url}`",
}
DAMAGED = {"fetch": "It is made again", "push": "It is not pushed"}
T = TypeVar("T")


class SharedStore(Store):
    """A store that looks into a remote one for what it does not have, and gives it what it makes."""

    def __init__(self, root: Path, remote: Remote, progress: Progress) -> None:
        super().__init__(root)
        self.remote, self._progress = remote, progress
        self._off: set[str] = set()

    def get_json(self, key: str) -> Any | None:
        """Return what any of the machines kept under this key."""
        found = super().get_json(key)
        if found is None:
            found = self._try("fetch", lambda: self.remote.read(METRICS, key))
            if found is not None:
                with contextlib.suppress(StoreError, ResourceError):  # who can only read here may look all the same
                    super().put_json(key, found)
        return found

    def put_json(self, key: str, value: Any) -> None:
        super().put_json(key, value)
        self._try("push", lambda: self.remote.write(METRICS, key, value))

    def record(self, key: str) -> dict[str, Any]:
        """Return the record of a step that any of the machines finished."""
        try:
            return super().record(key)
        except StoreError:
            if found := self._try("fetch", lambda: self.remote.record(key)):
                return found
            raise

    def fetch(self, key: str) -> Path | None:
        return self._try("fetch", lambda: fetch_step(self, self.remote, key, self._progress))

    def push(self, key: str) -> None:
        self._try("push", lambda: push_step(self, self.remote, key, self._progress))

    def is_remote(self, key: str) -> bool:
        return self._try("fetch", lambda: self.remote.record(key)) is not None

    def check(self) -> None:
        """Raise an OptkitError if the remote store can never be used like this."""
        self._try("fetch", self.remote.check, but=UnusableError)

    def _try(self, direction: str, do: Callable[[], T], but: type[UnusableError] | tuple[()] = ()) -> T | None:
        """Talk to the remote store. Once that has failed it is no longer asked in this direction."""
        if direction in self._off:
            return None
        try:
            return do()
        except but:
            raise
        except RemoteError as error:
            self._off.add(direction)
            self._progress.warn(f"{error} {GOING_ON[direction].format(url=self.remote.url)}.")
        except StoreError as error:
            self._progress.warn(f"{error} {DAMAGED[direction]}.")
        return None


def open_store(place: Path | Store | None = None, progress: Progress | None = None) -> Store:
    """Return the store of a directory, or the default one; a store is returned as it is.

    `$OPTKIT_STORE_REMOTE` says which one it shares. Raises UsageError, MissingPackageError or
    StoreError if that one cannot be used at all: a wrong URL, no package, no credentials.
    """
    if isinstance(place, Store):
        return place
    root, url = place or default_store(), os.environ.get(VARIABLE)
    if not url:
        return Store(root)
    store = SharedStore(root, Remote(url), progress or SilentProgress())
    store.check()
    return store
