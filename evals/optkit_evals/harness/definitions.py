"""Definitions of tasks in the harness' YAML.
They are ours (tasks/), the harness' own or the user's, and are read without importing the harness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.nodes import ScalarNode

from optkit.common.files import reading
from optkit.errors import SourceError
from optkit.source.texts import data_directory

OURS = Path(__file__).parent / "tasks"
SUFFIXES = (".yaml", ".yml")
BUILT_IN = "python-reference"
"""The data set that comes with Python."""
DEFAULTS = {
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("exact_match",),
}
"""Kind of a task -> what the harness measures if its definition names no metrics."""


class Row(NamedTuple):
    """A number that a task or a group gives."""

    task: str
    group: str
    """The group whose number it is a part of; empty for none."""
    metric: str
    filter: str
    """Empty for the answers as they are."""


@dataclass(frozen=True)
class Definition:
    """What a task's YAML says, with what it includes; functions are their names."""

    path: Path
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What the task calls itself."""
        return str(self.config["task"])

    def tasks(self) -> Mapping[str, Definition]:
        """Return the tasks by name: itself."""
        return {self.name: self}

    def described(self) -> Mapping[str, Any]:
        """Return what an identity says beside the data."""
        return self.config

    def rows(self, group: str = "") -> Iterator[Row]:
        """Yield each number that the task gives, as one of a group."""
        listed = self.config.get("metric_list") or [
            {"metric": name} for name in DEFAULTS.get(self.config.get("output_type", "generate_until"), ())
        ]
        filters = [str(each.get("name", "")) for each in self.config.get("filter_list") or ()] or [""]
        for each in listed:
            for filtered in filters:
                metric = str(each["metric"]).rpartition(".")[2]
                yield Row(self.name, group, metric, "" if filtered == "none" else filtered)

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
            looked = f"Looked in {place}," if place else "No data directory was named, which could hold it; looked"
            raise SourceError(
                f"its file {name} is not there",
                where=self.name,
                why=f"{looked} beside its definition and in {Path.cwd()}",
                remedy="Name a directory of local copies with --data or OPTKIT_DATA",
            )
        return found.resolve()


def is_path(name: str) -> bool:
    """Say whether a task is named by a file and not by a name."""
    return name.endswith(SUFFIXES)


def read_task_config(path: Path) -> dict[str, Any]:
    """Return what a definition says with what it includes. Raises SourceError for what is none."""
    with reading(path, "is no task definition of the harness", "Write it as the harness' documentation says"):
        return _merged(path, ())


def _merged(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    if path in above:
        raise SourceError("includes itself", where=str(path))
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Reader
    said = yaml.load(path)
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
