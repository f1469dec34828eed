"""What the two models answered: items whose answer turned, and prompts continued by both.

Evals leave them as JSON lines beside the scorecard: `question` or `prompt`, and what `unmodified`
and `artifact` answered; `choices`, `gold`, `task` and `turned` if there are any.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optkit.common.files import check_regular
from optkit.errors import ArtifactError
from optkit.scorecard import Scorecard

SUFFIX = ".jsonl"
MOST_BYTES = 64 * 2**20
MOST = 12
"""Answers of a group that are shown; the file has all."""
LONGEST = 1200
"""Letters of a text that are shown."""
SIDES = ("gold", "unmodified", "artifact")


def answers(scorecard: Scorecard, directory: Path | None) -> list[dict[str, Any]]:
    """Return the groups of answers to show, of one file, task and kind of turn each."""
    if directory is None:
        return []
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for line in scorecard.files:
        if line.path.endswith(SUFFIX):
            for number, record in enumerate(_records(directory / line.path)):
                if {"unmodified", "artifact"} <= record.keys():
                    kind = (line.path, str(record.get("task", "")), str(record.get("turned", "")))
                    groups.setdefault(kind, []).append(record)
                elif not number:
                    break  # a file of something else, e.g. of all items
    return [_group(*kind, records) for kind, records in groups.items()]


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects in a file; what is gone, too large or no JSON is not shown."""
    try:
        if check_regular(path, ArtifactError) > MOST_BYTES:
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if isinstance(record, dict):
                yield record
    except (ArtifactError, OSError, ValueError, RecursionError):
        return


def _group(path: str, task: str, turned: str, records: list[Mapping[str, Any]]) -> dict[str, Any]:
    name = ", ".join(part for part in (task, turned) if part)
    count = f"{len(records)} in {path}"
    return {
        "title": f"Answers: {name}" if name else "Answers of both models",
        "about": f"{MOST} of {count}" if len(records) > MOST else count,
        "items": [_answer(record, number) for number, record in enumerate(records[:MOST], start=1)],
    }


def _answer(record: Mapping[str, Any], number: int) -> dict[str, Any]:
    choices = record.get("choices")
    return {
        "title": f"item {record.get('item', number)}",
        "prompt": _text(record.get("question", record.get("prompt", "")), None),
        "sides": [(name, _text(record[name], choices)) for name in SIDES if name in record],
    }


def _text(value: Any, choices: Any) -> str:
    """Return an answer as text: an index means that choice."""
    if isinstance(value, int) and isinstance(choices, list) and 0 <= value < len(choices):
        value = choices[value]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
