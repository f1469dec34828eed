"""Read a data set of the hub through the package `datasets`, at one commit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from optkit.errors import SourceError, first_line, needing
from optkit.source.hub import HubRepo, without_bars

FIRST_ROWS = 10_000
"""Rows that are read of a data set that is streamed: enough to calibrate and to measure on,
whatever its size.
"""
WHOLE = ("Salesforce/wikitext",)
"""Data sets that are read whole, because their protocols ask for the whole text; the others are
streamed from the start.
"""


def read_hub_rows(
    repo: HubRepo,
    name: str,
    split: str,
    revision: str | None,
    where: str,
    take: Callable[[dict[str, Any]], Any],
    most: int = FIRST_ROWS,
) -> list[Any]:
    """Return what is taken of the rows of a split, images as the bytes of their files.
    Of data sets outside `WHOLE` only the first `most` rows are read.

    Raises SourceError for an unknown configuration, split or field, MissingPackageError if
    `datasets` is not installed.
    """
    with needing("datasets", where, "optkit[hub]"):
        import datasets
        from datasets.exceptions import DatasetsError
        from huggingface_hub import utils
    identifier, _, configuration = name.partition(":")
    commit = repo.commit(revision)
    with without_bars(utils), without_bars(datasets):
        try:
            rows = datasets.load_dataset(
                identifier, configuration or None, split=split, revision=commit, streaming=identifier not in WHOLE
            )
            return [take(row) for row in (rows if identifier in WHOLE else islice(rows.decode(False), most))]
        except (OSError, ValueError, LookupError, DatasetsError) as error:
            raise SourceError(
                "the data set cannot be read",
                where=where,
                why=first_line(error),
                remedy="Check split and configuration (org/name:configuration) at "
                f"https://huggingface.co/datasets/{identifier}",
            ) from error
