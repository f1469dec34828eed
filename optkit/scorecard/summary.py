"""What of a scorecard is told first: the numbers that decide, and what asks someone to act.
The terminal and the page begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from optkit.recipe.gates import Verdict
from optkit.scorecard.scorecard import Measured, Scorecard

FIRST = (
    "perplexity",
    "recovery",
    "decode_tokens_per_s",
    "size_bytes",
    "peak_memory_bytes",
    "kl_divergence",
    "prefill_tokens_per_s",
    "acc_norm",
    "acc",
    "cosine_similarity",
    "latency_p50_s",
    "sequences_per_s",
    "top1_agreement",
    "bits_per_weight",
)
"""Metrics that a reader looks for first; what has a gate comes before."""
MOST_NUMBERS = 6
OTHERS = 1000
KEPT = {Verdict.PASS, Verdict.SKIPPED}


def first_rows(rows: Sequence[Measured]) -> list[Measured]:
    """Return every number whose gate is not kept, then as many as make six: those with a gate, and
    one of each metric in `FIRST`. If there are none of these, return the first six.
    """
    named: dict[str, Measured] = {}
    for row in rows:
        if not row.metric.failure:
            named.setdefault(row.metric.name, row)

    def rank(row: Measured) -> int:
        if row.gates:
            return 1 if {gate.verdict for gate in row.gates} <= KEPT else 0
        return FIRST.index(row.metric.name) + 2 if named.get(row.metric.name) is row else OTHERS

    told = sorted((row for row in rows if row.gates or row.metric.name in FIRST), key=rank)
    told = [row for row in told if rank(row) < OTHERS] or list(rows)
    return told[: max(MOST_NUMBERS, sum(rank(row) == 0 for row in told if row.gates))]


def to_act_on(scorecard: Scorecard) -> list[str]:
    """Return what asks someone to act, one sentence each: engines that `verify` found wanting, then
    the warnings of stages and evals.
    """
    engines = [f"{each.engine}: {each.reason}" for each in scorecard.loading if each.failed]
    return [*engines, *scorecard.warnings]


def other_notes(scorecard: Scorecard) -> list[str]:
    """Return the notes that are no warnings, those about the baseline last."""
    notes = [*scorecard.notes, *(f"baseline: {note}" for note in scorecard.baseline_notes)]
    return [note for note in notes if note not in scorecard.warnings]
