"""How far a model's embeddings moved from the baseline's: their cosine similarity.
It also says what that does to rankings and neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from optkit.common.statistics import (
    Estimate,
    correlation_estimate,
    mean_estimate,
    quantile,
    quantile_interval,
    share_estimate,
)
from optkit.errors import EvalError
from optkit.measure import EncoderSession, Eval, EvalContext, Metric
from optkit.model.task import Task
from optkit_evals.meanings import row
from optkit_evals.sentences import Sentences, SentenceText
from optkit_evals.windows import other_tokens, require_baseline

if TYPE_CHECKING:
    from torch import Tensor

NEIGHBOURS = 10
LOW = 0.01
"""The percentile of the cosines that stands for the worst sentences."""
FEWEST_FOR_LOW = math.ceil(math.log(0.025) / math.log(1 - LOW))
"""Of so many sentences the least lies below their population's percentile in 97.5% of cases."""
PARTS, FEWEST_IN_PART = 8, 4
"""Of the sentences, for the interval of a correlation."""


class Embedding(SentenceText, Eval):
    """Cosine similarity of each sentence's embedding to the baseline's.
    It also gives the rank correlation of similarities and the agreement on neighbours.

    `spearman_cosine` ranks the similarities of all pairs of sentences, as benchmarks of semantic
    similarity do; `recall_at_10` is the share of the 10 sentences nearest to one, by the baseline's
    embeddings, that are among the 10 nearest by the model's.
    """

    kind: ClassVar[str] = "embedding"
    example: ClassVar[str] = "- embedding: {dataset: wikitext2, sentences: 256}"
    draws: ClassVar[bool] = False
    for_tasks: ClassVar[frozenset[Task]] = frozenset({Task.FEATURES})
    compares: ClassVar[bool] = True
    version: ClassVar[int] = 3
    attributed: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, str]] = {
        "cosine_similarity": "cosine",
        "cosine_similarity_p1": "cosine",
        "cosine_similarity_min": "cosine",
        "spearman_cosine": "correlation",
        "recall_at_10": "fraction",
    }

    def run(self, session: EncoderSession, context: EvalContext) -> list[Metric]:
        """Compare.
        Raises EvalError without a baseline, for other tokens or embeddings of another size, for
        NaN; see `SentenceText`.
        """
        baseline: EncoderSession = require_baseline(context, "embedding")
        sentences = self.batched(session, context)
        if self.batched(baseline, context).protocol != sentences.protocol:
            raise other_tokens(self.where)
        if session.pooling != baseline.pooling:
            what = f"the model's embeddings are the {session.pooling}, and the baseline's the {baseline.pooling}"
            raise EvalError(what, where="embedding", remedy="Give both the same modules.json")
        ours, theirs = self._embed(sentences, session, baseline, context)
        protocol = (
            f"{sentences.protocol}; embeddings: {session.pooling}; cosine similarity to the baseline's; the least one"
            f" is that of these sentences alone, and their 1% has an interval from {FEWEST_FOR_LOW} sentences on: of"
            " fewer even the least may lie above it"
        )
        return self._metrics(ours, theirs, protocol)

    def _embed(
        self, sentences: Sentences, session: EncoderSession, baseline: EncoderSession, context: EvalContext
    ) -> tuple[Tensor, Tensor]:
        """Return the embeddings of both, float64 [sentences, hidden], normalised."""
        import torch

        found: list[list[Tensor]] = [[], []]
        with context.progress.task("embedding", len(sentences.batches), "batches") as task:
            for tokens, mask in sentences.batches:
                for opened, embedded in zip((session, baseline), found, strict=True):
                    embedded.append(opened.embed(tokens, mask))
                task.advance()
        ours, theirs = (torch.nn.functional.normalize(torch.cat(each).double(), dim=-1) for each in found)
        if ours.shape != theirs.shape:
            what = f"the model's embeddings have {ours.shape[1]:,} numbers and the baseline's {theirs.shape[1]:,}"
            raise EvalError(what, where="embedding")
        for opened, embeddings in ((session, ours), (baseline, theirs)):
            if not embeddings.isfinite().all():
                why, remedy = "The weights are damaged, or the dtype overflows", "Open it in float32 or bfloat16"
                raise EvalError("an embedding holds NaN or Inf", where=str(opened.directory), why=why, remedy=remedy)
        return ours, theirs

    def _metrics(self, ours: Tensor, theirs: Tensor, protocol: str) -> list[Metric]:
        cosines: list[float] = (ours * theirs).sum(-1).tolist()
        recalls = neighbour_recall(ours, theirs)
        low = quantile_interval(cosines, LOW) if len(cosines) >= FEWEST_FOR_LOW else None
        measured: tuple[tuple[str, Estimate, list[float]], ...] = (
            ("cosine_similarity", mean_estimate(cosines, -1.0, 1.0), cosines),
            ("cosine_similarity_p1", Estimate(quantile(cosines, LOW), low), []),
            ("cosine_similarity_min", Estimate(min(cosines)), []),
            ("spearman_cosine", spearman_estimate(ours, theirs), []),
            ("recall_at_10", share_estimate(recalls, [NEIGHBOURS] * len(recalls)), recalls),
        )
        return [
            row(self, name, Estimate(min(estimate.value, 1.0), estimate.interval), protocol, samples)
            for name, estimate, samples in measured
        ]


def spearman_estimate(ours: Tensor, theirs: Tensor) -> Estimate:
    """Return Spearman's correlation of all pairs' similarities.
    Its interval is that of separate parts of the sentences, float [n, hidden].
    """
    parts = min(PARTS, len(ours) // FEWEST_IN_PART)
    found = [spearman(pairwise(ours[each::parts]), pairwise(theirs[each::parts])) for each in range(parts)]
    return correlation_estimate(spearman(pairwise(ours), pairwise(theirs)), found)


def pairwise(embeddings: Tensor) -> Tensor:
    """Return all pairs' similarities, float [n (n - 1) / 2], of normalised embeddings, [n, hidden]."""
    import torch

    rows, columns = torch.triu_indices(len(embeddings), len(embeddings), 1)
    return (embeddings @ embeddings.T)[rows, columns]


def spearman(left: Tensor, right: Tensor) -> float:
    """Return Spearman's rank correlation of two rows of numbers; ties share their mean rank."""
    import torch

    return float(torch.corrcoef(torch.stack([_ranks(left), _ranks(right)]))[0, 1])


def neighbour_recall(ours: Tensor, theirs: Tensor, neighbours: int = NEIGHBOURS) -> list[float]:
    """Return the share of each embedding's nearest neighbours that both agree on.
    Both are [n, hidden]; the shares are relative to the second's neighbours.
    """
    near = []
    for embeddings in (ours, theirs):
        similarities = embeddings @ embeddings.T
        similarities.fill_diagonal_(-2)
        near.append(similarities.topk(neighbours).indices.tolist())
    return [len(set(mine) & set(others)) / neighbours for mine, others in zip(*near, strict=True)]


def _ranks(values: Tensor) -> Tensor:
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0).double() - (counts - 1) / 2
    return ranks[places]
