"""Zeros of pruned layers: which stay while others are rounded, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.stages.quantizing.job import QuantizationJob


def held_zeros(weights: Sequence[Tensor], keep: bool | Literal["auto"]) -> Tensor | None:
    """Return which weights of stacked layers stay 0, bool [out, in]; None if none has to."""
    import torch

    from optkit.algorithms.pruning import zeros_of_pruning

    if not keep:
        return None
    kept = [each == 0 if keep is True else zeros_of_pruning(each) for each in weights]
    if all(each is None for each in kept):
        return None
    return torch.cat(
        [
            torch.zeros_like(weight, dtype=torch.bool) if each is None else each
            for each, weight in zip(kept, weights, strict=True)
        ]
    )


def count_zeros(job: QuantizationJob, weight: Tensor, rounded: Tensor) -> None:
    """Add the zeros of a pruned layer, before and after, to the job's."""
    from optkit.algorithms.pruning import zeros_of_pruning

    zeros = zeros_of_pruning(weight)
    if zeros is not None:
        counts = job.details.setdefault("zeros", dict.fromkeys(("layers", "weights", "before", "after"), 0))
        found = {"layers": 1, "weights": weight.numel(), "before": int(zeros.sum()), "after": int((rounded == 0).sum())}
        counts.update({name: counts[name] + number for name, number in found.items()})


def tell_zeros(job: QuantizationJob) -> None:
    """Turn what was counted of pruned layers into shares, and say what became of their zeros."""
    if counts := job.details.pop("zeros", None):
        before, after = (counts[when] / counts["weights"] for when in ("before", "after"))
        job.details["zeros"] = {"layers": counts["layers"], "before": before, "after": after}
        became = "and stay so" if after >= before else "which GPTQ fills: keep_zeros: true would keep them"
        job.notes.append(
            f"{before:.1%} of the weights of {counts['layers']:,} pruned layers were 0, {became}; {after:.1%} are now"
        )
