"""The table of the zoo on disk, docs/understand/models.json, and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from tests.zoo.stages import STAGES

TABLE = Path(__file__).parents[2] / "docs" / "understand" / "models.json"
VERSIONS = ("transformers", "torch", "compressed-tensors", "bitsandbytes")


@dataclass
class Table:
    """Model type -> column -> mark and what was said."""

    rows: dict[str, dict[str, tuple[str, str]]]

    @classmethod
    def read(cls) -> Table:
        """Return the table on disk; an empty one if there is none."""
        said = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {"reasons": [], "rows": {}}
        reasons = said["reasons"]
        return cls(
            {
                kind: {
                    stage: (mark, reasons[number] if number is not None else "")
                    for stage, (mark, number) in row.items()
                }
                for kind, row in said["rows"].items()
            }
        )

    def add(self, kind: str, row: Mapping[str, tuple[str, str]]) -> None:
        """Put cells in the place of those that are there."""
        old = self.rows.get(kind, {})
        both = {**old, **row}
        self.rows[kind] = {stage: both[stage] for stage in STAGES if stage in both}

    def write(self) -> None:
        """Write it with each reason once."""
        reasons = sorted({said for row in self.rows.values() for _, said in row.values() if said})
        numbers = {said: number for number, said in enumerate(reasons)}
        rows = {
            kind: {stage: [mark, numbers.get(said)] for stage, (mark, said) in row.items()}
            for kind, row in sorted(self.rows.items())
        }
        versions = {"python": python_version()} | {name: version(name) for name in VERSIONS}
        parts = {"versions": _line(versions), "reasons": _lines(map(_line, reasons), "[]")}
        parts["rows"] = _lines((f"{_line(kind)}: {_line(row)}" for kind, row in rows.items()), "{}")
        TABLE.write_text(
            _lines((f"{_line(name)}: {part}" for name, part in parts.items()), "{}") + "\n", encoding="utf-8"
        )


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _lines(lines: Iterable[str], brackets: str) -> str:
    """Return JSON with an entry on each line, so that a changed row is a changed line."""
    joined = ",\n".join(lines)
    return f"{brackets[0]}\n{joined}\n{brackets[1]}"
