"""Finished steps and metrics below one URL of fsspec, for machines that share them.

    URL/steps/KEY.json     how a step was made, with size and SHA-256 of each of its files
    URL/metrics/KEY.json   what an eval measured
    URL/files/SHA256       the files of all steps, each once
    URL/drafts/RANDOM      uploads under way, if the URL is a directory

Object stores cannot rename. So a record goes up after the last of its files: what a killed upload
leaves is never found. Files lie under the digest of their content: two writers of one key never mix
theirs, and the last record wins. A reader takes a step only if each file has its digest.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from optkit.common.out_of_resources import NO_ROOM
from optkit.errors import MissingPackageError, OptkitError, StoreError, UsageError, first_line, needing
from optkit.progress import Progress
from optkit.store.files import sealed, unsealed
from optkit.store.records import is_measured, is_record
from optkit.store.store import Store

STEPS, METRICS, FILES, DRAFTS = "steps", "metrics", "files", "drafts"
KINDS = {STEPS: is_record, METRICS: is_measured}
CHANGED = ("mtime", "LastModified", "last_modified", "created")
ANSWER_S = 60
"""Longest wait for an answer that has no weights in it. s3fs tries again what it tried again itself,
and what botocore did: alone they take half an hour to give a server up that takes requests in silence.
"""
PACKAGES = {"s3fs": "optkit[remote]", "smbclient": "smbprotocol"}
"""Module that is missing -> what to install, if not a package of its name."""
OURS = re.compile(r"[0-9a-f]{16}|[0-9a-f]{64}")
"""Names of drafts, and digests, which all else is named by."""
PASSWORD = re.compile(r"://[^@]*:(?!\d+/)[^@]*@")
"""Of AWS they may hold a slash, and a URL may stand in another one: `simplecache::s3://...`."""
EXAMPLES = "Write s3://bucket/prefix, gs://bucket/prefix or a directory"


class RemoteError(StoreError):
    """The store that machines share does not answer, or refuses."""


class UnusableError(RemoteError):
    """It will never answer like this: no such place, or no credentials."""


class Fact(NamedTuple):
    """What a listing says of an object."""

    size_bytes: int
    changed: float
    """Seconds since 1970; now if the listing does not say it."""


class Remote:
    """The files below a URL. Everything raises RemoteError if the other side fails."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._files, self._root = _opened(url)
        self._folders = False
        self.distrusted: set[str] = set()
        """Steps of which a damaged file was read here: they go up again as a whole."""

    def check(self) -> None:
        """Raise UnusableError if there is no such bucket or directory, or no credentials."""
        path = self._root if self._root.startswith("/") else self._root.split("/")[0]
        with self._talking("read"):
            try:
                self._ask("cat_file", self._path(STEPS, "none"), start=0)
            except FileNotFoundError:
                if not self._ask("exists", path):
                    remedy = "Make it, or correct the URL"
                    what = f"there is no bucket or directory {path}"
                    raise UnusableError(what, where=self.url, remedy=remedy) from None

    def read(self, folder: str, key: str) -> Any | None:
        """Return a record or numbers; None if there are none, or they were changed or cut off."""
        with self._talking("read"):
            try:
                found = unsealed(self._ask("cat_file", self._path(folder, f"{key}.json"), start=0))
            except FileNotFoundError:
                return None
        return found if KINDS[folder](found) else None

    def write(self, folder: str, key: str, value: Any) -> None:
        """Put a JSON document in the place of another one, or of none."""
        with self._talking("written"):
            self._put(self._path(folder, f"{key}.json"), sealed(value).encode())

    def record(self, key: str) -> dict[str, Any] | None:
        """Return the record of a step; None if there is none that can be followed."""
        return self.read(STEPS, key)

    def records(self) -> dict[str, dict[str, Any]]:
        """Return the records of all steps by their keys, read at the same time if that is possible."""
        keys = self.keys(STEPS)
        with self._talking("read"):
            texts = self._files.cat([self._path(STEPS, f"{key}.json") for key in keys], on_error="omit") if keys else {}
        found = ((Path(path).stem, unsealed(text)) for path, text in texts.items())
        return {key: record for key, record in found if record and is_record(record)}

    def keys(self, folder: str) -> list[str]:
        """Return the keys of all steps or metrics."""
        return sorted(self.there(folder))

    def there(self, folder: str) -> dict[str, Fact]:
        """Return key, or name of a file, -> how large it is and since when it is so. What others put there is
        left out.
        """
        with self._talking("read"):
            try:
                found = self._files.ls(self._path(folder, "").rstrip("/"), detail=True)
            except FileNotFoundError:
                return {}
        documents = folder in KINDS
        named = {Path(each["name"]): each for each in found if each.get("type") != "directory"}
        ending = ".json" if documents else ""
        kept = {path: each for path, each in named.items() if OURS.fullmatch(path.stem) and path.suffix == ending}
        return {path.stem: Fact(int(each.get("size") or 0), _changed(each)) for path, each in kept.items()}

    def delete(self, folder: str, names: Iterable[str]) -> None:
        """Delete steps, numbers or files; those that are gone already are none's fault."""
        ending = ".json" if folder in KINDS else ""
        with self._talking("written"):
            for name in names:
                with suppress(FileNotFoundError):
                    self._ask("rm_file", self._path(folder, f"{name}{ending}"))

    def upload(self, path: Path, known: Mapping[str, Any], *, again: bool) -> None:
        """Put a file under its digest, unless it lies there already. With `again` it is not asked."""
        place = self._path(FILES, known["sha256"])
        with self._talking("written"):
            if again or self._size(place) != known["size_bytes"]:
                self._put(place, path)

    def download(self, known: Mapping[str, Any], path: Path) -> None:
        """Fetch a file by its digest, which the caller has to compare. Raises StoreError if it is gone."""
        path.parent.mkdir(parents=True, exist_ok=True)
        place = self._path(FILES, known["sha256"])
        with self._talking("read"):
            if self._size(place) != known["size_bytes"]:
                raise StoreError(f"its file {path.name} is gone or not {known['size_bytes']:,} bytes", where=self.url)
            self._files.get_file(place, str(path))

    def _ask(self, method: str, *words: Any, **options: Any) -> Any:
        """Do what takes a moment, if the other side answers."""
        limit = {"timeout": ANSWER_S} if self._files.async_impl else {}
        return getattr(self._files, method)(*words, **options, **limit)

    def _path(self, folder: str, name: str) -> str:
        return f"{self._root.rstrip('/')}/{folder}/{name}"

    def _size(self, place: str) -> int | None:
        try:
            return int(self._ask("info", place)["size"])
        except FileNotFoundError:
            return None

    def _put(self, place: str, content: Path | bytes) -> None:
        """Write an object, which is whole or not there: directories need a rename for that."""
        is_directory = getattr(self._files, "local_file", False)
        if not self._folders:
            for folder in (STEPS, METRICS, FILES, *([DRAFTS] if is_directory else [])):
                self._ask("makedirs", self._path(folder, "").rstrip("/"), exist_ok=True)
            self._folders = True
        draft = self._path(DRAFTS, secrets.token_hex(8)) if is_directory else place
        if isinstance(content, bytes):
            self._ask("pipe_file", draft, content)
        else:
            self._files.put_file(str(content), draft)
        if is_directory:
            self._files.mv(draft, place)

    @contextmanager
    def _talking(self, what: str) -> Iterator[None]:
        """Say what failed on the other side; a full disk on this one is left as it is."""
        try:
            yield
        except OptkitError:
            raise
        except Exception as error:
            if what == "read" and isinstance(error, OSError) and error.errno in NO_ROOM:
                raise
            if "redential" in type(error).__name__:
                remedy = "Set those of your provider, e.g. AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
                raise UnusableError("there are no credentials for it", where=self.url, remedy=remedy) from error
            silent = isinstance(error, TimeoutError) and not str(error)
            why = f"There was no answer for {ANSWER_S} s" if silent else first_line(error)
            may = {"read": "read", "written": "write"}[what]
            remedy = f"Check its address and the connection, and that you may {may} there"
            raise RemoteError(f"it cannot be {what}", where=self.url, why=why, remedy=remedy) from error


