"""Which one to take: what must hold, what is to be best, and the reason in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from optkit.comparison.columns import Table
from optkit.comparison.result import Column, Difference
from optkit.errors import UsageError, did_you_mean
from optkit.recipe.gates import Gate, Verdict, parse_gate
from optkit.scorecard.numbers import format_value, significant
from optkit.scorecard.scorecard import GateResult, Measured

ORDER = (Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL)
_REQUIREMENT = re.compile(r"([^<>]*)([<>].*)", re.DOTALL)
NAMES = {
    "baseline": "the unmodified model",
    "same engine": "the unmodified model in its engine",
    "previous": "an earlier release",
}
UNNAMED = ("size_bytes", "decode_tokens_per_s")
"""Metrics that `smaller` and `faster` are about if nothing else is said."""


def parse_requirement(text: str, option: str = "--require") -> Gate:
    """Return the limit that `perplexity<=1.05x` states; raises UsageError if it states none."""
    found = _REQUIREMENT.fullmatch(text.strip())
    try:
        if not found:
            raise ValueError(f"'{text}' is no limit. Write it as perplexity<=1.05x.")
        return parse_gate(found[1], found[2])
    except ValueError as error:
        raise UsageError(str(error), where=option) from error


def parse_metric(text: str, option: str) -> Gate:
    """Return what names a metric, `name` or `name[label=value]`; raises UsageError."""
    try:
        return parse_gate(text, "> 0")
    except ValueError as error:
        raise UsageError(str(error), where=option) from error


def check_names(gates: Sequence[Gate], table: Table) -> None:
    """Raise UsageError for a limit to a metric that no scorecard has."""
    for gate in gates:
        named_columns(table, gate.key, "--require")


def named_columns(table: Table, text: str, option: str) -> list[Column]:
    """Return the columns that `name` or `name[label=value]` names; raises UsageError for none."""
    gate = parse_metric(text, option)
    found = [each for each in table.columns if each.name == gate.name and gate.labels.items() <= each.labels.items()]
    if not found:
        known = list(dict.fromkeys(column.key for column in table.columns if " #" not in column.key))
        hint = did_you_mean(text, known).strip() or f"Measured: {', '.join(known)}"
        raise UsageError(f"no scorecard has '{text}'", where=option, remedy=hint)
    return found


def judged(gate: Gate, rows: Iterable[Measured]) -> GateResult:
    """Return what a scorecard makes of a limit; the worst of the rows that it is about."""
    found = [_verdict(gate, row) for row in rows if gate.matches(row.metric)]
    unmeasured = Verdict.FAIL, "it was not measured"
    verdict, why = max(found, key=lambda each: ORDER.index(each[0]), default=unmeasured)
    return GateResult(key=gate.key, limit=gate.text, of=gate.of, verdict=verdict, why=why)


def _verdict(gate: Gate, row: Measured) -> tuple[Verdict, str]:
    if row.metric.failure:
        return Verdict.FAIL, row.metric.failure
    number = row.number(gate.of)
    if number is None:
        return Verdict.FAIL, f"there is no ratio to {NAMES.get(gate.of, gate.of)}"
    return gate.judge(number), ""


def reason(pick: str, other: str, differences: Sequence[tuple[Column, Difference]]) -> str:
    """Return e.g. `a over b: 4% smaller, no measurable loss in perplexity`."""
    better, worse = (
        [difference_text(column, each) for column, each in differences if each.relation == relation]
        for relation in ("better", "worse")
    )
    same = [column.title for column, each in differences if each.relation == "none"]
    word = "loss" if better and not worse else "difference"
    told = [*better, *([f"no measurable {word} in {' and '.join(same)}"] if same else [])]
    if worse:
        told.append(f"{'but ' if told else ''}{' and '.join(worse)}")
    return f"{pick} over {other}: {', '.join(told)}"


def difference_text(column: Column, difference: Difference) -> str:
    """Return e.g. `4% smaller`, `12% faster`, `1.2% lower perplexity`, `0.03 nats/token higher kl_divergence`."""
    if not difference.relative:
        size = format_value(abs(difference.value), column.unit)
        return f"{size} {'higher' if difference.value > 0 else 'lower'} {column.title}"
    return _ratio_text(column, difference.value)


def _ratio_text(column: Column, ratio: float) -> str:
    rate = column.role == "speed" and column.higher_is_better
    named = column.role == "size" or rate
    more, less, much = ("larger", "smaller", "large") if column.role == "size" else ("faster", "slower", "fast")
    if ratio >= 2:
        text = f"{significant(ratio, 2)}x " + (f"as {much}" if named else f"the {column.title}")
    else:
        percent = abs(ratio - 1) * 100
        text = f"{percent:.0f}%" if percent >= 9.95 else f"{significant(percent, 2)}%"
        text += f" {more if ratio > 1 else less}" if named else f" {'higher' if ratio > 1 else 'lower'} {column.title}"
    return text if not named or column.title in UNNAMED else f"{text} ({column.title})"
