"""A gate: the limit that a recipe sets to a metric, absolute or relative to that of another model.

perplexity: "<= 1.10x"                      at most 1.10 times the baseline's
perplexity: "<= 1.01x of previous"          at most 1.01 times that of an earlier release
size_bytes: "<= 300 MB"                     at most 300 MB, which is also <= 300e6
decode_tokens_per_s[batch=1]: ">= 1.2x"     only the rows measured at batch 1
arc_easy.acc_norm: ">= 0.99x"               as acc_norm[task=arc_easy]
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias, get_args

from optkit.common.byte_sizes import UNITS, size_bytes, size_text
from optkit.common.frozen import Frozen
from optkit.common.statistics import Estimate
from optkit.errors import did_you_mean
from optkit.measure import Eval, Metric
from optkit.model.shape import ModelShape

OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}

_KEY = re.compile(r"(?P<name>[A-Za-z_]\w*)\s*(?:\[(?P<labels>[^\[\]]*)\])?", re.ASCII)
_DOTTED = re.compile(r"^(?:\w+\.)?(?P<task>[\w-]+)\.(?P<name>[A-Za-z_]\w*)$", re.ASCII)
"""`arc_easy.acc` and `lm_eval.arc_easy.acc` are short for `acc[task=arc_easy]`."""
_LABEL = re.compile(r"\s*(\w+)\s*=\s*([^\s=]+)\s*", re.ASCII)
_LIMIT = re.compile(
    r"(?P<operator><=|>=|<|>)\s*(?P<limit>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"\s*(?:(?P<relative>[xX×]\s*(?P<of>\S.*)?)|(?P<unit>[a-zA-Z]*[bB]))?",
    re.ASCII,
)

Other: TypeAlias = Literal["same engine", "previous"]
"""What a limit can be relative to beside the unmodified model: the same weights in the artifact's
engine and settings, or an earlier release.
"""
Of: TypeAlias = Literal["", "baseline"] | Other
"""What a limit is relative to; empty for an absolute one."""
OTHERS: tuple[Other, ...] = get_args(Other)
RELATIVE_TO: tuple[Of, ...] = ("baseline", *OTHERS)


@dataclass(frozen=True)
class Range:
    """What a number can be."""

    words: str
    """What it is, as a sentence goes on after `is`."""
    low: float = 0.0
    high: float = 1e18
    reaches_low: bool = False
    """Whether it can be `low` itself; `high` it can always be."""

    def passes(self, gate: Gate) -> bool:
        """Say whether any number keeps the limit."""
        if gate.operator.startswith(">"):
            return gate.limit < self.high or (gate.operator == ">=" and gate.limit == self.high)
        return gate.limit > self.low or (gate.operator == "<=" and gate.limit == self.low and self.reaches_low)

    def breaks(self, gate: Gate) -> bool:
        """Say whether any number does not keep the limit."""
        if gate.operator.startswith("<"):
            return gate.limit < self.high or (gate.operator == "<" and gate.limit == self.high)
        return gate.limit > self.low or (gate.operator == ">" and gate.limit == self.low and self.reaches_low)


RATIO = Range("a ratio, which is above 0")
RANGES = {
    "fraction": Range("a share between 0 and 1", high=1.0, reaches_low=True),
    "cosine": Range("a cosine between -1 and 1", -1.0, 1.0, True),
    "correlation": Range("a correlation between -1 and 1", -1.0, 1.0, True),
    "perplexity": Range("at least 1", 1.0, 1e304, True),
    "nats/token": Range("a divergence, which is at least 0", high=1e4, reaches_low=True),
    "requests/s": Range("a rate, which is at least 0", reaches_low=True),
    **dict.fromkeys(("tokens/s", "sequences/s", "bytes/s"), Range("a rate, which is above 0")),
    "s": Range("a time in seconds, which is above 0", high=1e9),
    "bytes": Range("a number of bytes, which is above 0"),
    "bits": Range("a number of bits, which is above 0", high=1e6),
    "J": Range("an energy in joules, which is above 0"),
    "tokens": Range("a number of tokens, which is above 0"),
    "items": Range("a number of items, which is at least 0", reaches_low=True),
    "percent": Range("a number of percent, which is at least 0", reaches_low=True),
    "probability": Range("a probability between 0 and 1", high=1.0, reaches_low=True),
}
"""Unit of a metric -> what it can be."""


class Verdict(StrEnum):
    """Whether a limit was kept."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    """The limit lies within the 95% interval of what was measured."""
    SKIPPED = "SKIPPED"
    """It is relative to an earlier release, and the user says that there is none."""


class Gate(Frozen):
    """One limit."""

    name: str
    """The metric's name."""
    labels: dict[str, int | str] = {}
    """Labels that a row must have; none: every row of that name."""
    operator: str
    limit: float
    unit: str = ""
    """That the limit is written in, if it is a size; `limit` is in bytes."""
    of: Of = ""
    """The limit is a ratio to the same number of this model; empty: it is absolute."""

    @property
    def key(self) -> str:
        """The gate's key as a recipe spells it."""
        return metric_key(self.name, self.labels)

    @property
    def text(self) -> str:
        """The limit as a recipe spells it."""
        ratio = {"": "", "baseline": "x", "same engine": "x same engine"}.get(self.of, f"x of {self.of}")
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.operator} {self.limit / UNITS[self.unit.lower()]:.12g}{unit}{ratio}"

    def matches(self, metric: Metric) -> bool:
        """Return whether the gate is about this metric."""
        return metric.name == self.name and self.labels.items() <= metric.labels.items()

    def judge(self, measured: Estimate) -> Verdict:
        """Return whether a value keeps the limit all over its interval.
        A relative gate judges the ratio.
        """
        compare = OPERATORS[self.operator]
        kept = {compare(end, self.limit) for end in measured.interval or (measured.value,)}
        return Verdict.INCONCLUSIVE if len(kept) == 2 else Verdict.PASS if kept.pop() else Verdict.FAIL

    def excess(self, value: float) -> float:
        """Return by what part of the limit a value is beyond it; nothing above 0 if it keeps it."""
        beyond = value - self.limit if self.operator.startswith("<") else self.limit - value
        return beyond / abs(self.limit) if self.limit else beyond


