"""The texts that shaped weights, as an artifact and every model made from it remember them.
They are names, and a sketch of what was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from optkit.source.models import ModelSource
from optkit.source.texts import TextSource

SKETCH = "sketch"
DRAFT = "draft"
"""Key of a text that shaped not the weights, but the draft that a setting names."""
LIMIT = 0.05
"""Share of different runs of eight words. Halves of one data set, or two, had at most 0.005 in
common; a tokenised edition of WikiText-2 with `<unk>` for its rare words has 0.56 in common with
the raw one."""


Part = TypeVar("Part", bound=BaseModel)


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

    read = list(texts_in(stage))
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
        who = "draft" if DRAFT in earlier else "model"
        if text.overlaps(earlier):
            return f"the {who} was calibrated on {name}"
        both = common(earlier.get(SKETCH, ""), passages)
        if both.of_text >= LIMIT:
            return f"{both.of_text:.0%} of it stands in {name}, which the {who} was calibrated on"
        if both.of_sketched >= LIMIT:
            return f"{both.of_sketched:.0%} of {name}, which the {who} was calibrated on, stands in it"
    return ""


def models_in(value: Any) -> Iterator[ModelSource]:
    """Return the models that a stage's or a setting's fields name: teachers, drafts."""
    return _parts_of(value, ModelSource)


def texts_in(value: Any) -> Iterator[TextSource]:
    """Return the texts that a stage or an eval reads."""
    return _parts_of(value, TextSource)


def _parts_of(value: Any, kind: type[Part]) -> Iterator[Part]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, BaseModel):
        yield from _parts_of(tuple(getattr(value, name) for name in type(value).model_fields), kind)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _parts_of(each, kind)
