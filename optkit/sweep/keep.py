"""`--keep best:3`: the weights of dominated artifacts go, their scorecards stay."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from optkit.artifact import read_artifact
from optkit.comparison import compare
from optkit.errors import UsageError
from optkit.plan import Plan
from optkit.store.store import Store

WEIGHTS = (".safetensors", ".onnx", ".data")


def parse_keep(text: str) -> int:
    """Return how many artifacts at least keep their weights; raises UsageError."""
    found = re.fullmatch(r"best:([1-9]\d*)", text)
    if not found:
        raise UsageError(f"'{text}' is not best:N", where="--keep", remedy="Write --keep best:3")
    return int(found[1])


def to_delete(places: Sequence[Path], count: int, axes: Sequence[str] = ()) -> list[str]:
    """Return the names of the artifacts that others dominate and that are not among the best `count`.
    What cannot be ranked with the others stays. Raises what `compare` does.
    """
    entries = compare(places, axes=axes).entries
    return [
        Path(each.place).name
        for each in entries
        if each.rank is not None and each.rank > count and not each.front and each.dominated_by
    ]


def delete_weights(directory: Path, plan: Plan, kept: Mapping[str, Plan], store: Store) -> None:
    """Delete the weights of an artifact, and the step in the store that they are links to.
    A step that an artifact which is kept needs, or a running process, stays.
    """
    for name in read_artifact(directory).record.files:
        if name.endswith(WEIGHTS):
            (directory / name).unlink(missing_ok=True)
    step = plan.steps[-1]
    if step.stage is not None and step.key not in {each.key for plan in kept.values() for each in plan.steps}:
        with store.idle(step.key) as idle:
            if idle and store.get(step.key):
                store.delete(step.key)
