"""The store on the terminal: a line for each step, and what of it was deleted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from optkit.errors import OptkitError
from optkit.store.contents import Contents, Pruned, StoredStep
from optkit.store.exchange import Exchanged
from optkit.store.work import StoredWork
from optkit_cli.tables import plain_table, size_text, spaced

AGES = ((86_400, "day"), (3600, "hour"), (60, "minute"))


def contents_view(contents: Contents) -> list[RenderableType]:
    """Return what to print, top to bottom."""
    size = f"{size_text(contents.size_bytes)} in " if contents.steps else ""
    told = f"  {size}{_counted(len(contents.steps), 'step')}, {_counted(len(contents.metrics), 'measurement')}"
    linked = sum(step.linked_bytes for step in contents.steps)
    shared = f"{size_text(linked)} of it are in artifacts too and take no further space"
    return spaced(
        Text.assemble((str(contents.root), "bold"), told),
        _steps(contents.steps, _moment(contents)) if contents.steps else None,
        _work(contents.work) if contents.work else None,
        Text(shared, style="dim") if linked else None,
    )


def pruned_view(pruned: Pruned, *, dry_run: bool) -> list[RenderableType]:
    """Return what to print, top to bottom."""
    verb = "would be deleted" if dry_run else "deleted"
    said = [
        f"{_counted(len(pruned.steps), 'step')} and {_counted(pruned.metrics, 'measurement')} {verb},"
        f" {size_text(pruned.freed_bytes) if pruned.freed_bytes else 'nothing'} freed",
        f"{size_text(pruned.linked_bytes)} of them stay on the disk, in artifacts" if pruned.linked_bytes else "",
        f"{_counted(len(pruned.in_use), 'step')} in use by a running optkit, kept" if pruned.in_use else "",
        f"{_counted(len(pruned.work), *_unfinished(pruned))} {verb}" if pruned.work else "",
        f"{_counted(len(pruned.work_in_use), 'directory', 'directories')} of work in use by a running optkit, kept"
        if pruned.work_in_use
        else "",
        f"{_counted(pruned.metrics_in_use, 'measurement')} needed by a running optkit, kept"
        if pruned.metrics_in_use
        else "",
        f"{_counted(pruned.left, 'step')}, {size_text(pruned.left_bytes)}, left in {pruned.root}"
        if pruned.left
        else "",
    ]
    table = _steps(pruned.steps, _moment(pruned)) if pruned.steps else None
    return [*spaced(table), Text(""), *(Text(line) for line in said if line)]


def exchanged_view(done: Exchanged, verb: str) -> list[RenderableType]:
    """Return what to print of a push or a pull: `pushed to` or `pulled from`."""
    what = f"{_counted(len(done.steps), 'step')} and {_counted(len(done.metrics), 'measurement')}"
    return [Text(f"{what} {verb} {done.url}"), *(Text(f"  {key}", style="dim") for key in done.steps)]


def _moment(told: Contents | Pruned) -> str:
    return "made" if isinstance(told.root, str) else "last use"


def _unfinished(pruned: Pruned) -> tuple[str, str]:
    what = "file that no step has", "files that no step has"
    here = "directory of unfinished work", "directories of unfinished work"
    return what if isinstance(pruned.root, str) else here


def _steps(steps: Sequence[StoredStep], when: str) -> Table:
    rows: list[tuple[Text | str, ...]] = []
    for step in steps:
        name = Text.assemble(step.kind, (f" {_fields(step)}" if step.kind != "model" else "", "dim"))
        rows.append((name, step.model or "-", *_facts(step, step.key)))
    return plain_table("step", "model", ">size", f">{when}", "key", rows=rows)


def _work(works: Sequence[StoredWork]) -> Table:
    rows = ((work.what, *_facts(work, work.name.rpartition("-")[2])) for work in works)
    return plain_table("work", ">size", ">last use", "key", rows=rows)


def _facts(kept: StoredStep | StoredWork, key: str) -> tuple[str, str, Text]:
    return size_text(kept.size_bytes), _age(kept.last_use), Text(key[:12], style="dim")


def _fields(step: StoredStep) -> str:
    """Return the fields that a recipe had to say: numbers and words unlike those of the stage, no lists."""
    from optkit.recipe.registry import stage_class

    usual: dict[str, Any] = {}
    with contextlib.suppress(OptkitError):  # of a package that is not here
        usual = {name: field.default for name, field in stage_class(step.kind).model_fields.items()}
    said = ((name, value) for name, value in step.fields.items() if value != usual.get(name))
    words = ((name, str(value).lower() if isinstance(value, bool) else value) for name, value in said)
    return ", ".join(f"{name} {value}" for name, value in words if isinstance(value, int | float | str))


def _age(moment: float) -> str:
    passed_s = time.time() - moment
    for length_s, unit in AGES:
        if passed_s >= length_s:
            return f"{_counted(int(passed_s // length_s), unit)} ago"
    return "just now"


def _counted(count: int, thing: str, things: str = "") -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {things or f'{thing}s'}"
