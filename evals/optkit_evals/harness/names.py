"""Names of tasks, groups and tags that files define; the harness' own are found without importing it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

from optkit.common.grouping import by_key
from optkit.errors import MissingPackageError

NAMED = re.compile(rb"^[\"']?(task|group)[\"']?:[ \t]*[\"']?([\w.:()-]+)[\"']?[ \t]*\r?$", re.MULTILINE)
_LISTED = rb"^[\"']?%s[\"']?:[ \t]*([^\n]*(?:\n[ \t]*-[^\n]*)*)"
TAGS, INCLUDES = (re.compile(_LISTED % field, re.MULTILINE) for field in (b"tag", b"include"))
WORD = re.compile(rb"[\w.:/()-]*\w[\w.:/()-]*")


@dataclass(frozen=True)
class Names:
    """What some YAML files define; of two that define one name the first counts, as in the harness."""

    files: tuple[Path, ...]

    @cached_property
    def defined(self) -> Mapping[str, tuple[str, Path]]:
        """Name -> `task` or `group`, and its file."""
        found: dict[str, tuple[str, Path]] = {}
        for path in self.files:
            for kind, name in NAMED.findall(path.read_bytes()):
                found.setdefault(name.decode(), (kind.decode(), path))
        return found

    @cached_property
    def tagged(self) -> Mapping[str, tuple[str, ...]]:
        """Tag -> names of its tasks, sorted."""
        tasks = ((name, path) for name, (kind, path) in self.defined.items() if kind == "task")
        found = by_key((tag, name) for name, path in tasks for tag in _tags(path))
        return {tag: tuple(sorted(names)) for tag, names in found.items()}


def names_in(files: Iterable[Path]) -> Names:
    """Return what files define, in the harness' order."""
    return Names(tuple(sorted(files, key=lambda path: path.as_posix())))


def harness_tasks() -> Path | None:
    """Return the directory of the harness' definitions; None if it is not installed."""
    spec = find_spec("lm_eval")
    return Path(spec.submodule_search_locations[0]) / "tasks" if spec and spec.submodule_search_locations else None


def check_harness(where: str) -> None:
    """Raise MissingPackageError if the harness is not installed."""
    if harness_tasks() is None:
        raise MissingPackageError("lm_eval", where=where, install="optkit[lm-eval]")


def harness_names() -> Names:
    """Return what the harness defines; a second of reading, and some for tags."""
    root = harness_tasks()
    return _names(root) if root else Names(())


@cache
def _names(root: Path) -> Names:
    return names_in(root.rglob("*.yaml"))


def _tags(path: Path) -> Iterator[str]:
    """Yield the tags of a definition: its own, else those of what it includes."""
    try:
        text = path.read_bytes()
    except OSError:
        return
    if own := TAGS.search(text):
        yield from (word.decode() for word in WORD.findall(own[1]))
        return
    included = INCLUDES.search(text)
    for name in reversed(WORD.findall(included[1]) if included else ()):
        if tags := _included(path.parent / name.decode()):
            yield from tags
            return


@cache
def _included(path: Path) -> tuple[str, ...]:
    return tuple(_tags(path))
