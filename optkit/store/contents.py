"""What lies in the store, and what of it can go: steps by their last use, numbers by theirs."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optkit.common.files import status_of, statuses_below
from optkit.common.frozen import Frozen
from optkit.store.records import made_at
from optkit.store.remote import METRICS, Remote
from optkit.store.store import RECORD, Store, read_record
from optkit.store.work import STEP, StoredWork, delete_work, survey_work

METRIC = re.compile(rf"{STEP.pattern}\.json")


class StoredStep(Frozen):
    """One finished step."""

    key: str
    kind: str
    """Name of the stage; `model` for a model that was imported, `damaged` if its record cannot
    be read.
    """
    fields: dict[str, Any]
    model: str
    """The model that it began with; empty if the store does not know."""
    size_bytes: int
    linked_bytes: int
    """How many of these are in an artifact as well, and stay on the disk when the step is deleted."""
    last_use: float
    """Seconds since 1970; in a shared store, when it was made."""


class Contents(Frozen):
    """Everything in a store."""

    root: Path | str
    """A URL if machines share it."""
    steps: tuple[StoredStep, ...]
    """The one used last first."""
    metrics: tuple[Path | str, ...]
    """One file, or one key of a shared store, for each eval of each model."""
    work: tuple[StoredWork, ...] = ()
    """Checkpoints of steps that were not finished, and what teachers said."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all steps."""
        return sum(step.size_bytes for step in self.steps)


class Pruned(Frozen):
    """What was deleted, or would be."""

    root: Path | str
    """A URL if machines share it."""
    steps: tuple[StoredStep, ...]
    in_use: tuple[StoredStep, ...]
    """Chosen, and kept because a running process works on them or needs them."""
    metrics: int
    metrics_in_use: int
    """Chosen, and kept because a running process needs them."""
    left: int
    """Steps that are in the store afterwards."""
    left_bytes: int
    work: tuple[StoredWork, ...] = ()
    """Of a shared store the files that no step has."""
    work_in_use: tuple[StoredWork, ...] = ()
    """Chosen, and kept because a running process works on it."""

    @property
    def freed_bytes(self) -> int:
        """What the disk has more: links of artifacts keep the rest."""
        steps = sum(step.size_bytes - step.linked_bytes for step in self.steps)
        return steps + sum(work.size_bytes for work in self.work)

    @property
    def linked_bytes(self) -> int:
        """What artifacts keep on the disk."""
        return sum(step.linked_bytes for step in self.steps)


def survey(store: Store) -> Contents:
    """Return what lies in a store; nothing of it counts as used by that. What other processes delete
    meanwhile is left out.
    """
    entries = [entry for entry in _below(store.root / "steps") if STEP.fullmatch(entry.name)]
    records = {entry.name: read_record(entry) or {} for entry in entries}
    steps = [step for entry in entries if (step := _step(entry, records))]
    return Contents(
        root=store.root,
        steps=_newest_first(steps),
        metrics=tuple(path for path in _below(store.root / "metrics") if METRIC.fullmatch(path.name)),
        work=survey_work(store),
    )


def survey_remote(remote: Remote, records: Mapping[str, Mapping[str, Any]] | None = None) -> Contents:
    """Return what lies in a store that machines share, whose records may be read already.
    Raises StoreError if it does not answer.
    """
    records = remote.records() if records is None else records
    steps = [
        StoredStep(
            **_told(key, record, records),
            size_bytes=sum(known["size_bytes"] for known in record["files"].values()),
            linked_bytes=0,
            last_use=made_at(record),
        )
        for key, record in records.items()
    ]
    return Contents(root=remote.url, steps=_newest_first(steps), metrics=tuple(remote.keys(METRICS)))