def metric_key(name: str, labels: dict[str, int | str]) -> str:
    """Return `name[batch=1,prompt=128]`, or the bare name without labels."""
    return f"{name}[{','.join(f'{label}={value}' for label, value in labels.items())}]" if labels else name


def parse_gate(key: str, text: str) -> Gate:
    """Return the gate that a recipe states as `key: text`.
    Raises ValueError with a sentence that says what is wrong.
    """
    named = _KEY.fullmatch(_DOTTED.sub(r"\g<name>[task=\g<task>]", key.strip()))
    if not named:
        raise ValueError(f"'{key}' names no metric. Write a name, or name[batch=1,prompt=128] to pick rows.")
    labels: dict[str, int | str] = {}
    for part in named["labels"].split(",") if named["labels"] is not None else ():
        label = _LABEL.fullmatch(part)
        if not label:
            raise ValueError(f"'{part.strip()}' in '{key}' is no label. Write name[batch=1,prompt=128] to pick rows.")
        labels[label[1]] = int(label[2]) if label[2].isascii() and label[2].isdecimal() else label[2]
    stated = _LIMIT.fullmatch(text.strip())
    if not stated:
        raise ValueError(
            f'\'{text}\' is no limit. Write <=, >=, < or > and a number: "<= 25", "<= 4 GB", or "<= 1.10x" '
            'relative to the baseline. "<= 1.01x of previous" is relative to an earlier release, '
            '">= 2x same engine" to the baseline in the artifact\'s engine.'
        )
    if not math.isfinite(float(stated["limit"])):
        raise ValueError(
            f"'{text}' is no limit: {stated['limit']} is beyond all numbers. Write a number that can be reached."
        )
    if (unit := stated["unit"] or "") and not named["name"].endswith("_bytes"):
        raise ValueError(f"'{text}' is a size, and '{named['name']}' has none. Write a number without {unit}.")
    return Gate(
        name=named["name"],
        labels=labels,
        operator=stated["operator"],
        limit=size_bytes(stated["limit"] + unit) if unit else float(stated["limit"]),
        unit=unit,
        of=_read_of(stated["of"] or "baseline", text) if stated["relative"] else "",
    )


def _read_of(said: str, text: str) -> Of:
    name = " ".join(said.split()).removeprefix("of ")
    if name not in RELATIVE_TO:
        raise ValueError(f"'{said.strip()}' in '{text}' is nothing to be relative to.{did_you_mean(name, RELATIVE_TO)}")
    return name


def check_gate(gate: Gate, evals: Iterable[Eval | type[Eval]]) -> None:
    """Raise ValueError with a sentence if none of a recipe's evals measures what the gate is about.
    Nothing is run.

    An eval whose fields are not known is given as its class: its rows could have any labels.
    """
    evals = tuple(evals)
    check_named(gate, evals)
    measures = {name: each for each in evals for name in each.metrics}
    measuring = [each for each in evals if gate.name in each.metrics]
    instances = [each for each in measuring if isinstance(each, Eval)]
    if (
        gate.of == "same engine"
        and len(instances) == len(measuring)
        and not any(each.told_apart() for each in instances)
    ):
        plain = f"{gate.operator} {gate.limit:.12g}x"
        raise ValueError(f"'{gate.name}' is no timing of decoding, which engines decide. Write \"{plain}\".")
    if gate.of == "baseline" and compares(gate.name, measures[gate.name]):
        absolute = f"{gate.operator} {gate.limit:.12g}"
        raise ValueError(
            f"'{gate.name}' compares with the baseline already. Give its limit without x, as in \"{absolute}\"."
        )
    _check_range(gate, RATIO if gate.of else RANGES.get(measures[gate.name].metrics[gate.name]))


