"""scorecard.md: the same record as scorecard.json, for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from optkit.common.byte_sizes import size_text
from optkit.common.markdown import fenced, markdown_table
from optkit.common.yaml_text import yaml_text
from optkit.scorecard.attribution import waterfall
from optkit.scorecard.loading import Loading, loading_cells, loading_columns, loading_notes
from optkit.scorecard.scorecard import FileLine, Scorecard, StepLine
from optkit.scorecard.summary import other_notes, to_act_on
from optkit.scorecard.table import NOTHING, footnotes, numbered, protocols, table_rows
from optkit.scorecard.training import training_line, trainings


def to_markdown(scorecard: Scorecard) -> str:
    """Return scorecard.md: verdict, table, what to act on, protocols and how it was made.
    Notes, environment and the recipe as resolved follow.
    """
    return as_page(sections(scorecard))


def as_page(parts: Mapping[str, str]) -> str:
    """Return a page of titles, each with its text; those without text are left out."""
    return "\n\n".join(f"{title}\n\n{text}" for title, text in parts.items() if text) + "\n"


def sections(scorecard: Scorecard) -> dict[str, str]:
    """Return title -> text of scorecard.md; empty texts for what there is nothing to say of."""
    rows = [
        (f"{row.metric} [{row.protocol}]", row.baseline, row.artifact, row.ratio, row.gate)
        for row in table_rows(scorecard)
    ]
    verdict = f"**{scorecard.verdict}**" if any(row.gates for row in scorecard.rows) else "No gates"
    found = scorecard.previous
    of_previous = f" Of previous: {found.name} of {found.created}, `{found.artifact_key[:12]}`." if found else ""
    return {
        f"# {scorecard.name}": f"{verdict} · {scorecard.created} · artifact `{scorecard.artifact_key[:12]}`",
        "## Numbers": f"{markdown_table(('metric', 'baseline', 'artifact', 'ratio [95%]', 'gate'), rows)}\n\n"
        "Baseline: the unmodified model, measured by the same protocol. ±: half of the 95% interval; "
        f"[ ]: its ends. [n]: protocol.{of_previous}"
        if rows
        else "Nothing was measured.",
        "## To act on": _bullets(to_act_on(scorecard)),
        "## Protocols": numbered(footnotes(protocols(scorecard))),
        "## Loading": _loading(scorecard.loading),
        "## Files": _files(scorecard.files),
        "## Steps": _steps(scorecard.steps),
        "## Training": _bullets([training_line(each) for each in trainings(scorecard.steps)]),
        "## What each stage added": steps.to_markdown() if (steps := waterfall(scorecard.attribution)) else "",
        "## Where the speed comes from": _speed(scorecard),
        "## Settings": _bullets(scorecard.settings),
        "## Notes": _bullets(other_notes(scorecard)),
        "## Environment": _bullets([f"{name}: {value}" for name, value in scorecard.environment.items()]),
        "## Recipe": fenced(yaml_text(scorecard.recipe), "yaml") if scorecard.recipe else "",
    }


def _speed(scorecard: Scorecard) -> str:
    table = waterfall(scorecard.speed)
    return f"{table.to_markdown()}\n\nsame engine: the unmodified weights, opened as the artifact is." if table else ""


def _steps(steps: tuple[StepLine, ...]) -> str:
    if not steps:
        return ""
    body = [
        (step.kind, f"{step.seconds:.1f}", "yes" if step.cached else "no", step.did or NOTHING, f"`{step.key[:12]}`")
        for step in steps
    ]
    return markdown_table(("step", "seconds", "from the store", "what it did", "key"), body)


def _files(files: tuple[FileLine, ...]) -> str:
    """Return the list of files, then those that a page can show."""
    lines = [f"[{each.path}]({each.path}): {each.media_type}, {size_text(each.size_bytes)}" for each in files]
    shown = [f"![{Path(each.path).stem}]({each.path})" for each in files if each.media_type.startswith("image/")]
    return "\n\n".join([*([_bullets(lines)] if lines else []), *shown])


def _loading(loading: tuple[Loading, ...]) -> str:
    if not loading:
        return ""
    columns = loading_columns(loading)
    table = markdown_table(columns, [loading_cells(each, columns) for each in loading])
    return f"{table}\n\n{_bullets(loading_notes(loading))}"


def _bullets(lines: list[str] | tuple[str, ...]) -> str:
    return "\n".join(f"- {line}" for line in lines)
