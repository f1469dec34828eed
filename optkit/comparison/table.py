"""A comparison as lines of text: the terminal, the Markdown and the CSV are drawn from the same ones."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from optkit.common.markdown import markdown_table
from optkit.comparison.choice import difference_text
from optkit.comparison.result import Cell, Column, Comparison, Entry, Floor, Group, Relation
from optkit.recipe.gates import Verdict, parse_gate
from optkit.scorecard.numbers import format_ratio, format_value, interval_text, significant
from optkit.scorecard.scorecard import GateResult
from optkit.scorecard.summary import KEPT
from optkit.scorecard.table import FAILED, NOTHING, footnotes, numbered

EXTRAS = ("kl_divergence", "top1_agreement", "prefill_tokens_per_s", "peak_memory_bytes")
"""Metrics that are shown beside the axes if there is room, and those of tasks before them."""
UNMODIFIED = "unmodified"
MOST_WARNINGS = 10
MOST_TIED = 3
PICK, KNEE = "pick", "knee"
"""How an entry stands."""
CELL_FIELDS = ("value", "low", "high", "ratio", "ratio_low", "ratio_high", "change", "failure")


@dataclass(frozen=True)
class CellText:
    """One number; parts are empty if they are not known."""

    value: str
    ratio: str = ""
    interval: str = ""
    """Of the ratio; of the value if there is no ratio. Of the unmodified model's size the bits per weight."""
    change: Relation | None = None

    def __str__(self) -> str:
        return " ".join(part for part in (self.value, self.ratio, self.interval) if part)


def field_text(value: object) -> str:
    """Return a recipe's value as its YAML says it, digests by their first digits."""
    return short_digests(value if isinstance(value, str) else json.dumps(value))


