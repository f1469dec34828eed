"""KL divergence from the baseline's predictions, and top-1 agreement, on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from optkit.common.statistics import mean, neighbours_estimate, quantile, share_estimate, tail_estimate
from optkit.errors import EvalError
from optkit.measure import Answering, Eval, EvalContext, Metric, Session
from optkit.model.session_memory import SLICE_BYTES, SessionMemory
from optkit.model.task import GENERATING, Task
from optkit_evals.meanings import row
from optkit_evals.windows import PromptedText, Seeing, other_tokens, require_baseline, slices

if TYPE_CHECKING:
    from torch import Tensor

SLICES = 5
"""Slices of logits that are held at once: two softmaxes, their divergence and what it is made of."""


class Divergence(PromptedText, Eval):
    """KL(baseline || model) of the next token, mean and 99th percentile.
    It also counts how often both put the same token first.

    Counted are the positions whose next token perplexity counts. Intervals are over windows, whose
    neighbours correlate; that of the agreement is at least as wide as if each token were tried
    anew.
    """

    kind: ClassVar[str] = "divergence"
    example: ClassVar[str] = "- divergence: {dataset: wikitext2, window: 2048, windows: 15}"
    version: ClassVar[int] = 2
    for_tasks: ClassVar[frozenset[Task]] = GENERATING
    draws: ClassVar[bool] = False
    compares: ClassVar[bool] = True
    attributed: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, str]] = {
        "kl_divergence": "nats/token",
        "kl_divergence_p99": "nats/token",
        "top1_agreement": "fraction",
    }

    def working_bytes(self, model: SessionMemory) -> int:
        """Return the logits of a window of both models, and what compares a slice of them."""
        return model.forward(1, self.window) + 2 * model.logits(self.window) + SLICES * SLICE_BYTES

    def run(self, session: Session, context: EvalContext) -> list[Metric]:
        """Compare.
        Raises EvalError without a baseline, for other tokens or another vocabulary, for NaN logits;
        see `PromptedText.measured_by`.
        """
        baseline: Session = require_baseline(context, "divergence")
        if session.vocabulary != baseline.vocabulary:
            what = f"the model has {session.vocabulary:,} logits and the baseline {baseline.vocabulary:,}"
            why = "Distributions over different vocabularies cannot be compared"
            raise EvalError(what, where="divergence", why=why)
        windows, expected = self.measured_by(session, context), self.measured_by(baseline, context)
        if len(windows) != len(expected):
            raise other_tokens(self.where)
        divergences: list[list[float]] = []
        agreements: list[float] = []
        (labels,) = self.row_labels()
        with context.progress.task("divergence", len(windows), "windows") as task:
            both = zip(windows.seen_by(session), expected.seen_by(baseline), strict=True)
            for (ours, window), (theirs, other) in both:
                sees_other = isinstance(ours, Seeing) and isinstance(theirs, Seeing) and not ours.sees_what(theirs)
                if sees_other or not window.equal(other):
                    raise other_tokens(self.where)
                divergence, agreement = compare_window(ours, theirs, window)
                divergences.append(divergence)
                agreements.append(agreement)
                task.advance(note=f"{mean(divergence):.4f} nats")
        means = [mean(divergence) for divergence in divergences]
        tails = [quantile(divergence, 0.99) for divergence in divergences]
        positions = [len(divergence) for divergence in divergences]
        measured = (
            ("kl_divergence", neighbours_estimate(means, 0.0), means),
            ("kl_divergence_p99", tail_estimate(divergences, 0.99), tails),
            ("top1_agreement", share_estimate(agreements, positions, neighbours=True), agreements),
        )
        protocol = f"{windows.protocol}; KL(baseline || model) and most likely token"
        return [row(self, name, estimate, protocol, samples, labels=labels) for name, estimate, samples in measured]


def compare_window(session: Answering, baseline: Answering, window: Tensor) -> tuple[list[float], float]:
    """Return the KL divergence in nats and the equal top tokens of a window, int64 [sequence].
    The divergence is that of each predicted position, the other a fraction.

    Raises EvalError if a divergence is not finite.
    """
    import torch

    theirs = baseline.logits(window.unsqueeze(0).to(baseline.device))[0]  # [sequence, vocabulary]
    ours = session.logits(window.unsqueeze(0).to(session.device))[0]
    divergence: list[float] = []
    agreed = 0
    positions = len(window) - 1
    for part in slices(positions, theirs.shape[-1]):
        expected, found = theirs[part].float(), ours[part].to(theirs.device).float()
        agreed += int((expected.argmax(-1) == found.argmax(-1)).sum())
        log_expected, log_found = expected.log_softmax(-1), found.log_softmax(-1)
        divergence += (
            torch.nn.functional.kl_div(log_found, log_expected, log_target=True, reduction="none").sum(-1).tolist()
        )
    if not all(map(math.isfinite, divergence)):
        why = "The logits of the model or of the baseline are: the weights are damaged, or the dtype overflows"
        what, remedy = "the divergence at a token is NaN or Inf", "Open both in float32 or bfloat16"
        raise EvalError(what, where=str(session.directory), why=why, remedy=remedy)
    return divergence, agreed / positions