def compares(name: str, measured: Eval | type[Eval]) -> bool:
    """Say whether a metric of an eval compares with the unmodified model, so that no limit is relative to it."""
    return measured.compares or name in measured.contrasted


def check_named(gate: Gate, evals: Sequence[Eval | type[Eval]]) -> None:
    """Raise ValueError with a sentence if none of the evals measures a row that the gate is about."""
    measures = {name for each in evals for name in each.metrics}
    if not measures:
        raise ValueError(f"no eval measures '{gate.name}': the recipe has no evals.")
    if gate.name not in measures:
        raise ValueError(f"no eval of the recipe measures '{gate.name}'.{did_you_mean(gate.name, measures)}")
    measuring = [each for each in evals if gate.name in each.metrics]
    if all(isinstance(each, Eval) for each in measuring):
        _check_labels(gate, [row for each in measuring if isinstance(each, Eval) for row in each.rows_of(gate.name)])


FORESEEN = 0.02
"""Fraction by which what is foreseen may be wrong."""


def foreseen_failures(
    gates: Mapping[str, str], evals: Sequence[Eval], device: str, artifact: ModelShape, baseline: ModelShape
) -> tuple[str, ...]:
    """Return the gates that cannot pass, as far as that is known."""
    found = (foreseen_failure(parse_gate(*gate), evals, device, artifact, baseline) for gate in gates.items())
    return tuple(filter(None, found))


def foreseen_failure(gate: Gate, evals: Iterable[Eval], device: str, artifact: ModelShape, baseline: ModelShape) -> str:
    """Return why a gate will fail, if that is known before anything runs.
    It is empty if the gate is open.
    """
    for each in evals:
        if why := each.unmeasured(device).get(gate.name):
            return f"gate {gate.key} {gate.text} cannot pass: it is not measured on {device}, because {why}"
        value, other = (each.foresee(shape).get(gate.name) for shape in (artifact, baseline))
        if gate.of == "baseline" and other == 0:
            return f"gate {gate.key} {gate.text} cannot pass: the unmodified model has none of it"
        if not value or gate.of not in ("", "baseline") or (gate.of and not other):
            continue
        number = value / other if gate.of and other else value
        if gate.judge(Estimate(number, (number * (1 - FORESEEN), number * (1 + FORESEEN)))) is Verdict.FAIL:
            shown = f"{number:.2f}x" if gate.of else size_text(number)
            return f"gate {gate.key} {gate.text} cannot pass: the stages leave about {shown}"
    return ""


def _check_range(gate: Gate, values: Range | None) -> None:
    """Refuse a limit that nothing breaks, or nothing keeps."""
    if values is None or (values.passes(gate) and values.breaks(gate)):
        return
    remedy = "Give a limit that can be kept and broken."
    if values.high == 1.0 and 1.0 < gate.limit <= 100.0:
        remedy = f'Write "{gate.operator} {gate.limit / 100:g}" for {gate.limit:g}%.'
    never = "break" if values.passes(gate) else "pass"
    raise ValueError(f"'{gate.name}' is {values.words}, so that nothing can {never} {gate.text}. {remedy}")


def _check_labels(gate: Gate, rows: Sequence[dict[str, int | str]]) -> None:
    if any(gate.labels.items() <= row.items() for row in rows):
        return
    known = {label for row in rows for label in row}
    if not known:
        raise ValueError(f"'{gate.name}' has one row, and no labels to pick it by. Write {gate.name} alone.")
    for label, value in gate.labels.items():
        if label not in known:
            raise ValueError(f"the rows of '{gate.name}' have no label '{label}'.{did_you_mean(label, known)}")
        values = list(dict.fromkeys(row[label] for row in rows if label in row))
        if value not in values:
            raise ValueError(
                f"no row of '{gate.name}' has {label}={value}. There will be: "
                f"{', '.join(f'{label}={each}' for each in values)}."
            )
    there = ", ".join(metric_key(gate.name, row) for row in rows)
    raise ValueError(f"no row of '{gate.name}' has these labels together. There will be: {there}.")


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Return FAIL if any gate failed, else INCONCLUSIVE if any is open, else PASS.
    No gates at all pass too.
    """
    return next((verdict for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE) if verdict in verdicts), Verdict.PASS)
