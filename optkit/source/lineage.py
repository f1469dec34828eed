"""The texts that shaped weights, as an artifact and every model made from it remember them.
They are names, and a sketch of what was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from optkit.source.texts import TextSource

SKETCH = "sketch"
LIMIT = 0.05
"""Share of different runs of eight words. Halves of one data set, or two, had at most 0.005 in
common; a tokenised edition of WikiText-2 with `<unk>` for its rare words has 0.56 in common with
the raw one."""


@dataclass(frozen=True)
class Reader:
    """How a step read its texts."""

    tokenizer: Path
    """A model directory."""
    data: Path | None
    trust_remote_code: bool = False


def with_sketches(texts: Iterable[Mapping[str, str]], stage: BaseModel, reader: Reader) -> tuple[dict[str, str], ...]:
    """Return the identities of texts, each with a sketch of what a stage read of it.
    Those that no field names stay without.

    Raises SourceError if a text cannot be read any more.
    """
    from optkit.source.shingles import sketch

    read = list(_texts_in(stage))
    found = []
    for identity in texts:
        same = [
            text.passages(reader.tokenizer, reader.data, reader.trust_remote_code)
            for text in read
            if text.identity() == identity
        ]
        found.append({**identity, SKETCH: sketch(chain.from_iterable(same))} if same else dict(identity))
    return tuple(found)


def without_sketches(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stage's report for people, without the texts' sketches, which optkit.json has."""
    texts = [{key: value for key, value in text.items() if key != SKETCH} for text in report.get("calibrated_on", ())]
    return {**report, "calibrated_on": texts}


def shared_with(text: TextSource, passages: Sequence[str], lineage: Iterable[Mapping[str, str]]) -> str:
    """Return what is wrong with measuring on a text after these shaped the weights; else empty."""
    from optkit.source.shingles import common

    for earlier in lineage:
        name = f"{earlier['dataset']} ({earlier['split']})"
        if text.overlaps(earlier):
            return f"the model was calibrated on {name}"
        both = common(earlier.get(SKETCH, ""), passages)
        if both.of_text >= LIMIT:
            return f"{both.of_text:.0%} of it stands in {name}, which the model was calibrated on"
        if both.of_sketched >= LIMIT:
            return f"{both.of_sketched:.0%} of {name}, which the model was calibrated on, stands in it"
    return ""


def _texts_in(value: Any) -> Iterator[TextSource]:
    if isinstance(value, TextSource):
        yield value
    elif isinstance(value, BaseModel):
        yield from _texts_in(tuple(getattr(value, name) for name in type(value).model_fields))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _texts_in(each)
