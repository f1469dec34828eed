"""A scorecard on the terminal. Short, it is the numbers that decide, what to act on and the verdict;
whole, it is also how the artifact was made, every number and its protocol, and which engines open it.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from optkit.recipe.gates import Verdict
from optkit.scorecard import (
    Loading,
    Measured,
    Row,
    Rung,
    Scorecard,
    StepLine,
    first_rows,
    footnotes,
    interval_text,
    loading_cells,
    loading_columns,
    loading_notes,
    other_notes,
    protocols,
    table_rows,
    to_act_on,
    training_line,
    trainings,
    value_text,
    waterfall,
)
from optkit_cli.progress import clock_text
from optkit_cli.tables import fits, grouped, indented, plain_table, spaced, verdict_text

RATIO_STYLES = {"better": "green", "worse": "", "": ""}
WIDEST_LABEL = 25
"""Characters of a label with its footnote; a longer one has the footnote below it."""
WIDEST_VALUE = 11
"""Characters of a value with its unit in the narrow table; a longer one has the unit below it."""
LONGEST_VERDICT = "INCONCLUSIVE"
"""Stands below its limit, so that the table fits into 100 columns."""


MOST_NOTES = 3


def short_scorecard(scorecard: Scorecard, directory: Path | None = None) -> list[RenderableType]:
    """Return what decides, top to bottom; `directory` is where the artifact lies."""
    rows, told = first_rows(scorecard.rows), to_act_on(scorecard)
    first = scorecard.model_copy(update={"rows": tuple(_shortened(row, scorecard.rows) for row in rows)})
    more = {
        "numbers": len(scorecard.rows) - len(rows),
        "warnings": len(told[MOST_NOTES:]),
        "notes": len(other_notes(scorecard)),
    }
    counted = [*(f"{count} {name[: -1 if count == 1 else None]}" for name, count in more.items() if count), "protocols"]
    place = (
        f"optkit show {shlex.quote(str(directory))} --verbose, or scorecard.html there" if directory else "--verbose"
    )
    return spaced(
        _title(scorecard),
        Numbers(first, protocols=False) if rows else Text("nothing was measured"),
        indented([*(("act on", note) for note in told[:MOST_NOTES]), ("more", f"{', '.join(counted)}: {place}")]),
        *loading_view(scorecard.loading),
        _closing(scorecard, directory),
    )


def _shortened(row: Measured, rows: Sequence[Measured]) -> Measured:
    """Return a row with the labels that tell it from others of its name, and with what gates judge."""
    alike = [each.metric.labels for each in rows if each.metric.name == row.metric.name]
    labels = {name: value for name, value in row.metric.labels.items() if any(its.get(name) != value for its in alike)}
    gated = {gate.of for gate in row.gates}
    metric = row.metric.model_copy(update={"labels": labels})
    return row.model_copy(update={"metric": metric, "beside": tuple(each for each in row.beside if each.of in gated)})


def whole_scorecard(scorecard: Scorecard, directory: Path | None = None) -> list[RenderableType]:
    """Return all of it, top to bottom; `directory` is where the artifact lies."""
    made = [(step.kind, _step(step)) for step in scorecard.steps] + [("setting", line) for line in scorecard.settings]
    previous = scorecard.previous
    earlier = f"{previous.name} of {previous.created}, {previous.artifact_key[:12]}" if previous else ""
    return spaced(
        _title(scorecard),
        indented(made),
        indented([("training", training_line(each)) for each in trainings(scorecard.steps)]),
        Numbers(scorecard) if scorecard.rows else Text("nothing was measured"),
        attribution_view(scorecard.attribution),
        attribution_view(scorecard.speed),
        indented([(f"[{number}]", line) for number, line in enumerate(footnotes(protocols(scorecard)), start=1)]),
        indented([("previous", earlier)] if earlier else []),
        indented([("act on", note) for note in to_act_on(scorecard)]),
        indented([("note", note) for note in other_notes(scorecard)]),
        indented([("file", each.path) for each in scorecard.files]),
        *loading_view(scorecard.loading),
        _closing(scorecard, directory),
    )


@dataclass(frozen=True)
class Numbers:
    """The table: a line for each number if the terminal is wide enough, else two."""

    scorecard: Scorecard
    protocols: bool = True
    """Whether labels name the footnotes of their protocols."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the wide table if it fits, else the narrow one."""
        wide = self._table(narrow=False)
        yield wide if fits(wide, console, options) else self._table(narrow=True)

    def _table(self, narrow: bool) -> Table:
        table = plain_table("", ">baseline", ">artifact", ">ratio or ± [95%]", "gate", space=1 if narrow else 2)
        verdicts = [gate.verdict for row in self.scorecard.rows for gate in row.gates]
        table.columns[-1].min_width = max(map(len, verdicts), default=0)
        lines = table_rows(self.scorecard)
        firsts = [index for index, line in enumerate(lines) if line.of == "baseline"]
        blocks = [lines[start:end] for start, end in pairwise([*firsts, len(lines)])]
        pairs = list(zip(self.scorecard.rows, blocks, strict=True))
        alone: list[tuple[str, tuple[Measured, list[Row]] | None]] = [(pair[1][0].metric, pair) for pair in pairs]
        for label, pair in grouped(pairs, metric=lambda pair: pair[1][0].metric) if self.protocols else alone:
            if pair is None:
                table.add_row(Text(label))
                continue
            measured, (first, *further) = pair
            table.add_row(
                _label(label, first) if self.protocols else Text(label), *_cells(measured, first, narrow=narrow)
            )
            for row in further:
                table.add_row(Text(f"    of {row.of}", style="dim"), *_cells(measured, row, narrow=narrow))
        return table


