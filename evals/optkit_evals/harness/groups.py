"""What a name in a recipe stands for: a task, a group of tasks with its numbers, or a tag of some tasks.
Groups are put together as the harness does it (`lm_eval.tasks._factory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optkit.errors import SourceError, did_you_mean
from optkit_evals.harness.definitions import OURS, Definition, Row, is_path, read_task_config
from optkit_evals.harness.names import Names, check_harness, harness_names, names_in

OF_GROUP = frozenset({"group", "group_alias", "task", "aggregate_metric_list", "metadata"})
"""Fields of a group; others of its fields are those of its tasks."""
NONE = Names(())


@dataclass(frozen=True)
class Group:
    """Tasks and groups; of a tag, and of a group without `aggregate_metric_list`, no number is made."""

    name: str
    config: Mapping[str, Any]
    """The fields of the group alone."""
    members: tuple[Definition | Group, ...]

    def aggregated(self) -> list[Mapping[str, Any]]:
        """Return the metrics that are formed of all tasks."""
        listed = self.config.get("aggregate_metric_list") or []
        return [listed] if isinstance(listed, Mapping) else list(listed)

    def tasks(self) -> Mapping[str, Definition]:
        """Return the tasks by name, those of groups in it too; of two of one name the last counts."""
        return {name: task for member in self.members for name, task in member.tasks().items()}

    def described(self) -> Mapping[str, Any]:
        """Return what an identity says beside the tasks."""
        return {**self.config, "group": self.name}

    def rows(self, group: str = "") -> Iterator[Row]:
        """Yield each number that the group and its tasks give."""
        inside = self.name if self.aggregated() else group
        below = list(dict.fromkeys(row for member in self.members for row in member.rows(inside)))
        names = self.tasks()
        for each in self.aggregated():
            wanted = each.get("filter_list")
            wanted = [wanted] if isinstance(wanted, str) else wanted
            filters = dict.fromkeys(row.filter for row in below if row.task in names and row.metric == each["metric"])
            for filtered in sorted(filters):
                if wanted is None or (filtered or "none") in wanted:
                    yield Row(self.name, group, str(each["metric"]), filtered)
        yield from below


@dataclass(frozen=True)
class Finder:
    """Finds definitions: beside a file, ours, then the harness' own."""

    ours: Callable[[str], Path | None]
    """The file of our definition of a name, if it is to be taken."""
    read: Callable[[Path], dict[str, Any]] = read_task_config
    beside: Names = field(default=NONE)

    def find(self, name: str) -> Definition | Group:
        """Return what a name or a path stands for.
        Raises SourceError for an unknown one or what is no definition, MissingPackageError for a
        name that only the harness could know if it is not installed.
        """
        if not is_path(name):
            return self._named(name, {}, ())
        path = Path(name).expanduser()
        if not path.is_file():
            why = f"A path counts from the directory in which optkit runs, {Path.cwd()}"
            raise SourceError(f"there is no file {path}", why=why)
        beside = names_in([*path.parent.glob("*.yaml"), *path.parent.glob("*.yml")])
        return Finder(self.ours, self.read, beside)._at(path, {}, ())

    def _named(self, name: str, overrides: Mapping[str, Any], above: tuple[str, ...]) -> Definition | Group:
        if name in above:
            raise SourceError("the group includes itself", where=name)
        if place := self._place(name):
            return self._at(place, overrides, above)
        for names in (self.beside, harness_names()):
            if tagged := names.tagged.get(name):
                return Group(name, {}, tuple(self._named(each, overrides, above) for each in tagged))
        check_harness(name)
        known = sorted({each.stem for each in OURS.glob("*.yaml")} | set(harness_names().defined))
        near = did_you_mean(name, known)
        told = near if near.startswith(" Did") else f" The harness knows {len(known):,}: `lm_eval ls tasks` lists them."
        raise SourceError(f"no task is named '{name}'.{told} Or name a YAML file, as in ./my_task.yaml")

    def _place(self, name: str) -> Path | None:
        places = (self.beside.defined.get(name, ("", None))[1], self.ours(name))
        return next(filter(None, places), None) or harness_names().defined.get(name, ("", None))[1]

    def _at(self, path: Path, overrides: Mapping[str, Any], above: tuple[str, ...]) -> Definition | Group:
        config = self.read(path)
        if "group" in config and not isinstance(config.get("task"), str):
            return self._group(path, str(config["group"]), config, overrides, above)
        if not isinstance(config.get("task"), str):
            raise SourceError("names no `task:`", where=str(path), why="A definition is of one task, or of a group")
        return Definition(path, {**config, **overrides})

    def _group(
        self, path: Path, name: str, config: Mapping[str, Any], overrides: Mapping[str, Any], above: tuple[str, ...]
    ) -> Group:
        inside = {**{key: value for key, value in config.items() if key not in OF_GROUP}, **overrides}
        listed = config.get("task")
        if not listed or not isinstance(listed, list):
            raise SourceError(f"the group '{name}' lists no tasks", where=str(path), remedy="List them under `task:`")
        members = tuple(self._member(path, name, each, inside, (*above, name)) for each in listed)
        return Group(name, {key: config[key] for key in OF_GROUP - {"task"} if key in config}, members)

    def _member(
        self, path: Path, group: str, said: Any, overrides: Mapping[str, Any], above: tuple[str, ...]
    ) -> Definition | Group:
        """Return a member: a name, a task or a group with other fields, or one that is defined here."""
        if isinstance(said, str):
            return self._named(said, overrides, above)
        if not isinstance(said, Mapping) or not {"task", "group"} & set(said):
            raise SourceError(
                f"'{said}' is no task of a group", where=str(path), remedy="Name it by `task:` or `group:`"
            )
        kind = "group" if "group" in said else "task"
        own = OF_GROUP if kind == "group" else {"task"}
        name, changed = str(said[kind]), {**overrides, **{key: said[key] for key in said if key not in own}}
        if self._place(name):
            return self._named(name, changed, above)
        if kind == "group":
            return self._group(path, f"{group}::{name}", said, overrides, above)
        return Definition(path, {**changed, "task": f"{group}::{name}"})


def our_definition(name: str) -> Path | None:
    """Return the file of our definition of a task, which reads local files; None if we have none."""
    path = OURS / f"{name}.yaml"
    return path if not is_path(name) and path.is_file() else None
