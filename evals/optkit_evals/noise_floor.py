"""What the unmodified model differs from itself: in another batch size, attention kernel and dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from optkit.common.field_types import BatchSize, Several
from optkit.common.statistics import mean
from optkit.environment import device_name, package_version
from optkit.errors import EvalError, OptkitError
from optkit.measure import Eval, EvalContext, Metric, Session
from optkit.model.checkpoint import Checkpoint
from optkit.model.cost import Cost
from optkit.model.formats.base import Format
from optkit.model.session_memory import SLICE_BYTES, SessionMemory
from optkit.recipe.registry import stage_class
from optkit_evals.divergence import SLICES, compare_window
from optkit_evals.meanings import row
from optkit_evals.perplexity import window_loss
from optkit_evals.timing import device_text
from optkit_evals.windows import WindowedText, Windows

if TYPE_CHECKING:
    from torch import Tensor


class NoiseFloor(WindowedText, Eval):
    """How much the unmodified model differs from itself when only batch, kernel or dtype change.

    It is computed again in batches, with another attention kernel and in another dtype. What an
    artifact differs by less is no difference: `optkit compare` calls it none. Measured once for a
    model and a device, whatever the artifact.
    """

    kind: ClassVar[str] = "noise_floor"
    example: ClassVar[str] = "- noise_floor: {dataset: wikitext2, window: 2048, windows: 8}"
    draws: ClassVar[bool] = False
    of_unmodified: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, str]] = {
        "noise_kl_divergence": "nats/token",
        "noise_top1_agreement": "fraction",
        "noise_perplexity": "fraction",
    }

    windows: Several | None = 8
    """Windows to measure, from the start of the text; all of them when null."""
    batch: BatchSize = 2
    """Windows at once, instead of one; 1 leaves it out."""
    attention: Literal["eager", "sdpa"] | None = "eager"
    """The attention of transformers to compute with; null leaves it out."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = "bfloat16"
    """The dtype to compute in, float32 if the model is stored in this one; null leaves it out."""

    def working_bytes(self, model: SessionMemory) -> int:
        """Return a batch of windows and its logits, those of one window, and what compares them."""
        batch = model.forward(self.batch, self.window) + model.logits(self.batch * self.window)
        return batch + model.logits(self.window) + SLICES * SLICE_BYTES

    def circumstances(self, device: str) -> dict[str, Any]:
        return {"device": device_name(device), "torch": package_version("torch")}

    def predict(self, model: SessionMemory, beside: SessionMemory | None = None) -> Cost:
        """Return what measuring needs: the model is opened a second time."""
        return super().predict(model, model if self.attention or self.dtype else None)

    def row_labels(self) -> tuple[dict[str, int | str], ...]:
        """Return what is varied; the dtype is float32 if the model is stored in the one asked for."""
        return tuple(
            {"against": text}
            for text, wanted in (
                (f"batch {self.batch}", self.batch > 1),
                (f"attention {self.attention}", self.attention),
                (f"dtype {self.dtype}", self.dtype),
            )
            if wanted
        )

    def run(self, session: Session, context: EvalContext) -> Iterator[Metric]:
        """Measure. What cannot be opened is left out with a warning.
        Raises EvalError if nothing is left, and as `WindowedText.cut` does.
        """
        windows = self.cut(session, replace(context, calibrated_on=()))
        found = False
        for against, opened in self._variations(session, context):
            with opened as other:
                if other is None:
                    continue
                yield from self._compare(session, other, windows, against, context)
                found = True
        if not found:
            raise EvalError("there is nothing to vary", where=self.kind, remedy="Set batch to 2 or more")

    def _compare(
        self, session: Session, other: Session, windows: Windows, against: str, context: EvalContext
    ) -> Iterator[Metric]:
        divergences, flips, losses = list[float](), list[float](), list[float]()
        with context.progress.task(f"noise floor, {against}", len(windows.tokens), "windows") as task:
            for window in windows.tokens:
                divergence, agreement = compare_window(other, session, window)
                divergences.append(mean(divergence))
                flips.append(1.0 - agreement)
                losses.append(window_loss(other, window) - window_loss(session, window))
                task.advance(note=f"{mean(divergences):.2e} nats")
        moved = abs(math.expm1(mean(losses)))
        protocol = (
            f"{windows.protocol}; {against}, beside the same model one window at a time; {device_text(session.device)}"
        )
        for name, value, samples in (
            ("noise_kl_divergence", max(0.0, mean(divergences)), divergences),
            ("noise_top1_agreement", mean(flips), flips),
            ("noise_perplexity", moved, losses),
        ):
            yield row(self, name, value, protocol, samples, labels={"against": against})

    def _variations(self, session: Session, context: EvalContext) -> Iterator[tuple[str, Any]]:
        """Yield what is varied, and how the model is opened so."""
        if self.batch > 1:
            yield f"batch {self.batch}", _given(InBatches(session, self.batch))
        if not Format.of(session.directory).is_checkpoint:
            return
        if self.attention:
            setting = stage_class("attention").model_validate({"implementation": self.attention})
            yield f"attention {self.attention}", _opened(session, context, settings=[setting])
        if self.dtype:
            stored = Checkpoint(session.directory).dtype
            dtype = self.dtype if self.dtype != stored else "float32"
            if dtype != stored:
                yield f"dtype {dtype}", _opened(session, context, dtype=dtype)


@dataclass(frozen=True)
class InBatches:
    """A session that computes each window as one of several: the products have other shapes."""

    session: Session
    batch: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [1, sequence] -> float32 [1, sequence, vocabulary]."""
        return self.session.logits(tokens.expand(self.batch, -1))[:1]


@contextmanager
def _given(session: InBatches) -> Iterator[Session]:
    yield cast(Session, session)


@contextmanager
def _opened(session: Session, context: EvalContext, settings: Any = (), dtype: str | None = None) -> Iterator[Any]:
    """Open the model a second time; None with a warning if that cannot be."""
    from optkit.session import open_session

    try:
        other = open_session(session.directory, settings, session.device, dtype, context.progress)
    except OptkitError as error:
        context.warn(f"noise_floor: {dtype or settings[0].implementation} is left out: {error}")
        yield None
        return
    try:
        yield other
    finally:
        other.close()
