"""How a model answers under load: requests arrive at random, wait, and share the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from optkit.common.field_types import AtLeastOne, BatchSize, Duration, Length, Rate, SequenceLength, Several
from optkit.common.grouping import by_key, common_prefix
from optkit.common.statistics import mean, quantile, quantile_interval
from optkit.measure import EvalContext, Metric, Session, TimedEval
from optkit.model.session_memory import SessionMemory
from optkit.progress import Task
from optkit_evals.meanings import row
from optkit_evals.serving import Served, poisson_requests, serve_continuously, serve_static
from optkit_evals.timing import check_room, device_text, uninterrupted

FIRST_TOKEN = {f"load_first_token_p{percent}_s": percent / 100 for percent in (50, 95, 99)}
INTER_TOKEN = {f"load_inter_token_p{percent}_s": percent / 100 for percent in (50, 95, 99)}
UNITS = {
    **dict.fromkeys((*FIRST_TOKEN, *INTER_TOKEN), "s"),
    "load_tokens_per_s": "tokens/s",
    "goodput_requests_per_s": "requests/s",
    "goodput_fraction": "fraction",
}
"""Metric -> unit."""
MEDIAN = "load_first_token_p50_s"
BEHIND = 1.25
"""Time that all requests took over the time in which they arrived, from which on the model does not
keep up.
"""


class Load(TimedEval):
    """Latencies and goodput while requests arrive at a rate.
    It gives time to first token (with waiting), between tokens, and requests in time.

    Goodput counts the requests whose first token and mean time between tokens kept the limits
    (DistServe, https://arxiv.org/abs/2401.09670).
    """

    kind: ClassVar[str] = "load"
    example: ClassVar[str] = "- load: {rates: [0.5, 1, 2], batch: 8}"
    version: ClassVar[int] = 4
    sets_length: ClassVar[tuple[str, ...]] = ("prompt", "new_tokens")
    metrics: ClassVar[Mapping[str, str]] = UNITS

    rates: AtLeastOne[Rate] = (1.0,)
    """Requests in a second, on average; they arrive independently of each other (a Poisson process,
    seeded).
    """
    requests: Several = 32
    """Requests of each rate."""
    prompt: Length = 128
    """Tokens of a request."""
    new_tokens: SequenceLength = 32
    """Tokens of an answer."""
    batch: BatchSize = 8
    """Requests that are computed together, at most."""
    batching: Literal["static", "continuous"] = "static"
    """`static`: a batch ends before the next begins. `continuous`: a request joins at the next
    step, by transformers' own engine with its paged KV cache; torch models without compile,
    speculative and quantized KV caches."""
    first_token_limit_s: Duration = 1.0
    """A request counts for goodput if its first token came within this time of its arrival."""
    inter_token_limit_s: Duration = 0.2
    """And if the mean time between its tokens was at most this."""
    repeats: Several = 8
    """Times that the requests are served, each time with other moments of arrival; shared among the
    turns.
    """

    def turns(self) -> int:
        return min(self.processes, self.repeats)

    def row_labels(self) -> tuple[dict[str, int | str], ...]:
        return tuple(self._labels(rate) for rate in self.rates)

    def longest_sequence(self) -> int:
        return self.prompt + self.new_tokens

    def working_bytes(self, model: SessionMemory) -> int:
        """Return what a full batch of prompts with their answers needs."""
        return (
            model.forward(self.batch, self.prompt)
            + 2 * model.logits(self.batch)
            + model.cache(self.batch, self.longest_sequence())
        )

    def arriving_s(self) -> float:
        return self.repeats * sum(self.requests / rate for rate in self.rates)

    def run(self, session: Session, context: EvalContext) -> list[Metric]:
        """Measure.
        Raises EvalError if the model has too few positions, or transformers' engine does not take
        it.
        """
        check_room(session, self.prompt, self.new_tokens, "load", "Shorten prompt or new_tokens")
        seeds = range(self.repeats)[context.turn.index :: context.turn.count]
        protocol = self._protocol(session, context.seed)
        found = []
        with (
            context.progress.task(
                f"load{context.turn.label}", len(self.rates) * len(seeds) * self.requests, "requests"
            ) as task,
            uninterrupted(),
        ):
            self._warm_up(session, context)
            for rate in self.rates:
                runs = [self._serve(session, rate, context.seed + seed, context, task) for seed in seeds]
                measured = [self._summary(run) for run in runs]
                first = tuple(each.first_token_s for run in runs for each in run)
                found += [
                    self._metric(name, rate, [each[name] for each in measured], protocol, first) for name in UNITS
                ]
        return found

    def pool(self, turns: Sequence[Sequence[Metric]], context: EvalContext) -> list[Metric]:
        """Return the metrics of all turns as one measurement's.

        The median time to the first token is that of all requests: whether the middle one of a
        few had to wait is chance, which few runs do not show. The intervals of these percentiles
        hold that of the requests' order, beside t over the turns.
        """
        metrics = (metric for turn in turns for metric in turn)
        times = by_key((_row(metric), time) for metric in metrics for run in metric.repeats for time in run)
        return [
            _of_all_requests(metric, times[_row(metric)], FIRST_TOKEN[metric.name])
            if metric.name in FIRST_TOKEN and len(metric.samples) > 1
            else metric
            for metric in super().pool(turns, context)
        ]

    def _serve(self, session: Session, rate: float, seed: int, context: EvalContext, task: Task) -> list[Served]:
        requests = poisson_requests(session, rate, self.requests, self.prompt, seed)
        serve = serve_static if self.batching == "static" else serve_continuously
        served = serve(session, requests, self.new_tokens, self.batch, task)
        took, arriving = max(each.end_s for each in served), requests[-1].arrival_s
        if took > BEHIND * arriving + max(each.end_s - each.arrival_s for each in served[: self.batch]):
            context.warn(
                f"load at {rate:g} requests/s: the last one arrived after {arriving:.1f} s and was served "
                f"after {took:.1f} s, so that"
                f" waiting grows with the number of requests: the numbers are those of this number, {self.requests}"
            )
        return served

    def _warm_up(self, session: Session, context: EvalContext) -> None:
        """Answer once at each batch size that may come, so that nothing is compiled later."""
        if self.batching == "continuous":
            few = poisson_requests(session, 1e6, self.batch, self.prompt, context.seed)
            with context.progress.task("warming up", 0, "requests") as task:
                served = serve_continuously(session, few, self.new_tokens, self.batch, task)
            plain = session.generate(few[0].tokens, self.new_tokens)[0, self.prompt :].tolist()
            if list(served[0].tokens) != plain:
                context.warn(
                    "load: transformers' engine generates other tokens than the model alone, from token "
                    f"{common_prefix(served[0].tokens, plain) + 1} of {self.new_tokens}"
                    f" on; it adds in another order, or its paged attention computes something else"
                )
            return
        sizes = range(1, self.batch + 1) if getattr(session, "compiled", False) else {1, self.batch}
        for size in sizes:
            few = poisson_requests(session, 1e6, size, self.prompt, context.seed)
            with context.progress.task(f"warming up, batch {size}", 0, "requests") as task:
                serve_static(session, few, self.new_tokens, size, task)

    def _summary(self, served: Sequence[Served]) -> dict[str, float]:
        first = [each.first_token_s for each in served]
        between = [gap for each in served for gap in each.between_tokens_s]
        took = max(each.end_s for each in served) - min(each.arrival_s for each in served)
        first_s, between_s = self.first_token_limit_s, self.inter_token_limit_s
        good = sum(each.first_token_s <= first_s and mean(each.between_tokens_s) <= between_s for each in served)
        return {
            **{name: quantile(first, fraction) for name, fraction in FIRST_TOKEN.items()},
            **{name: quantile(between, fraction) for name, fraction in INTER_TOKEN.items()},
            "load_tokens_per_s": len(served) * self.new_tokens / took,
            "goodput_requests_per_s": good / took,
            "goodput_fraction": good / len(served),
        }

    def _labels(self, rate: float) -> dict[str, int | str]:
        shown = int(rate) if rate == int(rate) else f"{rate:g}"
        return {"rate": shown, "prompt": self.prompt, "new_tokens": self.new_tokens, "batching": self.batching}

    def _metric(
        self, name: str, rate: float, samples: Sequence[float], protocol: str, first: tuple[float, ...] = ()
    ) -> Metric:
        share = name == "goodput_fraction"
        return row(
            self,
            name,
            quantile(first, 0.5) if name == MEDIAN and first else mean(samples),
            protocol,
            samples,
            labels=self._labels(rate),
            trials=(self.requests,) * len(samples) if share else (),
            pairing="independent" if share or name == MEDIAN else "paired_turns",
            repeats=(first,) if name in FIRST_TOKEN else (),
        )

    def _protocol(self, session: Session, seed: int) -> str:
        return (
            f"{self.requests} requests of random token ids arriving as a Poisson process (seed {seed} "
            "and following), greedy, no early"
            f" stop; {self.batching} batching, at most {self.batch} requests together; {self.repeats} "
            "runs: the median time to the first token of all requests, the mean of the runs' other "
            f"percentiles; {self.turns_text()};"
            f" wall clock from a request's arrival; goodput: first token within {self.first_token_limit_s:g} "
            f"s and at most {self.inter_token_limit_s:g} s between tokens on average; {device_text(session.device)}"
        )


def _row(metric: Metric) -> str:
    return f"{metric.name} {sorted(metric.labels.items())}"


def _of_all_requests(metric: Metric, times: Sequence[float], fraction: float) -> Metric:
    """Return a pooled percentile with an interval that holds that of the order of all times."""
    value = quantile(times, fraction) if metric.name == MEDIAN else metric.value
    low, high = metric.interval or (value, value)
    moved = value - metric.value
    least, most = quantile_interval(times, fraction)
    interval = max(0.0, min(low + moved, least)), max(high + moved, most)
    return metric.model_copy(update={"value": value, "interval": interval})