def _changed(listed: Mapping[str, Any]) -> float:
    """Return when an object was written, by whatever name its file system has for that."""
    moment = next((listed[name] for name in CHANGED if listed.get(name)), time.time())
    return moment.timestamp() if isinstance(moment, datetime) else float(moment)


def push_step(store: Store, remote: Remote, key: str, progress: Progress, *, again: bool = False) -> None:
    """Put a finished step up, its record last; with `again` also the files that seem to be there."""
    directory, record = store.get(key), store.record(key)
    if directory is None:
        raise StoreError("its files were changed or lost", where=f"the step {key[:12]}", remedy="Make it again")
    files = {name: {each: known[each] for each in ("size_bytes", "sha256")} for name, known in record["files"].items()}
    with progress.task(f"{record.get('kind', 'step')} to {remote.url}", len(files), "files") as task:
        for name, known in files.items():
            remote.upload(directory / name, known, again=again or key in remote.distrusted)
            task.advance(note=name)
    remote.write(STEPS, key, {**record, "files": files})
    remote.distrusted.discard(key)


def fetch_step(store: Store, remote: Remote, key: str, progress: Progress) -> Path | None:
    """Take a finished step; None if there is none. It holds `store.lock(key)` meanwhile.
    Raises StoreError if a file is not what the record says; ResourceError on a full disk here.
    """
    record = remote.record(key)
    if record is None:
        return None
    files = record["files"]
    with store.lock(key):
        if found := store.get(key):
            return found
        remote.distrusted.add(key)
        with store.write(key) as draft:
            draft.record.update(record)
            draft.expected = {name: known["sha256"] for name, known in files.items()}
            with progress.task(f"{record.get('kind', 'step')} from {remote.url}", len(files), "files") as task:
                for name, known in files.items():
                    remote.download(known, draft.model / name)
                    task.advance(note=name)
        remote.distrusted.discard(key)
        return store.get(key)


def _opened(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it; nothing is asked of the other side yet."""
    if not url.strip():
        raise UsageError("the URL is empty", where="--remote", remedy=EXAMPLES)
    if PASSWORD.search(url):
        why = "It would be printed and recorded"
        raise UsageError("the URL holds a password", where="--remote", why=why, remedy="Put it into the environment")
    with needing("fsspec", url, "optkit[remote]"):
        import fsspec
    try:
        # Others write there too, so nothing that was listed before is true.
        files, root = fsspec.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        missing = getattr(error.__cause__ or error, "name", None) or "fsspec"
        package = missing.split(".")[0]
        raise MissingPackageError(package, where=url, install=PACKAGES.get(package, package)) from error
    except Exception as error:  # of the file systems, of which many need more than a URL
        what, why = f"'{url}' is no place of a store", first_line(error)
        raise UsageError(what, where="--remote", why=why, remedy=EXAMPLES) from error
    return files, root
