"""Tasks and groups as objects of the harness, with their data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optkit.errors import SourceError
from optkit.source.hub import without_bars
from optkit_evals.harness.definitions import BUILT_IN, Definition
from optkit_evals.harness.groups import Group
from optkit_evals.harness.task import HarnessTask, built_in_rows


def opened(wanted: HarnessTask, data: Path | None) -> tuple[Definition | Group, Any, dict[str, Any]]:
    """Return the definition of what a recipe names, the harness' task or group, and its tasks by name.
    Raises SourceError for what cannot be read.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        definition = wanted.definition(data, load_yaml)
        tasks = {name: _task(each, wanted, data) for name, each in definition.tasks().items()}
    except SourceError:
        raise
    except Exception as error:  # of functions that are other people's
        raise _unreadable(wanted.name, error, wanted.name) from error
    return definition, _whole(definition, tasks), tasks


def _whole(definition: Definition | Group, tasks: dict[str, Any]) -> Any:
    """Return what a definition is to the harness, made of tasks that are open."""
    if isinstance(definition, Definition):
        return tasks[definition.name]
    from lm_eval.api.group import Group as HarnessGroup

    group = HarnessGroup.from_config(dict(definition.described()))
    for each in definition.members:
        group.add(_whole(each, tasks))
    return group


def _task(definition: Definition, wanted: HarnessTask, data: Path | None) -> Any:
    """Return the harness' task of a definition, with its data. Raises SourceError."""
    from lm_eval.tasks import TaskManager

    config = {key: value for key, value in definition.config.items() if key not in ("tag", "group", "task_list")}
    files, part = definition.data_files(data), wanted.part(definition, data)
    if files:
        paths = {split: [str(path) for path in found] for split, found in files.items()}
        config["dataset_kwargs"] = {**config["dataset_kwargs"], "data_files": paths}
    elif config.get("dataset_path") == BUILT_IN:
        config["custom_dataset"] = _built_in
    elif isinstance(part, str) and part != "unpinned" and wanted.revision:
        config["dataset_kwargs"] = {**(config.get("dataset_kwargs") or {}), "revision": part}
    try:
        import datasets

        with without_bars(datasets):
            return TaskManager(include_defaults=False).load([config])["tasks"][definition.name]
    except Exception as error:  # of templates, functions and data that are other people's
        raise _unreadable(definition.name, error, definition.path) from error


def _unreadable(name: str, error: Exception, path: Path | str) -> SourceError:
    return SourceError(
        "the harness cannot load the task",
        where=name,
        why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
        remedy=f"Check its definition, {path}",
    )


def _built_in(**_: Any) -> dict[str, Any]:
    from datasets import Dataset

    return {"test": Dataset.from_list([{"text": row} for row in built_in_rows()])}