def prune(
    store: Store,
    *,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    everything: bool = False,
    dry_run: bool = False,
) -> Pruned:
    """Delete what was last used too long ago, then the steps used longest ago until the rest fits.
    Artifacts keep their files.

    What a running process works on or needs stays. Numbers are small and cost hours: they go by age
    or with `everything`, never for space; so does unfinished work. Raises StoreError if the
    store cannot be written.
    """
    contents = survey(store)
    before = limit_of(older_than_s, everything=everything)
    chosen = [step for step in contents.steps if step.last_use < before]
    known = [(path, status) for path in map(Path, contents.metrics) if (status := status_of(path))]
    metrics = [path for path, status in known if status.st_mtime < before]
    work = [each for each in contents.work if each.last_use < before]
    deleted, in_use = _delete(store, chosen, dry_run=dry_run)
    if max_bytes is not None:
        left_bytes = contents.size_bytes - sum(step.size_bytes for step in deleted)
        for step in reversed([step for step in contents.steps if step not in chosen]):
            if left_bytes > max_bytes:
                more, busy = _delete(store, [step], dry_run=dry_run)
                deleted, in_use = deleted + more, in_use + busy
                left_bytes -= sum(each.size_bytes for each in more)
    kept = sum(not _delete_metric(store, path, dry_run=dry_run) for path in metrics)
    gone = tuple(each for each in work if delete_work(store, each, dry_run=dry_run))
    if not dry_run:
        store.delete_abandoned_drafts()
    return Pruned(
        root=store.root,
        steps=tuple(deleted),
        in_use=tuple(in_use),
        metrics=len(metrics) - kept,
        metrics_in_use=kept,
        left=len(contents.steps) - len(deleted),
        left_bytes=contents.size_bytes - sum(step.size_bytes for step in deleted),
        work=gone,
        work_in_use=tuple(each for each in work if each not in gone),
    )


def limit_of(older_than_s: float | None, *, everything: bool) -> float:
    """Return the moment, in seconds since 1970, before which all is deleted."""
    return math.inf if everything else -math.inf if older_than_s is None else time.time() - older_than_s


def _delete(store: Store, steps: list[StoredStep], *, dry_run: bool) -> tuple[list[StoredStep], list[StoredStep]]:
    deleted: list[StoredStep] = []
    in_use: list[StoredStep] = []
    for step in steps:
        with store.idle(step.key) as idle:
            (deleted if idle else in_use).append(step)
            if idle and not dry_run:
                store.delete(step.key)
    return deleted, in_use


def _delete_metric(store: Store, path: Path, *, dry_run: bool) -> bool:
    """Delete an eval's numbers; returns False if a run needs them."""
    with store.unused(path.stem) as unused:
        if unused and not dry_run:
            path.unlink(missing_ok=True)
        return unused


def _below(directory: Path) -> Iterator[Path]:
    return iter(sorted(directory.iterdir())) if directory.is_dir() else iter(())


def _newest_first(steps: list[StoredStep]) -> tuple[StoredStep, ...]:
    return tuple(sorted(steps, key=lambda step: (-step.last_use, step.key)))


def _told(key: str, record: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    kind, fields = str(record.get("kind", "damaged")), record.get("fields") or {}
    return {"key": key, "kind": kind, "fields": fields, "model": _model(record, records)}


def _step(entry: Path, records: Mapping[str, Mapping[str, Any]]) -> StoredStep | None:
    """Return a step; None if it is gone. One without a record that can be read is as old as its directory."""
    files = statuses_below(entry / "model")
    used = status_of(entry / RECORD) or status_of(entry)
    return used and StoredStep(
        **_told(entry.name, records[entry.name], records),
        size_bytes=sum(status.st_size for status in files),
        linked_bytes=sum(status.st_size for status in files if status.st_nlink > 1),
        last_use=used.st_mtime,
    )


def _model(record: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the model that a step began with.
    Its record says it, or that of a step before it.
    """
    seen = record
    for _ in records:  # a damaged record may lead back to itself
        if "model" in seen or seen.get("source_key") not in records:
            break
        seen = records[seen["source_key"]]
    if seen.get("kind") == "model":
        return str((seen.get("fields") or {}).get("name", ""))
    return str(seen.get("model", ""))
