"""The table of the zoo as HTML, and below it each refusal once, with the models that it concerns."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ZOO = Path(__file__).parent / "understand" / "models.json"
MARKS = {"same": "✓", "refused": "–", "late": "(–)", "crashed": "✗", "different": "✗", "mute": "✗"}
"""What the cells of the table show."""
FILTER = (
    "const sought = this.value.trim(); document.querySelectorAll('[data-models]').forEach(each =>"
    " each.hidden = !each.dataset.models.split(' ').some(name => name.includes(sought)))"
)


@dataclass
class Group:
    """Where a message was said, but for what differs from model to model."""

    models: dict[str, None] = field(default_factory=dict)
    stages: dict[str, None] = field(default_factory=dict)


def zoo_table() -> str:
    """Return a row for each architecture, and the messages by their numbers, those of most models first."""
    found = json.loads(ZOO.read_text(encoding="utf-8"))
    rows = {kind: row for kind, row in found["rows"].items() if all(mark != "none" for mark, _ in row.values())}
    stages = list(dict.fromkeys(stage for row in rows.values() for stage in row))
    groups: defaultdict[int, Group] = defaultdict(Group)
    for kind, row in rows.items():
        for stage, (_, reason) in row.items():
            if reason is not None:
                groups[reason].models[kind] = groups[reason].stages[stage] = None
    order = sorted(groups, key=lambda reason: -len(groups[reason].models))
    numbers = {reason: number for number, reason in enumerate(order, 1)}
    whole = {kind: {stage: row.get(stage, ("", None)) for stage in stages} for kind, row in rows.items()}
    body = "".join(_row(kind, row, numbers) for kind, row in whole.items())
    head = "".join(f"<th>{escape(stage)}</th>" for stage in stages)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"<p>The newest cells were made with {versions}.</p>\n"
        f'<p><label>Show only <input type="search" placeholder="qwen3" oninput="{escape(FILTER)}"></label></p>\n'
        f'<div class="zoo"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>\n'
        f"<ol>{''.join(_item(found['reasons'][reason], groups[reason], numbers[reason]) for reason in order)}</ol>"
    )


def _row(kind: str, row: Mapping[str, tuple[str, int | None]], numbers: Mapping[int, int]) -> str:
    shown = (_cell(mark, None if reason is None else numbers[reason]) for mark, reason in row.values())
    return f'<tr data-models="{escape(kind)}"><th>{escape(kind)}</th>{"".join(shown)}</tr>'


def _cell(mark: str, number: int | None) -> str:
    return f"<td>{MARKS.get(mark, mark)}{f'<a href=#why-{number}>{number}</a>' if number else ''}</td>"


def _item(reason: tuple[str, str, str], group: Group, number: int) -> str:
    """Return a message as it was said of a model, with the stages and models that it is of."""
    _, said, kind = reason
    models, stages = " ".join(group.models), ", ".join(group.stages)
    example = f", e.g. of {kind}" if len(group.models) > 1 else ""
    return (
        f'<li id="why-{number}" data-models="{escape(models)}">{escape(said)}'
        f"<br><small>{escape(stages)}{example}. Models: {escape(', '.join(group.models))}</small></li>"
    )
