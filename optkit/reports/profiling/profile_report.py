"""What a profile says, as plain data."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from optkit.common.frozen import Frozen

Kind: TypeAlias = Literal["matmul", "attention", "norm", "elementwise", "copies", "compiled", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HIDDEN, FEWEST = 0.8, 20
"""Idle share from which on, and operations a step up to which, a phase is `hidden`."""
SHOWN = 15
"""Kernels or operations of a phase that are kept."""


class Line(Frozen):
    """A kernel of a GPU, or an operation of a CPU."""

    name: str
    kind: Kind
    seconds: float
    """Its own, without operations inside of it; all calls together."""
    calls: int


class Phase(Frozen):
    """Prefill, or the steps of decoding."""

    name: Literal["prefill", "decode"]
    steps: int
    """Forward passes: 1 for the prompt, one for each token after the first."""
    seconds: float
    """Of all steps, without a profiler."""
    traced_s: float
    """The same with the profiler, which slows down what is launched one by one."""
    idle_s: float
    """On a GPU: what is left of `seconds` when no kernel runs. On a CPU: what is left of `traced_s`
    outside of operations.
    """
    kinds: dict[Kind, float]
    """Seconds of each kind of operation."""
    calls: int
    """Kernels or operations."""
    top: tuple[Line, ...]
    """Those that took longest."""
    advice: str
    trace: str
    """The file for https://ui.perfetto.dev or chrome://tracing."""

    @property
    def whole_s(self) -> float:
        """What shares are of: all kinds and the idle time."""
        return sum(self.kinds.values()) + self.idle_s

    def share(self, *kinds: Kind) -> float:
        """Return the share of the time that some kinds of operations take."""
        return sum(self.kinds.get(kind, 0.0) for kind in kinds) / self.whole_s if self.whole_s else 0.0

    @property
    def hidden(self) -> bool:
        """Whether a step is so few operations that kernels called past torch must do its work."""
        return self.idle >= HIDDEN and self.calls <= FEWEST * self.steps

    @property
    def idle(self) -> float:
        """The share of the time in which nothing is computed."""
        return self.idle_s / self.whole_s if self.whole_s else 0.0


class ProfileReport(Frozen):
    """A profile of one request."""

    model: str
    device: str
    device_name: str
    engine: str
    """`torch` or `onnxruntime`."""
    batch: int
    prompt: int
    new_tokens: int
    phases: tuple[Phase, ...]
    settings: tuple[str, ...]
    """That were in force."""
    notes: tuple[str, ...]
    files: tuple[str, ...]
    """What was written, in the output directory."""
