"""Read YAML 1.2 into plain data, with the place of every key and value, and every problem at once.

Text becomes str, int, float, bool, None, list and dict with text keys: what JSON can say, and
nothing more. `1e-5` is a number, `yes` and `2024-01-01` are text. Anchors, aliases and merge keys
(`<<`) work; tags, several documents and duplicate keys are refused.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from optkit.errors import Problem, RecipeError

Steps = tuple[str | int, ...]
"""The way to a value: `("stages", 0, "gptq", "bits")`."""

MOST_NODES = 20_000
"""Aliases can multiply a short text beyond any memory; no recipe comes near this many values."""
MOST_LEVELS = 50
"""What is nested deeper than any recipe is refused here, not by what reads it later."""

TAG = "tag:yaml.org,2002:"
MERGE = TAG + "merge"


@dataclass(frozen=True)
class Place:
    """Where something was written; line and column count from 1, 0 if there is none."""

    file: str = ""
    line: int = 0
    column: int = 0

    @property
    def short(self) -> str:
        """The place as a sentence about another place says it.
        It is `line 4`, or the `--set` that wrote the value.
        """
        return f"line {self.line}" if self.line else self.file or "the recipe"

    def problem(self, message: str) -> Problem:
        name, _, rest = message.partition(": ")  # as `--set stages.0.gptq.bits` says it already
        said = self.file.startswith("--") and rest and f".{self.file.rpartition(' ')[2]}".endswith(f".{name}")
        return Problem(rest if said else message, self.file, self.line, self.column)


@dataclass
class PlacedData:
    """Plain data and where its keys and values were written."""

    data: Any = None
    keys: dict[Steps, Place] = field(default_factory=dict)
    values: dict[Steps, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    """What is wrong with the YAML itself and leaves the rest readable, such as a key that is there
    twice (the first is taken).
    """

    def key_place(self, steps: Steps) -> Place:
        """Return the place of a key; of the nearest value around it if it was not written."""
        return self.keys.get(steps) or self.value_place(steps)

    def value_place(self, steps: Steps) -> Place:
        """Return the place of a value; of the nearest one around it if it was not written."""
        for length in range(len(steps), -1, -1):
            if place := self.values.get(steps[:length]):
                return place
        return Place()


def read_yaml(text: str, file: str) -> PlacedData:
    """Return the data of one YAML document.
    Raises RecipeError with every problem, each at its place in `file`.
    """
    placed = read_yaml_leniently(text, file)
    if placed.problems:
        raise RecipeError(placed.problems)
    return placed


def read_yaml_leniently(text: str, file: str) -> PlacedData:
    """Return the data of one YAML document with its `problems`.
    Raises RecipeError only if it cannot be read on.
    """
    composed = PlacedData(values={(): Place(file, 1, 1)})
    reader = _Reader(file, composed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            root = YAML(typ="safe", pure=True).compose(text)
    except ReaderError as error:
        before = text[: error.position]
        column = error.position - before.rfind("\n")
        message = f"the character U+{ord(text[error.position]):04X} cannot stand in YAML. Remove it."
        raise RecipeError([Problem(message, file, before.count("\n") + 1, column)]) from error
    except MarkedYAMLError as error:
        raise RecipeError([_syntax_problem(error, text, file)]) from error
    except (YAMLError, ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise RecipeError([Problem(f"cannot be read as YAML: {why}.", file)]) from error
    if root is not None:
        composed.data = reader.read(root, ())
    return composed


class _Reader:
    """Walks composed nodes once, collecting places and problems."""

    def __init__(self, file: str, placed: PlacedData) -> None:
        self.file, self.placed = file, placed
        self.problems = placed.problems
        self.nodes = 0
        self.open: set[int] = set()

    def place(self, node: Node) -> Place:
        return Place(self.file, node.start_mark.line + 1, node.start_mark.column + 1)

    def refuse(self, node: Node, message: str) -> None:
        self.problems.append(self.place(node).problem(message))

    def read(self, node: Node, steps: Steps) -> Any:
        self.nodes += 1
        if self.nodes > MOST_NODES:
            message = f"more than {MOST_NODES:,} values. Write less; each alias (*) counts with all that it stands for."
            raise RecipeError([self.place(node).problem(message)])
        if len(steps) > MOST_LEVELS:
            message = f"more than {MOST_LEVELS} lists and mappings inside each other. Write less of them."
            raise RecipeError([self.place(node).problem(message)])
        if id(node) in self.open:
            self.refuse(node, f"the anchor '&{node.anchor}' holds an alias to itself. Write the value out.")
            return None
        self.placed.values[steps] = self.place(node)
        self.open.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return self.read_mapping(node, steps)
            if isinstance(node, SequenceNode):
                self.check_tag(node, "seq")
                return [self.read(item, (*steps, index)) for index, item in enumerate(node.value)]
            return self.read_scalar(node)
        finally:
            self.open.discard(id(node))

    def read_mapping(self, node: MappingNode, steps: Steps) -> dict[str, Any]:
        self.check_tag(node, "map")
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == MERGE:
                for part in value_node.value if isinstance(value_node, SequenceNode) else [value_node]:
                    if isinstance(part, MappingNode):
                        result = {**self.read(part, steps), **result}
                    else:
                        self.refuse(part, "a merge key (<<) takes a mapping or a list of mappings.")
        self.placed.values[steps] = self.place(node)
        first: dict[str, Place] = {}
        for key_node, value_node in node.value:
            if key_node.tag == MERGE:
                continue
            key = self.read_scalar(key_node) if isinstance(key_node, ScalarNode) else None
            if not isinstance(key, str):
                written = (key_node.value or "nothing") if isinstance(key_node, ScalarNode) else "a list or mapping"
                self.refuse(key_node, f"a key must be text, not {written}.")
            elif key in first:
                self.refuse(
                    key_node, f"the key '{key}' is here twice, first in {first[key].short}. Remove one of them."
                )
            else:
                first[key] = self.placed.keys[(*steps, key)] = self.place(key_node)
                result[key] = self.read(value_node, (*steps, key))
                # an empty value has the place of what comes next
                if value_node.start_mark.index == value_node.end_mark.index:
                    self.placed.values[(*steps, key)] = first[key]
        return result

    def check_tag(self, node: Node, expected: str) -> None:
        if node.tag != TAG + expected:
            self.refuse(node, f"the tag {node.tag} is not supported. Remove it.")

    def read_scalar(self, node: Node) -> Any:
        kind = str(node.tag).removeprefix(TAG)
        try:
            if kind in _SCALARS:
                return _SCALARS[kind](node.value)
        except ValueError as error:
            if kind == "float":
                self.refuse(node, str(error))
                return None
            return node.value
        if kind not in ("str", "timestamp", "value"):
            self.refuse(node, f"the tag {node.tag} is not supported. Remove it.")
        return node.value


def _integer(text: str) -> int:
    plain = text.replace("_", "").lower()
    return int(plain, 0) if plain.lstrip("+-")[:2] in ("0x", "0o", "0b") else int(plain)


def _number(text: str) -> float:
    number = float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number.")
    return number


_SCALARS: dict[str, Any] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() in ("true", "yes", "on", "y"),
    "int": _integer,
    "float": _number,
}


def _syntax_problem(error: MarkedYAMLError, text: str, file: str) -> Problem:
    unclosed = re.search("end of stream|<stream end>", str(error.problem))
    mark = (None if unclosed else error.problem_mark) or error.context_mark or error.problem_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    found = str(error.problem or error.context)
    lines = text.splitlines()
    written = lines[line] if line < len(lines) else ""
    if "\t" in written and "\\t" in found:
        message = "a tab stands here. YAML is indented with spaces; replace the tab by spaces."
    elif "found another document" in found:
        message = "a second document begins here. A recipe is one document; remove the line '---' or '...' before it."
    elif "expected <block end>" in found:
        message = (
            "the indentation does not fit the lines above. Keys of one mapping, and the items of "
            "one list, begin in one column."
        )
    elif "mapping values are not allowed" in found:
        message = "a second ': ' in one line, or a line indented too far. Put quotes around text that holds ': '."
    elif "indentation indicators" in found or "cannot start any token" in found:
        message = f'{found}. Put quotes around the text, e.g. "{written.split(": ", 1)[-1].strip(" -")}".'
    else:
        context = f" {error.context}" if error.context and error.context != found else ""
        message = f"this is not YAML:{context}{',' if context else ''} {found}."
    return Problem(message, file, line + 1, column + 1)
