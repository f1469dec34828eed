"""The table of the zoo as HTML, and below it each refusal once, with the models that it concerns."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ZOO = Path(__file__).parent / "understand" / "models.json"
MARKS = {"same": "✓", "refused": "–", "late": "(–)", "crashed": "✗", "different": "✗", "mute": "✗"}
"""What the cells of the table show."""
GAP = "…"
OWN = re.compile(
    r"(/store/drafts/|/model\b|MODEL\b)\S*|\([^()]*, \.\.\.\)|\[[^\]]*\]|`?[\w*]+(\.[\w*]+){2,}`?"
    r"|\b[A-Z]\w+(For[A-Z]\w+|Model|LMHead\w*)\b|\b\d+([.,]\d+)*\b"
)
"""What of a message is of one model: places, layers, shapes, classes and numbers."""
FILTER = (
    "const sought = this.value.trim(); document.querySelectorAll('[data-models]').forEach(each =>"
    " each.hidden = !each.dataset.models.split(' ').some(name => name.includes(sought)))"
)
Rows = Mapping[str, Mapping[str, tuple[str, str]]]
"""Model type -> column -> mark and message."""


@dataclass
class Group:
    """Messages that differ in what is of one model alone."""

    said: dict[str, None] = field(default_factory=dict)
    models: dict[str, None] = field(default_factory=dict)
    stages: dict[str, None] = field(default_factory=dict)


def zoo_table() -> str:
    """Return a row for each architecture, and the groups of messages by their numbers."""
    found = json.loads(ZOO.read_text(encoding="utf-8"))
    said = [*found["reasons"], ""]
    cells = {
        kind: {stage: (mark, said[-1 if number is None else number]) for stage, (mark, number) in row.items()}
        for kind, row in found["rows"].items()
    }
    rows = {kind: row for kind, row in cells.items() if all(mark != "none" for mark, _ in row.values())}
    stages = list(dict.fromkeys(stage for row in rows.values() for stage in row))
    groups = grouped(rows)
    numbers = {template: number for number, template in enumerate(groups, 1)}
    whole = {kind: {stage: row.get(stage, ("", "")) for stage in stages} for kind, row in rows.items()}
    body = "".join(_row(kind, row, numbers) for kind, row in whole.items())
    head = "".join(f"<th>{escape(stage)}</th>" for stage in stages)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"<p>The newest cells were made with {versions}.</p>\n"
        f'<p><label>Show only <input type="search" placeholder="qwen3" oninput="{escape(FILTER)}"></label></p>\n'
        f'<div class="zoo"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>\n'
        f"<ol>{''.join(map(_item, groups.values(), numbers.values()))}</ol>"
    )


def grouped(rows: Rows) -> dict[str, Group]:
    """Return template -> its messages, those of most models first."""
    groups: defaultdict[str, Group] = defaultdict(Group)
    for kind, row in rows.items():
        for stage, (_, said) in row.items():
            if said:
                group = groups[template(kind, stage, said)]
                group.said[said] = group.models[kind] = group.stages[stage] = None
    return dict(sorted(groups.items(), key=lambda item: -len(item[1].models)))


def template(kind: str, stage: str, said: str) -> str:
    """Return a message without what is of one model or stage alone."""
    place = re.match(r"\w+(?=[.:])", said)
    words = "|".join(map(re.escape, (kind, place[0] if place else stage.partition(" ")[0])))
    text = OWN.sub(GAP, re.sub(rf"(?<![\w-])({words})(?![\w-])", GAP, said))
    return re.sub(rf"{GAP}((,| or| x| of| and|;|:)* ?{GAP})+", GAP, text)


def _row(kind: str, row: Mapping[str, tuple[str, str]], numbers: Mapping[str, int]) -> str:
    shown = (_cell(mark, numbers[template(kind, stage, said)] if said else None) for stage, (mark, said) in row.items())
    return f'<tr data-models="{escape(kind)}"><th>{escape(kind)}</th>{"".join(shown)}</tr>'


def _cell(mark: str, number: int | None) -> str:
    return f"<td>{MARKS.get(mark, mark)}{f'<a href=#why-{number}>{number}</a>' if number else ''}</td>"


def _item(group: Group, number: int) -> str:
    """Return a message as it is, or one of several, with the stages and models that it is of."""
    models, stages = " ".join(group.models), ", ".join(group.stages)
    example = f", e.g. of {next(iter(group.models))}" if len(group.said) > 1 else ""
    return (
        f'<li id="why-{number}" data-models="{escape(models)}">{escape(next(iter(group.said)))}'
        f"<br><small>{escape(stages)}{example}. Models: {escape(', '.join(group.models))}</small></li>"
    )
