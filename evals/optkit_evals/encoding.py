"""How fast an encoder encodes: latency, sequences per second and peak memory, by batch and length."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, ClassVar

from optkit.common.field_types import AtLeastOne, BatchSize, Length, Several
from optkit.common.statistics import mean, quantile
from optkit.devices.peak_memory import Peak, watched_peak
from optkit.errors import EvalError
from optkit.measure import EncoderSession, EvalContext, Metric, TimedEval
from optkit.model.session_memory import SessionMemory
from optkit.model.task import ENCODING, Task
from optkit_evals.configurations import measure_each
from optkit_evals.meanings import row
from optkit_evals.timing import device_text, random_tokens

if TYPE_CHECKING:
    from torch import Tensor

SETTLED = 0.05
"""Medians of two successive groups of warm-up calls that differ by less than this fraction: caches,
clocks and threads have settled.
"""
GROUP = 5
"""Warm-up calls whose median is taken."""
MOST_GROUPS = 20
WIDE_SPREAD = 0.10
"""Half of a 95% interval over its mean, from which on the user is warned."""


@dataclass(frozen=True)
class Cell:
    """One configuration: sequences at once, tokens of each."""

    batch: int
    length: int

    @property
    def labels(self) -> dict[str, int | str]:
        return {"batch": self.batch, "length": self.length}

    def __str__(self) -> str:
        return f"batch {self.batch}, length {self.length}"


class Encoding(TimedEval):
    """Latency of encoding (median and 95th percentile), sequences per second, peak memory.
    Each batch size and sequence length has its own rows.

    Timed is what a server does for texts that are tokenized already: the whole model, and for an
    encoder that gives features the pooling.
    """

    kind: ClassVar[str] = "encoding"
    example: ClassVar[str] = "- encoding: {batch_sizes: [1, 8], lengths: [16, 128]}"
    for_tasks: ClassVar[frozenset[Task]] = ENCODING
    sets_length: ClassVar[tuple[str, ...]] = ("lengths",)
    version: ClassVar[int] = 2
    metrics: ClassVar[Mapping[str, str]] = {
        "latency_p50_s": "s",
        "latency_p95_s": "s",
        "sequences_per_s": "sequences/s",
        "peak_memory_bytes": "bytes",
    }

    batch_sizes: AtLeastOne[BatchSize] = (1, 8)
    """Sequences at once; each is measured with each length."""
    lengths: AtLeastOne[Length] = (16, 128)
    """Tokens of a sequence; all of a batch are of one length, so that nothing is padded."""
    calls: Several = 20
    """Calls of a repeat, of whose times the percentiles are taken."""
    repeats: Several = 8
    """Measured repeats of all turns together."""

    def cells(self) -> list[Cell]:
        return [Cell(*each) for each in product(self.batch_sizes, self.lengths)]

    def row_labels(self) -> tuple[dict[str, int | str], ...]:
        return tuple(cell.labels for cell in self.cells())

    def longest_sequence(self) -> int:
        return max(self.lengths)

    def working_bytes(self, model: SessionMemory) -> int:
        return max(model.forward(cell.batch, cell.length) for cell in self.cells())

    def run(self, session: EncoderSession, context: EvalContext) -> list[Metric]:
        """Measure; a configuration that does not fit into memory is marked, and the next one runs.

        Raises EvalError if the model has too few positions, ResourceError if memory runs out
        in every configuration.
        """
        if self.longest_sequence() > session.positions:
            what = f"sequences of {self.longest_sequence():,} tokens, and the model has {session.positions:,} positions"
            raise EvalError(what, where="encoding", remedy=f"Set lengths to at most {session.positions}")
        protocol = self._protocol(session, context.seed)
        repeats = context.turn.share(self.repeats)
        with context.progress.task(f"encoding{context.turn.label}", len(self.cells()) * repeats, "runs") as task:

            def measure(cell: Cell) -> list[Metric]:
                encode = Timed(session, random_tokens(session, cell.batch, cell.length, context.seed).cpu())
                if not encode.settles():
                    context.warn(
                        f"encoding, {cell}: after {GROUP * MOST_GROUPS} warm-up calls medians still differ "
                        f"by more than {SETTLED:.0%}; something else may be using the machine"
                    )
                times: list[list[float]] = []
                with watched_peak(session.device, session.hidden_memory) as peak:
                    for _ in range(repeats):
                        times.append([encode() for _ in range(self.calls)])
                        task.advance(note=str(cell))
                if peak.unknown:
                    context.warn(f"encoding, {cell}: peak_memory_bytes is not reported: {peak.unknown}")
                return list(_metrics(self, cell, times, peak, protocol))

            return measure_each(self.cells(), measure, session, context, "encoding", "Lower batch_sizes or lengths")

    def pool(self, turns: Sequence[Sequence[Metric]], context: EvalContext) -> list[Metric]:
        """Return the metrics of all turns as one measurement's; warn if the turns lie far apart."""
        found = super().pool(turns, context)
        for metric in found:
            low, high = metric.interval or (metric.value, metric.value)
            if metric.name == "latency_p50_s" and high - low > 2 * WIDE_SPREAD * metric.value:
                cell = Cell(int(metric.labels["batch"]), int(metric.labels["length"]))
                context.warn(
                    f"encoding, {cell}: the medians of the turns are uncertain by "
                    f"{(high - low) / 2 / metric.value:.0%}; run again with --retime on a quiet machine"
                )
        return found

    def _protocol(self, session: EncoderSession, seed: int) -> str:
        cpu = session.device == "cpu"
        what = f"embeddings ({session.pooling})" if session.pooling else "logits"
        return (
            f"random token ids (seed {seed}) of one length, no padding, to {what} in main memory, tokenizing "
            f"not counted; warm-up calls until the medians of two groups of {GROUP} agree within {SETTLED:.0%}, then "
            f"{math.ceil(self.repeats / self.turns())} repeats"
            f" of {self.calls} calls, one after the other: percentiles of each repeat, and their "
            f"mean; {self.turns_text()}; wall clock; memory is the largest"
            f" {'resident set of the process' if cpu else 'memory that torch allocated'} during the repeats;"
            f" {device_text(session.device)}"
        )


class Timed:
    """Calls of a session on the same tokens, each timed."""

    def __init__(self, session: EncoderSession, tokens: Tensor) -> None:
        import torch

        self._tokens, self._mask = tokens, torch.ones_like(tokens)
        self._call = session.embed if session.pooling else session.outputs

    def __call__(self) -> float:
        """Return the seconds of one call."""
        start = time.perf_counter()
        self._call(self._tokens, self._mask)
        return time.perf_counter() - start

    def settles(self) -> bool:
        """Call until two successive medians agree; say whether they ever did."""
        last = self._group()
        for _ in range(MOST_GROUPS - 1):
            before, last = last, self._group()
            if abs(last - before) < SETTLED * before:
                return True
        return False

    def _group(self) -> float:
        return median(self() for _ in range(GROUP))


def _metrics(of: Encoding, cell: Cell, times: Sequence[Sequence[float]], peak: Peak, protocol: str) -> Iterator[Metric]:
    samples = {
        "latency_p50_s": [quantile(each, 0.50) for each in times],
        "latency_p95_s": [quantile(each, 0.95) for each in times],
        "sequences_per_s": [cell.batch * len(each) / sum(each) for each in times],
    }
    values: dict[str, float | None] = {name: mean(each) for name, each in samples.items()}
    for name, value in {**values, "peak_memory_bytes": peak.size_bytes}.items():
        if value is not None:
            yield row(of, name, value, protocol, samples.get(name, ()), labels=cell.labels, pairing="paired_turns")
