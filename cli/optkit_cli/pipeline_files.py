"""What a pipeline reads of a run beside its exit status: JUnit's XML, OpenMetrics, and what GitHub
shows of a job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from optkit.errors import MissingPackageError, UsageError
from optkit_cli.options import FILE, all_of

if TYPE_CHECKING:
    from optkit.recipe.yaml_places import Place
    from optkit.scorecard import Scorecard

pipeline_options = all_of(
    click.option("--junit", metavar="FILE", type=FILE, help="Write the gates as tests in JUnit's XML."),
    click.option(
        "--metrics", metavar="FILE", type=FILE, help="Write the numbers as OpenMetrics, for GitLab's metrics report."
    ),
)
LEVELS = {"FAIL": "error", "INCONCLUSIVE": "warning"}
"""Verdict of a gate -> how GitHub marks its line."""


@dataclass(frozen=True)
class PipelineFiles:
    """Where a pipeline wants to read of a run."""

    junit: Path | None = None
    metrics: Path | None = None

    def prepare(self) -> None:
        """Delete what an earlier run left there, before anything runs.
        Raises MissingPackageError, UsageError if a file cannot be written, or would be lost.
        """
        from importlib.util import find_spec

        from optkit_cli.written_files import refuse_other

        if self.junit and self.metrics and self.junit.resolve() == self.metrics.resolve():
            raise UsageError(f"{self.junit} is the file of --junit", where="--metrics", remedy="Name another file")
        wanted = (
            ("--junit", self.junit, "junitparser", "JUnit report", (b"<?xml", b"<testsuite")),
            ("--metrics", self.metrics, "prometheus_client", "OpenMetrics text", (b"# help", b"# type", b"# eof")),
        )
        for option, path, module, what, starts in wanted:
            if path is None:
                continue
            if find_spec(module) is None:
                raise MissingPackageError(module, where=option, install="optkit[ci]")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                refuse_other(path, option, what, *starts)
                if path.is_file() or not path.exists():  # a device or a pipe stays as it is
                    path.write_bytes(b"")
                    if not path.is_symlink():
                        path.unlink()
            except OSError as error:
                why = f"{path} cannot be written: {error.strerror}"
                raise UsageError(why, where=option, remedy="Name another file") from error

    def write(self, scorecard: Scorecard, places: Callable[[], Mapping[str, Place]]) -> None:
        """Write the files, and what GitHub reads if the run is a job there.
        `places` gives the places of the gates in the recipe.
        """
        from optkit_cli.written_files import write_named

        if self.junit:
            from optkit.scorecard.junit import to_junit

            write_named(self.junit, to_junit(scorecard))
        if self.metrics:
            from optkit.scorecard.openmetrics import to_openmetrics

            write_named(self.metrics, to_openmetrics(scorecard).encode("utf-8"))
        if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            _append_summary(Path(summary), scorecard)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for line in annotation_lines(scorecard, places()):
                print(line, file=sys.stderr)


def _append_summary(path: Path, scorecard: Scorecard) -> None:
    """Append the scorecard in Markdown, without the list of files, which are not there."""
    from optkit.scorecard import to_markdown

    text = to_markdown(scorecard.model_copy(update={"files": ()}))
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
    except OSError as error:
        why = f"the scorecard was not written: {error.strerror}"
        print(f"warning: $GITHUB_STEP_SUMMARY: {why}", file=sys.stderr)


def annotation_lines(scorecard: Scorecard, places: Mapping[str, Place]) -> list[str]:
    """Return GitHub's command for each gate that is not kept, at its line of the recipe.
    FAIL is an error, INCONCLUSIVE a warning.
    """
    from optkit.common.visible import visible
    from optkit.recipe.gates import parse_gate
    from optkit.scorecard.gate_lines import gate_lines

    known = {parse_gate(key, "> 0").key: place for key, place in places.items()}
    found = []
    for line in gate_lines(scorecard):
        if line.verdict not in LEVELS:
            continue
        place = known.get(line.key)
        at = (
            {"file": _inside(place.file), "line": str(place.line), "col": str(place.column)}
            if place and place.line
            else {}
        )
        fields = {**at, "title": visible(f"{line.row} {line.limit}")}
        properties = ",".join(f"{name}={_property(value)}" for name, value in fields.items())
        found.append(f"::{LEVELS[line.verdict]} {properties}::{_data(visible(f'{line.verdict}: {line.said}'))}")
    return found


def _inside(file: str) -> str:
    """Return a path as the repository has it, if the job's checkout holds it."""
    workspace, path = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd()).resolve(), Path(file).resolve()
    return str(path.relative_to(workspace)) if path.is_relative_to(workspace) else file


def _data(text: str) -> str:
    """Return a text as GitHub's commands escape it."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Return the value of a property as GitHub's commands escape it."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