def short_digests(text: str) -> str:
    """Return a text with the first digits of each commit and SHA-256 in it."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28,52}\b", r"\1", text)


def shown_columns(comparison: Comparison, group: Group) -> list[Column]:
    """Return the axes of a group, then what else is worth a column, the most asked for first."""
    held = {cell.column for entry in comparison.members(group) for cell in entry.cells}
    columns = [column for column in comparison.columns if column.key in held]
    extras = [
        column
        for column in columns
        if column.key not in group.axes
        and (column.name in EXTRAS or (column.role == "quality" and column.unit in ("perplexity", "fraction")))
    ]
    extras.sort(key=lambda column: EXTRAS.index(column.name) if column.name in EXTRAS else -1)
    return [*(comparison.column(key) for key in group.axes), *extras]


def cell_text(cell: Cell | None, column: Column) -> CellText:
    """Return a number with its ratio to the unmodified model."""
    if cell is None or cell.value is None:
        return CellText(NOTHING if cell is None else FAILED)
    value = format_value(cell.value, column.unit)
    if cell.ratio is None:
        return CellText(value, "", interval_text(cell.value, column.unit, cell.interval), cell.change)
    ratio, _, interval = format_ratio(cell.ratio, cell.ratio_interval).partition(" ")
    return CellText(value, ratio, interval, cell.change)


def of_one_model(entries: Sequence[Entry]) -> bool:
    """Say whether all ratios are to one unmodified model."""
    return len({entry.model for entry in entries}) == 1


def unmodified_cells(comparison: Comparison, group: Group, columns: list[Column]) -> list[CellText] | None:
    """Return the line of the unmodified model, None if there are several or nothing is known of it.
    A timing is the mean of all measurements of it.
    """
    entries = comparison.members(group)
    if not of_one_model(entries):
        return None

    def mean(key: str) -> float | None:
        known = [cell.baseline for entry in entries if (cell := entry.cell(key)) and cell.baseline is not None]
        return sum(known) / len(known) if known else None

    found = []
    for column in columns:
        value = mean(column.key)
        bits = mean("bits_per_weight") if column.unit == "bytes" and column.role == "size" else None
        text = NOTHING if value is None else format_value(value, column.unit)
        found.append(CellText(text, "", f"{bits:.3g} bits per weight" if bits else ""))
    return found if any(each.value != NOTHING for each in found) else None


def bests_text(comparison: Comparison, group: Group) -> str:
    """Return which to take if one of the axes alone counts; empty if it is always the pick alone."""
    if set(group.bests.values()) <= {(group.pick,)}:
        return ""
    return "; ".join(_bests(comparison.column(key), labels) for key, labels in group.bests.items())


def _bests(column: Column, labels: Sequence[str]) -> str:
    if len(labels) == 1:
        return f"{column.title} {labels[0]}"
    if len(labels) <= MOST_TIED:
        return f"{column.title} {', '.join(labels)} tied"
    return f"{column.title} {len(labels)} tied, {'highest' if column.higher_is_better else 'lowest'} {labels[0]}"


def standing(entry: Entry, named: Callable[[str], str] = str) -> str:
    """Return where a scorecard stands: the pick, the knee, on the front, or behind another that is `named`."""
    if entry.pick:
        return PICK
    if entry.knee:
        return KNEE
    if entry.front:
        return "front"
    return f"behind {named(entry.dominated_by[0])}" if entry.dominated_by else NOTHING


def not_kept(limits: Sequence[GateResult]) -> str:
    """Return the metrics whose limits are not kept, or not surely; empty if all are."""
    return ", ".join(dict.fromkeys(each.key for each in limits if each.verdict not in KEPT))


def beside_first(comparison: Comparison, entry: Entry) -> str:
    """Return what an entry is to the pick of its group, in words; empty for the pick itself."""
    told = [
        difference_text(comparison.column(each.axis), each) for each in entry.differences if each.relation != "none"
    ]
    same = [comparison.column(each.axis).title for each in entry.differences if each.relation == "none"]
    return ", ".join([*told, *([f"no measurable difference in {' and '.join(same)}"] if same else [])])


def compared_with(group: Group) -> str:
    """Return whom the differences of a group are to."""
    return group.pick or group.knee or group.entries[0]


def floor_text(floor: Floor, column: Column) -> str:
    """Return e.g. `perplexity: 0.12% (batch 8, attention eager)`."""
    size = f"{significant(floor.value * 100, 2)}%" if floor.relative else format_value(floor.value, column.unit)
    return f"{column.title}: {size} ({floor.source})"


def heading(column: Column) -> str:
    """Return the head of a column, the arrow pointing to what is better."""
    return f"{column.title} {'↑' if column.higher_is_better else '↓'}"


def limits(comparison: Comparison, group: Group, column: Column) -> list[str]:
    """Return the limits to a column, e.g. `gate <= 1.10x`: those of recipes, and what is required."""
    entries = comparison.members(group)
    asked = [("gate", gate) for entry in entries for gate in entry.gates]
    asked += [("required", gate) for entry in entries[:1] for gate in entry.requirements]
    found = dict.fromkeys((word, gate.key, gate.limit, gate.of) for word, gate in asked)
    parsed = ((word, parse_gate(key, limit)) for word, key, limit, _ in found)
    return [
        f"{word} {gate.text}"
        for word, gate in parsed
        if gate.name == column.name and gate.labels.items() <= column.labels.items()
    ]


def all_shown(comparison: Comparison) -> list[Column]:
    """Return the columns that the tables of all groups show."""
    return [column for group in comparison.groups for column in shown_columns(comparison, group)]


def protocol_lines(comparison: Comparison) -> list[str]:
    """Return a footnote for each protocol, with the columns that were measured by it before it."""
    titles: dict[str, dict[str, None]] = {}
    for column in all_shown(comparison):
        titles.setdefault(column.protocol, {})[column.title] = None
    return [f"{', '.join(its)}: {line}" for its, line in zip(titles.values(), footnotes([*titles]), strict=True)]


def legend(comparison: Comparison, *groups: Group) -> str:
    """Return what the words and signs of the tables of groups mean, each sentence once."""
    return " ".join(dict.fromkeys(line for group in groups for line in _legend(comparison, group) if line))


def _legend(comparison: Comparison, group: Group) -> list[str]:
    *most, last = (comparison.column(key).title for key in group.axes)
    axes = f"{', '.join(most)} and {last}" if most else last
    entries = comparison.members(group)
    passing = any(entry.passes is Verdict.PASS for entry in entries)
    near = f"of {'those that pass' if passing else 'all, since none surely passes'}, the nearest to the best of each"
    standings = {standing(entry) for entry in entries}
    pick = f"Pick: of those that pass, the best by {comparison.best}." if comparison.best else f"Pick: {near}."
    return [
        f"x: ratio to {'the' if of_one_model(entries) else 'its own'} unmodified model, behind it its 95% interval. "
        "↓: less is better, ↑: more.",
        f"Behind: another is at least as good in {axes} and measurably better in one; the others are the front."
        if len(group.entries) > 1
        else "",
        pick if PICK in standings else "",
        f"Knee: {near}." if KNEE in standings else "",
    ]


def to_markdown(comparison: Comparison) -> str:
    """Return the tables of all groups, the reasons, the noise floor and the protocols."""
    return "\n\n".join(part for part in _parts(comparison) if part) + "\n"


def _parts(comparison: Comparison) -> Iterator[str]:
    required = bool(comparison.require)
    several = len(comparison.groups) > 1
    for index, group in enumerate(comparison.groups):
        columns = shown_columns(comparison, group)
        heads = ("", "stands", "gates", *(("required",) if required else ()), *map(heading, columns))
        body = []
        if unmodified := unmodified_cells(comparison, group, columns):
            body.append((UNMODIFIED, "", "", *(("",) if required else ()), *map(str, unmodified)))
        for entry in comparison.members(group):
            name = f"**{entry.label}**" if entry.pick else entry.label
            gates = f"{entry.verdict} {not_kept(entry.gates)}".strip() if entry.gated else NOTHING
            meets = (f"{entry.meets} {not_kept(entry.requirements)}".strip(),) if required else ()
            cells = [str(cell_text(entry.cell(column.key), column)) for column in columns]
            body.append((name, standing(entry), gates, *meets, *cells))
        if several:
            yield f"### Group {index + 1}" + (f"\n\nDiffers: {'; '.join(group.differs)}." if group.differs else "")
        yield markdown_table(heads, body)
        yield f"{group.why}." if group.why else ""
    yield "To act on\n\n" + "\n".join(f"- {line}" for line in warned) if (warned := warning_lines(comparison)) else ""
    lines = [floor_text(floor, comparison.column(floor.column)) for floor in comparison.floors]
    yield "Noise floor\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""
    yield "\n".join(f"- {line}" for line in [*comparison.notes, *left_out_lines(comparison)])
    yield legend(comparison, *comparison.groups)
    protocols = protocol_lines(comparison)
    yield f"Protocols\n\n{numbered(protocols)}" if protocols else ""


def left_out_lines(comparison: Comparison) -> list[str]:
    """Return a line for each file that could not be compared."""
    return [f"left out: {each.place}: {each.why}" for each in comparison.left_out]


def warning_lines(comparison: Comparison) -> list[str]:
    """Return what asks someone to act, the most common first, each with who says so."""
    of = len(comparison.entries)
    lines = [
        f"{each.entries[0]}: {each.text}"
        if len(each.entries) == 1
        else f"{each.text} ({len(each.entries)} of {of} artifacts)"
        for each in comparison.warnings
    ]
    more = len(lines) - MOST_WARNINGS
    return [*lines[:MOST_WARNINGS], f"{more} more, in --json"] if more > 0 else lines


def to_csv(comparison: Comparison) -> str:
    """Return a line for each scorecard, with all that is known of it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = ("label", "place", "model", "device", "group", "rank", "stands", "front", "verdict", "meets")
    keys = [column.key for column in comparison.columns]
    writer.writerow([*heads, *(f"{key}.{field}" for key in keys for field in CELL_FIELDS)])
    for entry in comparison.entries:
        about = (entry.label, entry.place, entry.model, entry.device, entry.group, entry.rank, standing(entry))
        cells = {cell.column: cell for cell in entry.cells}
        numbers = [value for key in keys for value in _values(cells.get(key))]
        writer.writerow([*about, entry.front, entry.verdict, entry.meets, *numbers])
    return text.getvalue()


def _values(cell: Cell | None) -> tuple[object, ...]:
    if cell is None:
        return ("",) * len(CELL_FIELDS)
    low, high = cell.interval or ("", "")
    ratio_low, ratio_high = cell.ratio_interval or ("", "")
    return cell.value, low, high, cell.ratio, ratio_low, ratio_high, cell.change, cell.failure
