"""What lies in the store while other processes delete of it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from optkit.store.contents import prune, survey
from optkit.store.store import RECORD, Store

KEPT, LOST, WORK = "a" * 64, "b" * 64, "c" * 64


class Listing:
    """What `os.scandir` gives, read to its end before another process deletes it."""

    def __init__(self, place: str, lost: Path) -> None:
        with SCANDIR(place) as found:
            self.entries = list(found)
        shutil.rmtree(lost)

    def __enter__(self) -> Iterator[os.DirEntry[str]]:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self

    def __next__(self) -> os.DirEntry[str]:
        if not self.entries:
            raise StopIteration
        return self.entries.pop()


SCANDIR = os.scandir


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with two steps and the work of an unfinished one."""
    store = Store(tmp_path / "store")
    for key in (KEPT, LOST):
        with store.write(key) as draft:
            (draft.model / "weights").write_bytes(bytes(1000))
    store.workspace(WORK).mkdir(parents=True)
    (store.workspace(WORK) / "block").write_bytes(bytes(100))
    return store


@pytest.mark.parametrize("gone", [f"steps/{LOST}", f"work/{WORK}"])
def test_what_another_process_deletes_meanwhile_is_left_out(
    store: Store, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = store.root / gone

    def scandir(place: str) -> object:
        if not Path(place).is_relative_to(lost):
            return SCANDIR(place)
        monkeypatch.undo()
        return Listing(place, lost)

    monkeypatch.setattr(os, "scandir", scandir)
    found = survey(store)
    assert {each.key for each in found.steps} | {each.name for each in found.work} == {KEPT, LOST, WORK} - {lost.name}


def test_measurements_that_another_prune_deletes_first_are_no_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_json("d" * 64, {"metrics": [], "seconds": 1})
    found = survey(store)
    Path(found.metrics[0]).unlink()
    store.delete(LOST)
    monkeypatch.setattr("optkit.store.contents.survey", lambda _: found)
    pruned = prune(store, everything=True)
    assert {step.key for step in pruned.steps} == {KEPT, LOST}
    assert pruned.metrics == 0
    assert survey(store).steps == ()


def test_a_step_without_a_record_is_listed_as_damaged_and_can_be_deleted(store: Store) -> None:
    (store.root / "steps" / LOST / RECORD).unlink()
    assert {step.key: step.kind for step in survey(store).steps} == {KEPT: "step", LOST: "damaged"}
    prune(store, everything=True)
    assert list((store.root / "steps").iterdir()) == []
