"""Perplexity on a text: exp of the mean negative log likelihood of a token.
The protocol is that of the GPTQ paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from optkit.common.field_types import Distinct
from optkit.common.statistics import Estimate, mean, neighbours_half_width
from optkit.errors import EvalError
from optkit.measure import Answering, Eval, EvalContext, Metric, Session
from optkit.model.session_memory import SLICE_BYTES, SessionMemory
from optkit.model.task import GENERATING, Task
from optkit.source.text_place import TextPlace
from optkit.source.texts import TextSource, is_file_name
from optkit_evals.meanings import row
from optkit_evals.windows import PromptedText, slices

if TYPE_CHECKING:
    from torch import Tensor

POSITIONS_ADDED = 256
"""Positions whose losses are added first, in float64; another number would change the last bit of
what was measured before.
"""
LARGEST_LOSS = 700.0
"""Nats; exp of more is no float, and a model that knows nothing has ln(vocabulary), about 11."""


class FurtherText(TextSource):
    """Another text to measure on. In YAML a bare name is the data set: `also: [c4]`."""

    model_config = ConfigDict(json_schema_extra={"type": ["string", "object"]})


class Perplexity(PromptedText, Eval):
    """How surprised the model is by a text, or by answers about images: exp of the mean loss of a token.
    Its interval is that of the mean over windows, whose neighbours correlate.
    """

    kind: ClassVar[str] = "perplexity"
    example: ClassVar[str] = "- perplexity: {dataset: wikitext2, window: 2048, windows: 15}"
    version: ClassVar[int] = 2
    for_tasks: ClassVar[frozenset[Task]] = GENERATING
    draws: ClassVar[bool] = False
    attributed: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, str]] = {"perplexity": "perplexity"}

    also: Distinct[FurtherText] = Field(default=(), exclude_if=lambda value: not value)
    """Further texts, cut in the same way. Each text then has a row of its own, labelled by its name:
    `perplexity[text=c4]`.
    """

    @model_validator(mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and isinstance(value.get("also"), list):
            return {**value, "also": tuple(value["also"])}
        return value

    def texts(self) -> dict[str, Perplexity]:
        """Return the eval for each text alone, by its name."""
        named = ("dataset", "split", "field", "revision")
        alone = [self.model_copy(update={"also": ()})]
        alone += [
            self.model_copy(update={"also": (), "images": None, **{name: getattr(each, name) for name in named}})
            for each in self.also
        ]
        names = [Path(each.dataset).name if is_file_name(each.dataset) else each.dataset for each in alone]
        return {
            name if names.count(name) == 1 else f"{name}:{each.split}": each
            for name, each in zip(names, alone, strict=True)
        }

    def row_labels(self) -> tuple[dict[str, int | str], ...]:
        rows = [(name, super(Perplexity, text).row_labels()[0]) for name, text in self.texts().items()]
        return tuple({"text": name, **labels} if self.also else labels for name, labels in rows)

    def check_texts(self, place: TextPlace) -> None:
        for text in self.texts().values():
            super(Perplexity, text).check_texts(place)

    def working_bytes(self, model: SessionMemory) -> int:
        return model.forward(1, self.window) + model.logits(self.window) + SLICE_BYTES

    def run(self, session: Session, context: EvalContext) -> list[Metric]:
        """Measure; raises EvalError if a logit is NaN, and as `PromptedText.measured_by` does."""
        return [
            text._measured(session, context, labels, f"perplexity of {name}" if labels else "perplexity")
            for (name, text), labels in zip(self.texts().items(), self.row_labels(), strict=True)
        ]

    def _measured(self, session: Session, context: EvalContext, labels: dict[str, int | str], title: str) -> Metric:
        windows = self.measured_by(session, context)
        losses: list[float] = []
        with context.progress.task(title, len(windows), "windows") as task:
            for opened, window in windows.seen_by(session):
                losses.append(window_loss(opened, window))
                task.advance(note=f"{math.exp(math.fsum(losses) / len(losses)):.3f}")
        loss, half = mean(losses), neighbours_half_width(losses)
        interval = max(1.0, math.exp(loss - half)), math.exp(min(loss + half, LARGEST_LOSS))
        protocol = f"{windows.protocol}; exp of the mean loss"
        estimate = Estimate(math.exp(loss), interval)
        return row(self, "perplexity", estimate, protocol, losses, labels=labels, pairing="paired_log")


def window_loss(session: Answering, window: Tensor) -> float:
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
