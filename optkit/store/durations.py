"""How long steps and measurements took on this machine, and what that says of those to come.

    ROOT/durations.jsonl    one line for each: {what, fields, machine, size_bytes, seconds}

What was never measured here has no prediction: there are no rates but those of this file. Requests that
arrive at a rate take their time on any machine.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from optkit.common.frozen import Frozen
from optkit.environment import cpu_threads, device_name

if TYPE_CHECKING:
    from optkit.plan import PlannedEval

FILE = "durations.jsonl"
LAST = 8
"""Runs of one kind that are looked at, the last ones."""
FAR = 100
"""Times as large, or as small, a model that says nothing: what a run costs at any size would be multiplied."""
MOST_LINES = 10_000
AMOUNTS = (("samples", "sequence_length"), ("windows", "window"))
"""Fields whose product says how much text is read."""
WAYS = (
    *("method", "rounding", "learn", "learning_steps", "scale_steps", "copies", "earlier_errors", "effort"),
    *("held_out_samples", "devices", "backend"),
)
"""Fields that change the time by a multiple."""
IGNORED = frozenset({"revision"})


class Durations:
    """The durations of a store, on a device."""

    def __init__(self, root: Path, device: str) -> None:
        self._file = root / FILE
        self._device = device

    @cached_property
    def _machine(self) -> list[Any]:
        return [device_name(self._device), cpu_threads() if self._device == "cpu" else None]

    def note(self, what: str, value: Frozen, size_bytes: int, seconds: float) -> None:
        """Remember how long a kind of work with these fields took on a model of so many bytes.
        A full store forgets it.
        """
        fields = value.model_dump(mode="json")
        told = {"what": what, "fields": fields, "machine": self._machine, "size_bytes": size_bytes}
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**told, "seconds": round(seconds, 3)}) + "\n")

    def predict(self, what: str, value: Frozen, size_bytes: int) -> float | None:
        """Return seconds, in proportion to bytes of weights and tokens of text.
        They are of runs that differ in nothing else, else of that kind.
        """
        fields = value.model_dump(mode="json")
        alike = [line for line in self._lines() if (line["what"], line["machine"]) == (what, self._machine)]
        alike = [line for line in alike if 0 < line["size_bytes"] <= FAR * size_bytes <= FAR**2 * line["size_bytes"]]
        amount = _amount(fields)
        alike = [line for line in alike if (_amount(line["fields"]) is None) == (amount is None)]
        alike = [line for line in alike if _way(line["fields"]) == _way(fields)]
        same = [line for line in alike if _others(line["fields"]) == _others(fields)]
        near = same or (alike if amount is not None else [])
        rates = [line["seconds"] / (line["size_bytes"] * (_amount(line["fields"]) or 1)) for line in near[-LAST:]]
        return median(rates) * size_bytes * (amount or 1) if rates else None

    def of_eval(self, each: PlannedEval, size_bytes: int) -> float | None:
        """Return how long an eval will take; None if that of one of the models is not known."""
        keys = [key for key, hit in ((each.key, each.hit), (each.baseline_key, each.baseline_hit)) if key and not hit]
        known = [self.of_metric(each, key, size_bytes) for key in keys]
        return sum(filter(None, known)) if known and None not in known else None

    def of_metric(self, each: PlannedEval, key: str, size_bytes: int) -> float | None:
        """Return how long the measurement with a key will take, at least as long as requests arrive."""
        known = self.predict(each.duration_of(key), each.eval, size_bytes)
        return max(known or 0.0, each.eval.arriving_s()) or None

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yield what was noted; a line that was cut off is left out."""
        try:
            lines = self._file.read_text(encoding="utf-8", errors="replace").splitlines()[-MOST_LINES:]
        except OSError:
            return
        for line in lines:
            try:
                found = json.loads(line)
                numbers = {name: float(found[name]) for name in ("size_bytes", "seconds")}
                yield {"what": found["what"], "fields": dict(found["fields"]), "machine": found["machine"], **numbers}
            except (ValueError, KeyError, TypeError):
                continue


def _amount(fields: Mapping[str, Any]) -> int | None:
    """Return how many tokens are read. 1 if no field says it, None if a text is read to its end."""
    text = fields.get("calibration") or fields
    for names in AMOUNTS:
        if all(name in text for name in names):
            counts = [text[name] for name in names]
            return None if None in counts else prod(counts)
    return None if "tokens" in fields and fields["tokens"] is None else int(fields.get("tokens", 1))


def _way(fields: Mapping[str, Any]) -> list[Any]:
    """Return what changes the time many times over: a text or none, and the work that is done on it."""
    return [fields.get("calibration") is None, *(fields.get(name) for name in WAYS)]


def _others(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that say nothing of how much text is read."""
    left = IGNORED.union(*AMOUNTS)
    kept = {name: value for name, value in fields.items() if name not in left}
    return kept | (
        {"calibration": _others(kept["calibration"])} if isinstance(kept.get("calibration"), Mapping) else {}
    )
