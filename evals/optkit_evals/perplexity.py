"""Perplexity on a text: exp of the mean negative log likelihood of a token.
The protocol is that of the GPTQ paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from optkit.common.statistics import mean, neighbours_half_width
from optkit.errors import EvalError
from optkit.measure import Eval, EvalContext, Metric, Session
from optkit.model.session_memory import SLICE_BYTES, SessionMemory
from optkit_evals.windows import WindowedText, slices

if TYPE_CHECKING:
    from torch import Tensor

POSITIONS_ADDED = 256
"""Positions whose losses are added first, in float64; another number would change the last bit of
what was measured before.
"""
LARGEST_LOSS = 700.0
"""Nats; exp of more is no float, and a model that knows nothing has ln(vocabulary), about 11."""


class Perplexity(WindowedText, Eval):
    """exp of the mean loss of a token.
    Its interval is that of the mean over windows, whose neighbours correlate.
    """

    kind: ClassVar[str] = "perplexity"
    version: ClassVar[int] = 2
    draws: ClassVar[bool] = False
    attributed: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, str]] = {"perplexity": "perplexity"}

    def working_bytes(self, model: SessionMemory) -> int:
        """Return the logits of a window, and the softmax of a slice."""
        return model.forward(1, self.window) + model.logits(self.window) + SLICE_BYTES

    def run(self, session: Session, context: EvalContext) -> list[Metric]:
        """Measure; raises EvalError if a logit is NaN, and as `WindowedText.cut` does."""
        windows = self.cut(session, context)
        losses: list[float] = []
        with context.progress.task("perplexity", len(windows.tokens), "windows") as task:
            for window in windows.tokens:
                losses.append(window_loss(session, window))
                task.advance(note=f"{math.exp(math.fsum(losses) / len(losses)):.3f}")
        loss, half = mean(losses), neighbours_half_width(losses)
        return [
            Metric(
                name="perplexity",
                value=math.exp(loss),
                unit="perplexity",
                higher_is_better=False,
                interval=(max(1.0, math.exp(loss - half)), math.exp(min(loss + half, LARGEST_LOSS))),
                protocol=f"{windows.protocol}; exp of the mean loss",
                samples=tuple(losses),
                pairing="paired_log",
            )
        ]


def window_loss(session: Session, window: Tensor) -> float:
    """Return the mean loss in nats of the predicted tokens of a window, int64 [sequence].
    Raises EvalError if it is not finite.
    """
    import torch

    logits = session.logits(window.unsqueeze(0).to(session.device))[0]  # [sequence, vocabulary]
    targets = window.to(logits.device)[1:]
    parts = slices(len(targets), logits.shape[-1])
    losses = torch.cat(
        [torch.nn.functional.cross_entropy(logits[part], targets[part], reduction="none") for part in parts]
    )
    loss = float(sum(part.double().sum().item() for part in losses.split(POSITIONS_ADDED))) / len(targets)
    if not loss < LARGEST_LOSS:
        raise EvalError(
            f"the mean loss of a window is {loss} nats",
            where=str(session.directory),
            why="Its logits are NaN, Inf or out of all bounds: the weights are damaged, or the dtype overflows",
            remedy="Open it in float32 or bfloat16",
        )
    return loss
