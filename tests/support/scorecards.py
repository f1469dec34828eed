"""Scorecards of made-up models, measured on the same windows and in the same turns."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from optkit.common.statistics import mean_estimate, neighbours_estimate
from optkit.measure import Metric
from optkit.scorecard import Scorecard, build_scorecard

TEXT = "wikitext2 test (revision 0123456789ab), first 12 windows of 256 tokens, no BOS; exp of the mean loss"
TURNS = "random token ids; mean of 4 turns, each in a fresh process; cpu"
CPU = {"device": "cpu", "device_name": "AMD EPYC", "cpu_cores": 2, "cpu_threads": 2, "torch": "2.13.0"}


def metric(name: str, value: float, unit: str, protocol: str, **fields: Any) -> Metric:
    """Return a number of which less is better, if `fields` do not say otherwise."""
    return Metric(
        **{"name": name, "value": value, "unit": unit, "higher_is_better": False, "protocol": protocol} | fields
    )


def perplexity(losses: Sequence[float], protocol: str = TEXT, **fields: Any) -> Metric:
    """Return a perplexity from the losses of windows."""
    loss = neighbours_estimate(losses)
    low, high = loss.interval or (loss.value, loss.value)
    told = {"interval": (math.exp(low), math.exp(high)), "samples": tuple(losses), "pairing": "paired_log"}
    return metric("perplexity", math.exp(loss.value), "perplexity", protocol, **told | fields)


def divergence(means: Sequence[float], protocol: str = TEXT, **fields: Any) -> Metric:
    """Return a mean divergence from those of windows."""
    found = neighbours_estimate(means, 0.0)
    told = {"interval": found.interval, "samples": tuple(means)}
    return metric("kl_divergence", found.value, "nats/token", f"{protocol}; KL", **told | fields)


def decode(rates: Sequence[float], batch: int = 1, protocol: str = TURNS, **fields: Any) -> Metric:
    """Return a speed of decoding from those of turns."""
    found = mean_estimate(rates, 0.0)
    told = {"labels": {"batch": batch}, "interval": found.interval, "samples": tuple(rates), "pairing": "paired_turns"}
    return metric("decode_tokens_per_s", found.value, "tokens/s", protocol, higher_is_better=True, **told | fields)


def size(size_bytes: float, protocol: str = "all files") -> Metric:
    """Return bytes on disk."""
    return metric("size_bytes", size_bytes, "bytes", protocol)


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
