"""Steps and numbers that are pushed and pulled by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from optkit.common.frozen import Frozen
from optkit.errors import StoreError, UsageError
from optkit.progress import Progress
from optkit.store.contents import survey
from optkit.store.remote import METRICS, STEPS, Remote, RemoteError, fetch_step, push_step
from optkit.store.store import Store


class Exchanged(Frozen):
    """What went from one store to the other."""

    url: str
    steps: tuple[str, ...]
    metrics: tuple[str, ...]


def push(store: Store, remote: Remote, named: Sequence[str], progress: Progress) -> Exchanged:
    """Push all steps and numbers; or those whose keys begin so, with files that seem to be there.
    Raises UsageError if a key is not here, StoreError if one was damaged or the remote store fails.
    """
    contents = survey(store)
    steps, metrics = [step.key for step in contents.steps], [Path(path).stem for path in contents.metrics]
    if named:
        steps, metrics = _chosen(named, steps, metrics, str(store.root))
    else:
        metrics = sorted({*metrics} - {*remote.keys(METRICS)})
        if damaged := [key[:12] for key in steps if store.get(key) is None]:
            progress.warn(f"{', '.join(damaged)}: not pushed, for their files were changed or lost")
        steps = [key for key in steps if key[:12] not in damaged]
    for key in steps:
        push_step(store, remote, key, progress, again=bool(named))
    for key in metrics:
        remote.write(METRICS, key, store.take_json(key))
    return Exchanged(url=remote.url, steps=tuple(steps), metrics=tuple(metrics))


def pull(store: Store, remote: Remote, named: Sequence[str], progress: Progress) -> Exchanged:
    """Pull the steps and numbers whose keys begin so.
    Raises UsageError if a key is not there, StoreError if one is damaged or the remote store fails.
    """
    steps, metrics = _chosen(named, remote.keys(STEPS), remote.keys(METRICS), remote.url)
    for key in steps:
        try:
            there = fetch_step(store, remote, key, progress)
        except RemoteError:
            raise
        except StoreError as error:
            raise _damaged(remote, key) from error
        if there is None:
            raise _damaged(remote, key)
    for key in metrics:
        if (found := remote.read(METRICS, key)) is None:
            raise _damaged(remote, key)
        store.put_json(key, found)
    return Exchanged(url=remote.url, steps=tuple(steps), metrics=tuple(metrics))


def _damaged(remote: Remote, key: str) -> StoreError:
    remedy = f"Push it again from where it was made: optkit store push {key[:12]} --remote {remote.url}"
    return StoreError(f"{key[:12]} is damaged", where=remote.url, remedy=remedy)


def _chosen(
    named: Iterable[str], steps: Sequence[str], metrics: Sequence[str], where: str
) -> tuple[list[str], list[str]]:
    chosen: set[str] = set()
    for word in named:
        found = [key for key in (*steps, *metrics) if key.startswith(word)]
        if len(found) != 1:
            what = f"{len(found)} keys begin with" if found else "there is no key"
            raise UsageError(f"{what} {word}", where=where, remedy="optkit store show lists the steps")
        chosen.update(found)
    return [key for key in steps if key in chosen], [key for key in metrics if key in chosen]
