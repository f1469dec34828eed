"""The page of what lies at some places: of one scorecard, or of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optkit.common.garbage import uncollected
from optkit.comparison import compare_scorecards
from optkit.comparison.reading import read_scorecards
from optkit.page.comparison_page import comparison_page
from optkit.page.scorecard_page import scorecard_page


@dataclass(frozen=True)
class Report:
    """A page and what it is about."""

    html: str
    scorecards: int
    picks: tuple[str, ...]
    """Which to take, one for each group that has an answer."""
    exit_status: int
    """3 if none meets what is required, 4 if one may."""


def report(
    places: Sequence[Path | str], *, require: Sequence[str] = (), best: str | None = None, axes: Sequence[str] = ()
) -> Report:
    """Return the page of artifacts, scorecard.json files and what lies below directories.
    One scorecard has the page that lies beside it; several are compared, as `compare` does it.

    Raises ArtifactError for what cannot be read, UsageError for an unknown metric.
    """
    with uncollected():
        return _report([Path(place) for place in places], require, best, axes)


def _report(places: Sequence[Path], require: Sequence[str], best: str | None, axes: Sequence[str]) -> Report:
    found = read_scorecards(places)
    comparison = compare_scorecards(
        found.cards, require=require, best=best, axes=axes, left_out=found.left_out, notes=found.notes
    )
    if len(found.cards) == 1 and not (require or found.left_out):
        place, card = found.cards[0]
        return Report(scorecard_page(card, place if place.is_dir() else place.parent), 1, (), 0)
    cards = {str(place): card for place, card in found.cards}
    picks = {entry.label: cards[entry.place] for entry in comparison.entries if entry.pick}
    return Report(comparison_page(comparison, picks), len(found.cards), tuple(picks), comparison.exit_status)
