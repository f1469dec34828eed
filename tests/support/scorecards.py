"""Scorecards of made-up models, measured on the same windows and in the same turns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from optkit.common.statistics import mean_estimate, neighbours_estimate
from optkit.measure import Metric
from optkit.scorecard import Scorecard, build_scorecard

TEXT = "wikitext2 test (revision 0123456789ab), first 12 windows of 256 tokens, no BOS; exp of the mean loss"
TURNS = "random token ids; mean of 4 turns, each in a fresh process; cpu"
CPU = {"device": "cpu", "device_name": "AMD EPYC", "cpu_cores": 2, "cpu_threads": 2, "torch": "2.13.0"}


def perplexity(losses: Sequence[float], protocol: str = TEXT) -> Metric:
    """Return a perplexity from the losses of windows."""
    loss = neighbours_estimate(losses)
    low, high = loss.interval or (loss.value, loss.value)
    return Metric(
        name="perplexity",
        value=math.exp(loss.value),
        unit="perplexity",
        higher_is_better=False,
        interval=(math.exp(low), math.exp(high)),
        protocol=protocol,
        samples=tuple(losses),
        pairing="paired_log",
    )


def divergence(means: Sequence[float], protocol: str = TEXT) -> Metric:
    """Return a mean divergence from those of windows."""
    found = neighbours_estimate(means, 0.0)
    return Metric(
        name="kl_divergence",
        value=found.value,
        unit="nats/token",
        higher_is_better=False,
        interval=found.interval,
        protocol=f"{protocol}; KL",
        samples=tuple(means),
    )


def decode(rates: Sequence[float], batch: int = 1, protocol: str = TURNS) -> Metric:
    """Return a speed of decoding from those of turns."""
    found = mean_estimate(rates, 0.0)
    return Metric(
        name="decode_tokens_per_s",
        labels={"batch": batch},
        value=found.value,
        unit="tokens/s",
        higher_is_better=True,
        interval=found.interval,
        protocol=protocol,
        samples=tuple(rates),
        pairing="paired_turns",
    )


def size(size_bytes: float) -> Metric:
    """Return bytes on disk."""
    return Metric(name="size_bytes", value=size_bytes, unit="bytes", higher_is_better=False, protocol="all files")


def card(
    name: str,
    metrics: Sequence[Metric],
    baseline: Sequence[Metric] = (),
    gates: Mapping[str, str] | None = None,
    stages: Sequence[Any] = (),
    environment: Mapping[str, Any] = CPU,
    model: str = "small",
    key: str = "",
) -> Scorecard:
    """Return the scorecard of a recipe's artifact."""
    return build_scorecard(
        name=name,
        artifact_key=(key or name).encode().hex().ljust(64, "0")[:64],
        recipe={"name": name, "model": {"name": model}, "stages": list(stages)},
        metrics=metrics,
        baseline=baseline,
        gates=gates,
        environment=environment,
    )
