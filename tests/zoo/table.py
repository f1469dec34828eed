"""The table of the zoo on disk, docs/understand/models.json: each refusal stands there once."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, Self

from tests.zoo.stages import STAGES

TABLE = Path(__file__).parents[2] / "docs" / "understand" / "models.json"
VERSIONS = ("transformers", "torch", "compressed-tensors", "bitsandbytes")
GAP = "…"
OWN = re.compile(
    r"(/store/drafts/|/model\b|MODEL\b)\S*|\([^()]*, \.\.\.\)|\[[^\]]*\]|`?[\w*]+(\.[\w*]+){2,}`?"
    r"|\b[A-Z]\w+(For[A-Z]\w+|Model|LMHead\w*)\b|\b\d+([.,]\d+)*\b"
)
"""What of a message is of one model: places, layers, shapes, classes and numbers."""


@dataclass
class Table:
    """Model type -> column -> mark and template of what was said; template -> an example and its model type."""

    rows: dict[str, dict[str, tuple[str, str]]]
    reasons: dict[str, tuple[str, str]]

    @classmethod
    def read(cls) -> Self:
        """Return the table on disk; an empty one if there is none."""
        said = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {"reasons": [], "rows": {}}
        templates = [each[0] for each in said["reasons"]]
        rows = {
            kind: {stage: (mark, "" if number is None else templates[number]) for stage, (mark, number) in row.items()}
            for kind, row in said["rows"].items()
        }
        return cls(rows, {text: (example, kind) for text, example, kind in said["reasons"]})

    def add(self, kind: str, row: Mapping[str, tuple[str, str]]) -> None:
        """Put cells, each a mark and what was said, in the place of those that are there."""
        cells = {}
        for stage, (mark, said) in row.items():
            cells[stage] = mark, template(kind, stage, said)
            if said:
                self.reasons.setdefault(cells[stage][1], (said, kind))
        both = {**self.rows.get(kind, {}), **cells}
        self.rows[kind] = {stage: both[stage] for stage in STAGES if stage in both}

    def write(self) -> None:
        """Write it, without reasons that no cell has any more."""
        used = sorted({text for row in self.rows.values() for _, text in row.values() if text})
        numbers = {text: number for number, text in enumerate(used)}
        rows = {
            kind: {stage: [mark, numbers.get(text)] for stage, (mark, text) in row.items()}
            for kind, row in sorted(self.rows.items())
        }
        versions = {"python": python_version()} | {name: version(name) for name in VERSIONS}
        reasons = (_line([text, *self.reasons[text]]) for text in used)
        parts = {"versions": _line(versions), "reasons": _lines(reasons, "[]")}
        parts["rows"] = _lines((f"{_line(kind)}: {_line(row)}" for kind, row in rows.items()), "{}")
        TABLE.write_text(
            _lines((f"{_line(name)}: {part}" for name, part in parts.items()), "{}") + "\n", encoding="utf-8"
        )


def template(kind: str, stage: str, said: str) -> str:
    """Return a message without what is of one model or stage alone."""
    place = re.match(r"\w+(?=[.:])", said)
    words = "|".join(map(re.escape, (kind, place[0] if place else stage.partition(" ")[0])))
    text = OWN.sub(GAP, re.sub(rf"(?<![\w-])({words})(?![\w-])", GAP, said))
    return re.sub(rf"{GAP}((,| or| x| of| and|;|:)* ?{GAP})+", GAP, text)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _lines(lines: Iterable[str], brackets: str) -> str:
    """Return JSON with an entry on each line, so that a changed row is a changed line."""
    joined = ",\n".join(lines)
    return f"{brackets[0]}\n{joined}\n{brackets[1]}"
