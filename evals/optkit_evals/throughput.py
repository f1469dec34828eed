"""How fast a model answers: prefill and decode apart, latencies, peak memory and the bandwidth that decoding reaches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Annotated, ClassVar

from pydantic import Field

from optkit.environment import describe_environment
from optkit.errors import EvalError, ResourceError
from optkit.measure import Eval, EvalContext, Metric, Session
from optkit.statistics import Estimate, mean, mean_estimate, standard_error
from optkit_evals.peak_memory import Peak, watched_peak
from optkit_evals.timing import SETTLED, Timing, answer, random_tokens, warm_up

Positive = Annotated[int, Field(ge=1)]

WIDE_SPREAD = 0.10
"""Standard deviation over mean of the repeats, from which on the user is warned."""
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


class Throughput(Eval):
    """Prefill and decode tokens per second, time to first token, inter-token latency, peak memory, achieved bandwidth."""

    version: ClassVar[int] = 2
    timed: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = (
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "time_to_first_token_s",
        "inter_token_p50_s",
        "inter_token_p95_s",
        "inter_token_p99_s",
        "decode_bytes_per_s",
        "peak_memory_bytes",
    )

    batch_sizes: tuple[Positive, ...] = Field(default=(1,), min_length=1)
    """Sequences at once; each is measured with each prompt length."""
    prompts: tuple[Positive, ...] = Field(default=(128,), min_length=1)
    """Prompt lengths in tokens."""
    new_tokens: int = Field(default=64, ge=2)
    """Tokens generated after the prompt."""
    repeats: int = Field(default=5, ge=2)
    """Measured runs; one alone would have no interval."""
    warmup: int = Field(default=2, ge=1)
    """Runs before these, at least; more follow until two in succession agree within 10%."""

    def row_labels(self) -> tuple[dict[str, int | str], ...]:
        """Return batch, prompt and new tokens of each configuration."""
        return tuple(self._labels(batch, prompt) for batch, prompt in product(self.batch_sizes, self.prompts))

    def longest_sequence(self) -> int:
        """Return the tokens of the longest prompt with its answer."""
        return max(self.prompts) + self.new_tokens

    def run(self, session: Session, context: EvalContext) -> list[Metric]:
        """Measure; raises EvalError where the model has too few positions, ResourceError where memory runs out."""
        if self.longest_sequence() > session.positions:
            raise EvalError(
                f"a prompt of {max(self.prompts)} and {self.new_tokens} new tokens are {self.longest_sequence()}, and the model has"
                f" {session.positions} positions",
                where="throughput",
                remedy="Shorten prompts or new_tokens",
            )
        protocol = self._protocol(session, context.seed)
        configurations = list(product(self.batch_sizes, self.prompts))
        repeats = context.turn.share(self.repeats)
        found: list[Metric] = []
        turn = f", turn {context.turn.index + 1} of {context.turn.count}" if context.turn.count > 1 else ""
        with context.progress.task(f"throughput{turn}", len(configurations) * repeats, "runs") as task:
            for batch, prompt in configurations:
                label = f"batch {batch}, prompt {prompt}"
                tokens = random_tokens(session, batch, prompt, context.seed)
                with _memory_named(f"throughput at {label}, {self.new_tokens} new tokens", session.device):
                    with context.progress.task(f"warming up, {label}", 0, "runs") as warming:
                        runs, settled = warm_up(session, tokens, self.new_tokens, self.warmup, warming)
                    timings = []
                    with watched_peak(session.device, session.hidden_memory) as peak:
                        for _ in range(repeats):
                            timings.append(answer(session, tokens, self.new_tokens))
                            task.advance(note=label)
                for warning in _warnings(peak, runs, settled):
                    context.warn(f"throughput, {label}: {warning}")
                found += self._metrics(session, timings, peak, batch, prompt, protocol)
        return found

    def pool(self, turns: Sequence[Sequence[Metric]], context: EvalContext) -> list[Metric]:
        """Return the metrics of all turns as those of one, and warn where the repeats lie far apart."""
        found = super().pool(turns, context)
        for batch, prompt in product(self.batch_sizes, self.prompts):
            labels = self._labels(batch, prompt)
            samples = {metric.name: metric.samples for metric in found if metric.labels == labels}
            pairs = zip(samples["time_to_first_token_s"], samples["decode_tokens_per_s"], strict=True)
            times = [first_s + batch * (self.new_tokens - 1) / rate for first_s, rate in pairs]
            spread = standard_error(times) * len(times) ** 0.5 / mean(times)
            if spread > WIDE_SPREAD:
                context.warn(
                    f"throughput, batch {batch}, prompt {prompt}: the repeats spread by {spread:.0%} of their mean;"
                    f" raise repeats, or run again with --retime on a quiet machine"
                )
        return found

    def _labels(self, batch: int, prompt: int) -> dict[str, int | str]:
        return {"batch": batch, "prompt": prompt, "new_tokens": self.new_tokens}

    def _metrics(self, session: Session, timings: list[Timing], peak: Peak, batch: int, prompt: int, protocol: str) -> list[Metric]:
        labels = self._labels(batch, prompt)
        decoded = self.new_tokens - 1
        step_bytes = session.decode_bytes(batch, prompt + self.new_tokens // 2)
        measured = (
            ("prefill_tokens_per_s", "tokens/s", True, [batch * prompt / each.first_token_s for each in timings]),
            ("decode_tokens_per_s", "tokens/s", True, [batch * decoded / each.decode_s for each in timings]),
            ("time_to_first_token_s", "s", False, [each.first_token_s for each in timings]),
            ("inter_token_p50_s", "s", False, [each.between_quantile_s(0.50) for each in timings]),
            ("inter_token_p95_s", "s", False, [each.between_quantile_s(0.95) for each in timings]),
            ("inter_token_p99_s", "s", False, [each.between_quantile_s(0.99) for each in timings]),
            ("decode_bytes_per_s", "bytes/s", True, [step_bytes * decoded / each.decode_s for each in timings]),
        )
        found = []
        for name, unit, higher_is_better, samples in measured:
            estimate = mean_estimate(samples) if len(samples) > 1 else Estimate(samples[0])
            found.append(
                Metric(
                    name=name,
                    labels=labels,
                    value=estimate.value,
                    unit=unit,
                    higher_is_better=higher_is_better,
                    interval=estimate.interval,
                    protocol=protocol,
                    samples=tuple(samples),
                    pairing="independent",
                )
            )
        if peak.size_bytes is not None:
            found.append(
                Metric(
                    name="peak_memory_bytes",
                    labels=labels,
                    value=peak.size_bytes,
                    unit="bytes",
                    higher_is_better=False,
                    protocol=protocol,
                )
            )
        return found

    def _protocol(self, session: Session, seed: int) -> str:
        environment = describe_environment(session.device)
        threads = f", {environment['cpu_threads']} threads" if session.device == "cpu" and "cpu_threads" in environment else ""
        memory = "resident set of the process" if session.device == "cpu" else "memory that torch allocated"
        return (
            f"random token ids (seed {seed}), greedy, no early stop; {self.warmup} warm-up runs and more until two agree within"
            f" {SETTLED:.0%}, then the mean of {self.repeats} repeats (of their percentiles, for latencies); where two models are compared,"
            f" half of the unmodified one's repeats come before the other's and half after; wall clock, device synchronised at each"
            f" token; prefill is up to the first token, decode after it;"
            f" memory is the largest {memory} during the repeats;"
            f" {environment['device_name']}{threads}, torch {environment['torch']}"
        )


def _warnings(peak: Peak, runs: int, settled: bool) -> Iterator[str]:
    if not settled:
        yield f"{runs} warm-up runs, and the last two still differ by more than {SETTLED:.0%}; something else may be using the machine"
    if peak.unknown:
        yield f"peak_memory_bytes is not reported: {peak.unknown}"


@contextmanager
def _memory_named(where: str, device: str) -> Iterator[None]:
    """Say at which configuration memory ran out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(sign in str(error).lower() for sign in NO_MEMORY):
            raise
        raise ResourceError(f"memory ran out on {device}", where=where, remedy="Lower batch_sizes, prompts or new_tokens") from error
