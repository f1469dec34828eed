"""What can go of a store that machines share: old steps and numbers, and files that no step has.

Nothing there says who reads it. A run that was about to take a step makes it; a push that counted on
a file is seen as damaged by the next reader, who pushes it again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from optkit.store.contents import Pruned, StoredStep, limit_of, survey_remote
from optkit.store.remote import DRAFTS, FILES, METRICS, STEPS, Remote
from optkit.store.work import StoredWork

UPLOAD_S = 86_400
"""A file that no step has may be part of a step whose record is still to come."""


def prune_remote(
    remote: Remote,
    *,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    everything: bool = False,
    dry_run: bool = False,
) -> Pruned:
    """Delete what was made too long ago, then the oldest steps until the files of the rest fit; then
    the files that no step has, if they are not of today. Raises StoreError if the other side fails.
    """
    before = limit_of(older_than_s, everything=everything)
    records, files = remote.records(), remote.there(FILES)
    damaged = {key: fact for key, fact in remote.there(STEPS).items() if key not in records}
    steps = [
        *survey_remote(remote, records).steps,
        *(_damaged(key, fact.changed) for key, fact in damaged.items() if fact.changed < before),
    ]
    chosen = [step for step in steps if step.last_use < before]
    left = [step for step in steps if step not in chosen]
    needed = Counter(name for step in left for name in _files(records, [step.key]))

    def room(names: Iterable[str]) -> int:
        return sum(files[name].size_bytes for name in names if name in files)

    while max_bytes is not None and left and room(needed) > max_bytes:
        chosen.append(left.pop())
        needed -= Counter(_files(records, [chosen[-1].key]))
    metrics = [name for name, fact in remote.there(METRICS).items() if fact.changed < before]
    if not dry_run:
        remote.delete(STEPS, [step.key for step in chosen])
        remote.delete(METRICS, metrics)
        needed.update(_files(now := remote.records(), now))  # of those that came meanwhile too
    known = set(_files(records, records))
    gone: set[str] = set()
    freed = []
    for step in chosen:
        its = set(_files(records, [step.key])) - set(needed) - gone
        freed.append(step.model_copy(update={"size_bytes": room(its)}))
        gone |= its
    lost = {
        (folder, name): fact
        for folder, found in ((FILES, files), (DRAFTS, remote.there(DRAFTS)))
        for name, fact in found.items()
        if name not in known and name not in needed and fact.changed < time.time() - UPLOAD_S
    }
    if not dry_run:
        remote.delete(FILES, [*gone, *(name for folder, name in lost if folder == FILES)])
        remote.delete(DRAFTS, [name for folder, name in lost if folder == DRAFTS])
    return Pruned(
        root=remote.url,
        steps=tuple(freed),
        in_use=(),
        metrics=len(metrics),
        metrics_in_use=0,
        left=len(left),
        left_bytes=room(needed),
        work=tuple(
            StoredWork(name=name, what="upload", size_bytes=fact.size_bytes, last_use=fact.changed)
            for (_, name), fact in lost.items()
        ),
    )


def _files(records: Mapping[str, Mapping[str, Any]], keys: Iterable[str]) -> list[str]:
    """Return the digests of the files of these steps."""
    return [known["sha256"] for key in keys for known in records.get(key, {}).get("files", {}).values()]


def _damaged(key: str, changed: float) -> StoredStep:
    return StoredStep(key=key, kind="damaged", fields={}, model="", size_bytes=0, linked_bytes=0, last_use=changed)
