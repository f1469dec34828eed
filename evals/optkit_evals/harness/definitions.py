"""Definitions of tasks in the harness' YAML.
They are ours (tasks/), the harness' own or the user's, and are read without importing the harness.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.nodes import ScalarNode

from optkit.common.files import reading
from optkit.errors import MissingPackageError, SourceError, did_you_mean
from optkit.source.texts import data_directory

OURS = Path(__file__).parent / "tasks"
SUFFIXES = (".yaml", ".yml")
NAMED = re.compile(rb"^[\"']?(task|group)[\"']?:[ \t]*[\"']?([\w.:-]+)[\"']?[ \t]*$", re.MULTILINE)
BUILT_IN = "python-reference"
"""The data set that comes with Python."""
DEFAULTS = {
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("exact_match",),
}
"""Kind of a task -> what the harness measures if its definition names no metrics."""


@dataclass(frozen=True)
class Definition:
    """What a task's YAML says, with what it includes; functions are their names."""

    path: Path
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What the task calls itself."""
        return str(self.config["task"])

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield metric and filter of each number that the task gives; no filter is empty."""
        listed = self.config.get("metric_list") or [
            {"metric": name} for name in DEFAULTS.get(self.config.get("output_type", "generate_until"), ())
        ]
        filters = [str(each.get("name", "")) for each in self.config.get("filter_list") or ()] or [""]
        for each in listed:
            for filtered in filters:
                yield str(each["metric"]).rpartition(".")[2], "" if filtered == "none" else filtered

    def data_files(self, data: Path | None) -> dict[str, list[Path]]:
        """Return the local files of each split; none for a task whose data lie elsewhere.
        A relative path counts from the data directory, the definition's or the working directory.

        Raises SourceError if one is not there.
        """
        listed = (self.config.get("dataset_kwargs") or {}).get("data_files") or {}
        splits = listed if isinstance(listed, Mapping) else {"train": listed}
        return {
            split: [self._file(str(each), data) for each in ([names] if isinstance(names, str) else names)]
            for split, names in splits.items()
        }

    def _file(self, name: str, data: Path | None) -> Path:
        place = data_directory(data)
        roots = [*([place] if place else []), self.path.parent, Path.cwd()]
        found = next((path for root in roots if (path := root / Path(name).expanduser()).is_file()), None)
        if found is None:
            looked = f"in {place}" if place else "No data directory was named, which could hold it; looked"
            raise SourceError(
                f"its file {name} is not there",
                where=self.name,
                why=f"Looked {looked}, beside its definition and in {Path.cwd()}"
                if place
                else f"{looked} beside its definition and in {Path.cwd()}",
                remedy="Name a directory of local copies with --data or OPTKIT_DATA",
            )
        return found.resolve()


def is_path(name: str) -> bool:
    """Say whether a task is named by a file and not by a name."""
    return name.endswith(SUFFIXES)


def harness_tasks() -> Path | None:
    """Return the directory of the harness' definitions; None if it is not installed."""
    spec = find_spec("lm_eval")
    return Path(spec.submodule_search_locations[0]) / "tasks" if spec and spec.submodule_search_locations else None


def check_harness(where: str) -> None:
    """Raise MissingPackageError if the harness is not installed."""
    if harness_tasks() is None:
        raise MissingPackageError("lm_eval", where=where, install="optkit[lm-eval]")


def our_definition(name: str) -> Definition | None:
    """Return our definition of a task, which reads local files; None if we have none."""
    path = OURS / f"{name}.yaml"
    return read_definition(path) if path.is_file() else None


def definition_of(name: str) -> Definition:
    """Return the definition that a name or a path stands for; of names, ours is first.
    Raises SourceError for an unknown one, a group or what is no definition, MissingPackageError
    for a name that only the harness could know if it is not installed.
    """
    if is_path(name):
        path = Path(name).expanduser()
        if not path.is_file():
            why = f"A path counts from the directory in which optkit runs, {Path.cwd()}"
            raise SourceError(f"there is no file {path}", why=why)
        return read_definition(path)
    return our_definition(name) or harness_definition(name)


def harness_definition(name: str) -> Definition:
    """Return the harness' own definition of a task; raises as `definition_of` does."""
    check_harness(name)
    kind, path = _index().get(name, ("", OURS))
    if not kind:
        known = sorted({each.stem for each in OURS.glob("*.yaml")} | set(_index()))
        near = did_you_mean(name, known)
        told = near if near.startswith(" Did") else f" The harness knows {len(known):,}: `lm_eval ls tasks` lists them."
        raise SourceError(f"no task is named '{name}'.{told} Or name a YAML file, as in ./my_task.yaml")
    if kind == "group":
        raise SourceError(f"'{name}' is a group of tasks", remedy="Name its tasks; `lm_eval ls subtasks` lists them")
    return read_definition(path)


@cache
def _index() -> dict[str, tuple[str, Path]]:
    """Return kind and file of each name that the harness defines; some seconds of reading."""
    found: dict[str, tuple[str, Path]] = {}
    root = harness_tasks()
    for path in sorted(root.rglob("*.yaml")) if root else ():
        for kind, name in NAMED.findall(path.read_bytes()):
            found.setdefault(name.decode(), (kind.decode(), path))
    return found


def read_definition(path: Path) -> Definition:
    """Return a definition with what it includes. Raises SourceError for what is none."""
    with reading(path, "is no task definition of the harness", "Write it as the harness' documentation says"):
        config = _merged(path, ())
        if not isinstance(config.get("task"), str):
            raise SourceError("names no `task:`", where=str(path), why="A definition is of one task")
        return Definition(path, config)


def _merged(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    if path in above:
        raise SourceError("includes itself", where=str(path))
    said = _yaml().load(path)
    if not isinstance(said, dict):
        raise SourceError("is no mapping", where=str(path))
    included = said.pop("include", [])
    merged: dict[str, Any] = {}
    for each in [included] if isinstance(included, str) else included:
        merged |= _merged(path.parent / each, (*above, path))
    return merged | said


class _Reader(SafeConstructor):
    """Takes a tag such as `!function utils.x` for its text."""


def _text(reader: SafeConstructor, _suffix: str, node: Any) -> str:
    return str(reader.construct_scalar(node)) if isinstance(node, ScalarNode) else ""


_Reader.add_multi_constructor("!", _text)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Reader
    return yaml