def _label(label: str, row: Row) -> Text:
    note = f"[{row.protocol}]"
    return Text.assemble(label, " " if len(label) + len(note) < WIDEST_LABEL else "\n", (note, "dim"))


def _cells(measured: Measured, row: Row, *, narrow: bool) -> tuple[Text, ...]:
    gap = "\n" if narrow else " "
    metric, first = measured.metric, row.of == "baseline"
    other = measured.baseline if first else next((each.metric for each in measured.beside if each.of == row.of), None)
    values = [value_text(other) if other else "-", value_text(metric) if first else ""]
    if narrow:
        values = [value if len(value) <= WIDEST_VALUE else value.replace(" ", gap) for value in values]
    uncertain = Text("-")
    if row.ratio != "-":
        uncertain = Text(row.ratio.replace(" [", f"{gap}["), style=RATIO_STYLES[row.change])
    elif metric.interval and first:
        uncertain = Text(interval_text(metric.value, metric.unit, metric.interval))
    gates = [
        Text.assemble(
            gate.limit,
            "\n" if gate.verdict == LONGEST_VERDICT else gap,
            verdict_text(gate.verdict),
            f"\n{gate.why}" if gate.why else "",
        )
        for gate in row.gates
    ]
    return *map(Text, values), uncertain, Text("\n").join(gates)


def _title(scorecard: Scorecard) -> Text:
    about = " · ".join(part for part in (scorecard.model_name, scorecard.device) if part)
    return Text.assemble((scorecard.name, "bold"), (f"  {about}", "dim"))


def _step(step: StepLine) -> str:
    said = [step.changed, step.skipped]
    said.append(
        f"from the store (it took {clock_text(step.seconds)})" if step.cached else f"in {clock_text(step.seconds)}"
    )
    return ", ".join(part for part in said if part)


def _closing(scorecard: Scorecard, directory: Path | None) -> Text:
    gates = [gate for row in scorecard.rows for gate in row.gates]
    place = f"  {directory}" if directory else ""
    if not gates:
        return Text.assemble(("no gates", "dim"), place)
    counts = Counter(gate.verdict for gate in gates)
    skipped = f", {counts[Verdict.SKIPPED]} skipped" if counts[Verdict.SKIPPED] else ""
    kept = f"  {counts[Verdict.PASS]} of {len(gates) - counts[Verdict.SKIPPED]} gates pass{skipped}"
    closing = Text.assemble(verdict_text(scorecard.verdict), kept, place)
    if unclear := _unclear_timings(scorecard):
        closing.append(f"\ntoo noisy to tell: {', '.join(unclear)}; run again with --retime on a quiet machine")
    return closing


def _unclear_timings(scorecard: Scorecard) -> list[str]:
    """Name the timings whose gate is open; repeats on an idle machine may close it."""
    timings = [row for row in scorecard.rows if row.metric.pairing in {"paired_turns", "independent"}]
    return list(
        dict.fromkeys(
            gate.key for row in timings for gate in row.gates if gate.verdict == "INCONCLUSIVE" and not gate.why
        )
    )


def attribution_view(rungs: Sequence[Rung]) -> RenderableType | None:
    """Return the table, None if there is nothing to tell apart."""
    found = waterfall(rungs)
    if found is None:
        return None
    first, *others = found.columns
    return plain_table(first, *(f">{name}" for name in others), rows=found.rows)


STYLES = {"agrees": "green", "disagrees": "bold red", "refused": "bold red", "skipped": "dim"}


def loading_view(loading: Sequence[Loading]) -> list[RenderableType]:
    """Return the table and what to say below it; nothing if the artifact was not verified."""
    if not loading:
        return []
    columns = loading_columns(loading)
    first, second, *numbers = columns
    table = plain_table(first, second, *(f">{name}" for name in numbers))
    for each in loading:
        engine, loads, *cells = loading_cells(each, columns)
        table.add_row(engine, Text(loads, style=STYLES[each.verdict]), *cells)
    notes = indented([("loading", note) for note in loading_notes(loading)])
    return [table] if notes is None else [table, notes]
