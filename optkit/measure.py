"""What a measurement is: a `Session` to measure, an `Eval` that measures it, and the `Metric`s that come out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from optkit.frozen import Frozen
from optkit.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from torch import Tensor


class Session(Protocol):
    """An opened model, whatever runs it (torch, ONNX Runtime, vLLM): evals see nothing else."""

    directory: Path
    """The weights that were opened."""
    device: str
    vocabulary: int
    """Width of the logits."""
    positions: int
    """Longest sequence that the model was built for, in tokens."""
    notes: tuple[str, ...]
    """What is in force and what fell back, one sentence each, e.g. `int4: 210 of 210 layers use torch's CPU kernel`."""

    def encode(self, text: str) -> Tensor:
        """Return the token ids of a text, int64 [tokens], with the special tokens that the tokenizer itself adds."""
        ...

    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [batch, sequence] -> float32 [batch, sequence, vocabulary], on the session's device."""
        ...

    def generate(self, tokens: Tensor, new_tokens: int) -> Tensor:
        """int64 [batch, prompt] -> int64 [batch, prompt + new_tokens], greedy; never stops early."""
        ...

    def stream(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        """Yield the `new_tokens` greedy tokens, int64 [batch], one at a time, each when the device has finished it."""
        ...

    def decode_bytes(self, batch: int, context: int) -> int:
        """Return the fewest bytes of weights and KV cache that one decode step must read at this batch and context length."""
        ...

    def close(self) -> None:
        """Give the memory back; the session cannot be used afterwards."""
        ...


class Metric(Frozen):
    """One number with its unit, its uncertainty and the protocol that it was measured by."""

    name: str
    labels: dict[str, int | str] = {}
    """What tells metrics of one name apart, e.g. `{"batch": 1, "prompt": 128}`."""
    value: float
    unit: str
    higher_is_better: bool
    interval: tuple[float, float] | None = None
    """95% interval; None for a count that has no error."""
    protocol: str
    """Everything that must be equal for two numbers to be compared."""
    samples: tuple[float, ...] = ()
    """Raw samples behind the value (window losses in nats, seconds of repeats, ...)."""
    pairing: Literal["exact", "paired_log", "independent"] = "exact"
    """How a ratio to the baseline is formed: `exact` divides the values; `paired_log` takes exp of the mean difference of samples
    that lie on the same tokens; `independent` divides values whose samples are unrelated repeats."""


@dataclass(frozen=True)
class EvalContext:
    """What an eval gets beside the session."""

    seed: int = 0
    progress: Progress = field(default_factory=SilentProgress)
    data: Path | None = None
    """Directory with local copies of data sets, if the user named one."""
    baseline: Session | None = None
    """The unmodified model, opened as well; only for evals with `compares = True`."""
    calibrated_on: tuple[Mapping[str, str], ...] = ()
    """The texts that shaped the weights (`TextSource.identity()`); an eval refuses to measure on them."""


class Eval(Frozen):
    """A measurement: fields are its YAML keys. `version` is raised when equal fields begin to measure differently."""

    version: ClassVar[int] = 1
    requires: ClassVar[tuple[str, ...]] = ()
    compares: ClassVar[bool] = False
    """Needs the baseline session beside the artifact's, and is not run on the baseline itself."""
    timed: ClassVar[bool] = False
    """Depends on the device and library versions, and must be measured for artifact and baseline in the same run."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics that `run` returns, so that a recipe's gates can be checked before anything runs."""

    def run(self, session: Session, context: EvalContext) -> list[Metric]:
        """Measure the session. Raises EvalError where the number could not be had or would not be honest."""
        raise NotImplementedError
