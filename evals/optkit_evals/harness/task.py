"""A task that a recipe names, pinned to a digest of its definition and data or to a commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, model_validator

from optkit.common.field_types import Name
from optkit.common.files import sha256_of
from optkit.common.frozen import Frozen, digest
from optkit.errors import SourceError
from optkit.source import python_reference
from optkit.source.digests import PREFIX, require_revision
from optkit.source.hub import HubRepo
from optkit.source.texts import NAME_DATA
from optkit_evals.harness.definitions import BUILT_IN, Definition, is_path, read_task_config
from optkit_evals.harness.groups import Finder, Group, our_definition
from optkit_evals.harness.names import harness_names


class HarnessTask(Frozen):
    """A task. In YAML a bare string is the name: `tasks: [arc_easy, ./my_task.yaml]`."""

    model_config = ConfigDict(json_schema_extra={"type": ["string", "object"]})

    name: Name
    """`arc_easy`, `arc_challenge`, `piqa` and `lambada_openai` are read from the data directory if
    it has them, `python_last_word` from Python itself; the harness knows 11,000 others. Or a
    YAML file in the harness' format."""
    revision: Name | None = None
    """`sha256:...` of definition and data, or the commit of a hub data set; left out, it is pinned
    before anything runs.
    """

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def local_place(self) -> str:
        """The path of its definition, of which an artifact says the name alone; empty for none."""
        return self.name if is_path(self.name) else ""

    def known_definition(self) -> Definition | Group:
        """Return a definition with the same numbers, wherever its data are; raises as `Finder.find`."""
        return Finder(our_definition).find(self.name)

    def definition(
        self, data: Path | None, read: Callable[[Path], dict[str, Any]] = read_task_config
    ) -> Definition | Group:
        """Return its definition: of each task ours, if its data are here or nothing else defines it.
        Raises SourceError, MissingPackageError.
        """
        local = bool(self.revision and self.revision.startswith(PREFIX))

        def ours(name: str) -> Path | None:
            path = our_definition(name)
            own = local and name == self.name
            wanted = path and (
                own or name not in harness_names().defined or _is_here(Definition(path, read(path)), data)
            )
            return path if wanted else None

        return Finder(ours, read).find(self.name)

    def pinned(self, data: Path | None) -> Self:
        """Return the task with its revision.
        Raises SourceError if its data are not here and cannot be had, or are not what `revision`
        says.
        """
        definition = self.definition(data)
        parts = {name: self.part(each, data) for name, each in definition.tasks().items()}
        one = isinstance(definition, Definition)
        content = parts[definition.name] if one else {"group": definition.described(), "tasks": parts}
        first, *others = parts.values()
        alike = isinstance(first, str) and all(other == first for other in others)
        revision = first if isinstance(first, str) and alike else PREFIX + digest(_plain(content))
        if PREFIX in (self.revision or revision) + revision:
            require_revision("the task with its data", revision, self.revision, self.name)
        return self.model_copy(update={"revision": revision})

    def part(self, definition: Definition, data: Path | None) -> str | Mapping[str, Any]:
        """Return what pins one of its tasks: the commit of a hub data set, or definition and files.
        Raises SourceError if its data are not here and cannot be had.
        """
        files = definition.data_files(data)
        if not files and definition.config.get("dataset_path") != BUILT_IN:
            return self._commit(definition)
        return {
            "definition": definition.config,
            "files": {split: [sha256_of(path) for path in paths] for split, paths in files.items()},
            **({} if files else {"text": built_in_rows()}),
        }

    def _commit(self, definition: Definition) -> str:
        dataset = definition.config.get("dataset_path")
        commit = None if self.revision and self.revision.startswith(PREFIX) else self.revision
        if not isinstance(dataset, str) or "/" not in dataset:
            return commit or "unpinned"
        path = our_definition(definition.name)
        looked = ""
        if path:
            wanted = read_task_config(path)["dataset_kwargs"]["data_files"]
            looked = f"A data directory could hold it as {', '.join(wanted.values())}"
        return HubRepo(dataset, "dataset", looked=looked, remedy=NAME_DATA if path else "").commit(commit)


def _is_here(definition: Definition, data: Path | None) -> bool:
    try:
        definition.data_files(data)
    except SourceError:
        return False
    return True


def built_in_rows() -> list[str]:
    """Return the paragraphs of the Python reference whose last word can be asked."""
    topics = python_reference.read_topics("test")
    evened = (" ".join(part.split()) for topic in topics for part in topic.split("\n\n"))
    return list(dict.fromkeys(part for part in evened if len(part.split()) >= 20 and part.isascii()))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
