"""Every 95% interval holds the truth in 93 of 100 simulated measurements or more, at the sizes that
evals and recipes have by default.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray
from optkit_evals.embedding import FEWEST_FOR_LOW, LOW, Embedding, pairwise, spearman, spearman_estimate
from optkit_evals.encoding import Encoding
from optkit_evals.harness.aggregating import Aggregated, Scored
from optkit_evals.load import FIRST_TOKEN, MEDIAN, Load
from optkit_evals.speculation import Speculation
from optkit_evals.throughput import Throughput

from optkit.common.paired_items import mcnemar, mean_of_ratios, paired_share_ratio
from optkit.common.statistics import (
    Estimate,
    binomial_interval,
    neighbours_estimate,
    paired_log_ratio,
    quantile_interval,
    share_estimate,
    tail_estimate,
)
from optkit.measure import EvalContext, Metric, TimedEval
from optkit.scorecard import ratio_to_baseline
from tests.support.crossed import crossed, few

LEAST = 0.93
WINDOWS = 12
"""Of perplexity in the recipes."""
COMPARED = 4
"""Of divergence in the recipes."""
SEEN = 0.4
"""Correlation of neighbouring windows' losses and divergences
(`optkit.common.statistics.NEIGHBOURS`).
"""
SEEN_PAIRED = 0.15
"""That of the differences of two models' losses."""
Draw = NDArray[numpy.float64]


@pytest.fixture
def chance() -> numpy.random.Generator:
    return numpy.random.default_rng(14)


def coverage(estimates: Iterable[Estimate], truth: float) -> float:
    intervals = [estimate.interval or (estimate.value, estimate.value) for estimate in estimates]
    return sum(low <= truth <= high for low, high in intervals) / len(intervals)


def neighbours(chance: numpy.random.Generator, draws: int, count: int, correlation: float) -> Draw:
    """Return normal numbers of variance 1 [draws, count] that depend on the one before, from their
    stationary state on.
    """
    found = chance.normal(size=(draws, count))
    for index in range(1, count):
        found[:, index] = correlation * found[:, index - 1] + math.sqrt(1 - correlation**2) * found[:, index]
    return found


@pytest.mark.parametrize(("correlation", "count"), crossed([0.0, 0.2, SEEN], [2, COMPARED, 8, WINDOWS, 40, 149]))
def test_perplexity_of_windows_that_correlate(chance: numpy.random.Generator, count: int, correlation: float) -> None:
    losses = 2.3 + 0.3 * neighbours(chance, 2000, count, correlation)
    assert coverage((neighbours_estimate(row) for row in losses.tolist()), 2.3) >= LEAST


@pytest.mark.parametrize(("correlation", "count"), crossed([0.0, SEEN_PAIRED, 0.2], [2, COMPARED, WINDOWS, 149]))
def test_the_ratio_of_perplexities(chance: numpy.random.Generator, count: int, correlation: float) -> None:
    shared = 0.3 * neighbours(chance, 2000, count, SEEN)
    changed = shared + 0.33 + 0.04 * neighbours(chance, 2000, count, correlation)
    assert (
        coverage(
            (paired_log_ratio(*pair) for pair in zip(changed.tolist(), shared.tolist(), strict=True)), math.exp(0.33)
        )
        >= LEAST
    )


def divergences(chance: numpy.random.Generator, draws: int, windows: int, tokens: int = 1023) -> Draw:
    """Return divergences [draws, windows, tokens] with the spread, the tail and the correlations of
    those of an INT4 SmolLM2-135M.
    """
    text = 0.1 * neighbours(chance, draws, windows, SEEN)
    within = neighbours(chance, draws * windows, tokens, 0.2).reshape(draws, windows, tokens)
    return numpy.exp(text[..., None] + 0.85 * within)


@pytest.mark.parametrize("windows", [2, COMPARED, 8])
def test_divergence_and_its_tail(chance: numpy.random.Generator, windows: int) -> None:
    drawn = divergences(chance, 600, windows)
    spread = math.hypot(0.1, 0.85)
    means = (neighbours_estimate(row, 0.0) for row in drawn.mean(axis=2).tolist())
    assert coverage(means, math.exp(spread**2 / 2)) >= LEAST
    tails = (tail_estimate(groups, 0.99) for groups in drawn.tolist())
    assert coverage(tails, math.exp(2.326348 * spread)) >= LEAST


@pytest.mark.parametrize(("windows", "agreement"), crossed([2, COMPARED], [0.7, 0.97, 0.9995]))
def test_top1_agreement(chance: numpy.random.Generator, windows: int, agreement: float) -> None:
    text = neighbours(chance, 20000, windows, SEEN)
    rates = 1 / (1 + numpy.exp(-(math.log(agreement / (1 - agreement)) + 0.15 * text)))
    shares = chance.binomial(1023, rates) / 1023
    estimates = (share_estimate(row, [1023] * windows, neighbours=True) for row in shares[:400].tolist())
    assert coverage(estimates, float(rates.mean())) >= LEAST


def pooled(eval: TimedEval, turns: list[Metric]) -> Metric:
    (metric,) = TimedEval.pool(eval, [[turn] for turn in turns], EvalContext())
    return metric


def metric(
    value: float, pairing: str = "paired_turns", trials: tuple[int, ...] = (), samples: tuple[float, ...] = ()
) -> Metric:
    fields = {
        "name": "m",
        "unit": "fraction" if trials else "s",
        "higher_is_better": True,
        "protocol": "p",
        "pairing": pairing,
    }
    return Metric(value=value, trials=trials, samples=samples, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.98, 0.999])
def test_agreement_of_a_few_prompts(chance: numpy.random.Generator, rate: float) -> None:
    eval = Speculation(dataset="wikitext2")
    assert eval.windows
    each = eval.windows // eval.turns()
    draws = (chance.random((1500, eval.turns(), each)) < rate).astype(float)
    found = [
        pooled(eval, [metric(sum(row) / each, "independent", (1,) * each, tuple(row)) for row in turns])
        for turns in draws.tolist()
    ]
    assert coverage((Estimate(one.value, one.interval) for one in found), rate) >= LEAST


def served(chance: numpy.random.Generator, runs: int, requests: int, batch: int, seconds: float) -> tuple[Draw, Draw]:
    """Return the first tokens' times [runs, requests] under static batching, a batch taking
    `seconds`, and how long each run took.
    """
    arrivals = numpy.cumsum(chance.exponential(size=(runs, requests)), axis=1)
    first, begun, free = numpy.zeros((runs, requests)), numpy.zeros(runs, dtype=int), numpy.zeros(runs)
    places, rows = numpy.arange(requests), numpy.arange(runs)
    while (open_ := begun < requests).any():
        start = numpy.maximum(free, arrivals[rows, numpy.minimum(begun, requests - 1)])
        together = (
            (places >= begun[:, None])
            & (arrivals <= start[:, None])
            & (places < (begun + batch)[:, None])
            & open_[:, None]
        )
        first = numpy.where(together, start[:, None] + seconds / 10 - arrivals, first)
        begun, free = begun + together.sum(axis=1), numpy.where(open_, start + seconds, free)
    return first * numpy.exp(chance.normal(0, 0.02, first.shape)), free - arrivals[:, 0]


def answered(eval: Load, first: Draw, name: str) -> list[Metric]:
    """Return the metric of each measurement, of times [draws, turns, runs, requests]."""
    fraction = FIRST_TOKEN[name]
    percentiles, requests = numpy.quantile(first, fraction, axis=3), first.reshape(*first.shape[:2], -1)
    found = []
    for run in zip(percentiles.tolist(), requests.tolist(), strict=True):
        turns = [[eval._metric(name, 1.0, each, "p", tuple(times))] for each, times in zip(*run, strict=True)]
        found += eval.pool(turns, EvalContext())
    return found


@pytest.mark.parametrize("seconds", few(0.1, 0.4, 0.9, 2.5, slow=(0.3, 0.5, 0.6)))
def test_times_to_the_first_token_under_load(chance: numpy.random.Generator, seconds: float) -> None:
    """From an idle machine to one that always has a full batch waiting; at 0.4 one request of three
    waits, and the median of a run of 32 is now and then that of one that waited.
    """
    eval = Load()
    shape = (-1, eval.turns(), eval.repeats // eval.turns(), eval.requests)
    runs = 500 * eval.repeats
    some = [served(chance, runs, eval.requests, eval.batch, each)[0].reshape(shape) for each in (seconds, seconds / 2)]
    for name, fraction in FIRST_TOKEN.items():
        truths = [
            float(numpy.quantile(first, fraction) if name == MEDIAN else numpy.quantile(first, fraction, axis=3).mean())
            for first in some
        ]
        slow, fast = (answered(eval, first, name) for first in some)
        assert coverage((Estimate(each.value, each.interval) for each in slow), truths[0]) >= LEAST
        if name == MEDIAN:
            ratios = (ratio_to_baseline(*pair) for pair in zip(fast, slow, strict=True))
            assert coverage(ratios, truths[1] / truths[0]) >= LEAST


@pytest.mark.parametrize(
    ("items", "chances"),
    crossed([20, 100, 334, 1000], [(0.55, 0.02, 0.02), (0.5, 0.1, 0.05), (0.9, 0.02, 0.03), (0.2, 0.05, 0.02)]),
)
def test_the_ratio_of_shares_on_the_same_items(chance: numpy.random.Generator, items: int, chances: Any) -> None:
    """Chances: both models right, the baseline alone, the other alone."""
    both, lost, won = chances
    drawn = chance.multinomial(items, [*chances, 1 - sum(chances)], size=1500)[:, :3].tolist()
    found = [paired_share_ratio(*row) for row in drawn if row[0] + row[1]]
    assert len(found) > 1450
    assert coverage(found, (both + won) / (both + lost)) >= LEAST


@pytest.mark.parametrize(
    ("items", "ways"),
    crossed([40, 334], [((0.55, 0.03, 0.02), (0.4, 0.08, 0.04)), ((0.7, 0.01, 0.01), (0.3, 0.0, 0.0))]),
)
def test_what_is_left_of_several_tasks(chance: numpy.random.Generator, items: int, ways: Any) -> None:
    """Of each task: the chances that both models are right, the baseline alone, the other alone."""
    ours, theirs = numpy.array([1.0, 0.0, 1.0, 0.0]), numpy.array([1.0, 1.0, 0.0, 0.0])
    drawn = [chance.multinomial(items, [*each, 1 - sum(each)], size=600) for each in ways]
    found = [
        mean_of_ratios([(numpy.repeat(ours, row).tolist(), numpy.repeat(theirs, row).tolist()) for row in rows])
        for rows in zip(*drawn, strict=True)
    ]
    truth = sum(both + won for both, _, won in ways) / sum(both + lost for both, lost, _ in ways)
    assert coverage(found, truth) >= LEAST


@pytest.mark.parametrize(("weighted", "sizes"), crossed([True, False], [(100, 30, 12), (5,) * 12]))
def test_the_number_of_a_group_of_tasks(chance: numpy.random.Generator, sizes: Any, weighted: bool) -> None:
    rights = numpy.linspace(0.25, 0.9, len(sizes))
    truth = float(numpy.average(rights, weights=(weights := sizes if weighted else (1,) * len(sizes))))
    intervals = cache(binomial_interval)

    def number(hits: list[int]) -> Metric:
        each = [
            (metric(hit / size, "independent"), intervals(hit, size)) for hit, size in zip(hits, sizes, strict=True)
        ]
        parts = [Scored(None, None, one.model_copy(update={"interval": ends})) for one, ends in each]
        value = float(numpy.average([part.metric.value for part in parts], weights=weights))
        return Aggregated(None, {}, value, weights, tuple(parts)).metric("")

    drawn = [chance.binomial(size, right, size=300).tolist() for size, right in zip(sizes, rights, strict=True)]
    found = [number(hits) for hits in zip(*drawn, strict=True)]
    assert coverage((Estimate(one.value, one.interval) for one in found), truth) >= LEAST


@pytest.mark.parametrize("turning", [0.0, 0.01, 0.1])
def test_a_model_on_the_same_items_twice_shows_no_difference(chance: numpy.random.Generator, turning: float) -> None:
    shares = [0.55 - turning / 2, turning / 2, turning / 2, 0.45 - turning / 2]
    drawn = chance.multinomial(334, shares, size=2000)[:, :3].tolist()
    assert coverage((paired_share_ratio(*row) for row in drawn), 1.0) >= 0.95 - 0.01
    assert sum(mcnemar(lost, won) > 0.05 for _, lost, won in drawn) / len(drawn) >= 0.95


@pytest.mark.parametrize("seconds", few(0.5, 0.95, 2.5, slow=(0.9, 1.3)))
def test_goodput_under_load(chance: numpy.random.Generator, seconds: float) -> None:
    eval = Load()
    draws, turns, each = 1000, eval.turns(), eval.repeats // eval.turns()
    first, took = served(chance, draws * turns * each, eval.requests, eval.batch, seconds)
    good = (first <= eval.first_token_limit_s).sum(axis=1)
    shares = (good / eval.requests).reshape(draws, turns, each)
    trials = (eval.requests,) * each
    runs = ([metric(sum(row) / each, "independent", trials, tuple(row)) for row in run] for run in shares.tolist())
    fractions = [pooled(eval, run) for run in runs]
    assert coverage((Estimate(one.value, one.interval) for one in fractions), float(shares.mean())) >= LEAST
    values = (good / took).reshape(draws, turns, each).mean(axis=2)
    found = [pooled(eval, [metric(value) for value in row]) for row in values.tolist()]
    assert coverage((Estimate(one.value, one.interval) for one in found), float(values.mean())) >= LEAST


def embeddings(chance: numpy.random.Generator, topics: Draw, sentences: int, noise: float) -> tuple[Any, Any]:
    """Return those of a model and of the baseline, float64 [sentences, hidden]: some sentences moved
    far more than others.
    """
    hidden = topics.shape[1]
    base = topics[chance.integers(len(topics), size=sentences)] * chance.random((sentences, 1))
    base += chance.normal(size=base.shape)
    base /= numpy.linalg.norm(base, axis=1, keepdims=True)
    moves = noise / math.sqrt(hidden) * numpy.exp(0.7 * chance.normal(size=(sentences, 1)))
    moved = base + moves * chance.normal(size=base.shape)
    moved /= numpy.linalg.norm(moved, axis=1, keepdims=True)
    return torch.from_numpy(moved), torch.from_numpy(base)


@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_rank_correlation_of_embeddings(chance: numpy.random.Generator, noise: float) -> None:
    topics = chance.normal(size=(12, 32))
    many = [embeddings(chance, topics, 1000, noise) for _ in range(3)]
    truth = sum(spearman(pairwise(ours), pairwise(theirs)) for ours, theirs in many) / len(many)
    drawn = [embeddings(chance, topics, Embedding(dataset="wikitext2").sentences, noise) for _ in range(150)]
    assert coverage((spearman_estimate(*each) for each in drawn), truth) >= LEAST


def test_the_lowest_cosines(chance: numpy.random.Generator) -> None:
    drawn = 1 - numpy.exp(chance.normal(-6, 1, size=(1500, FEWEST_FOR_LOW)))
    found = (Estimate(0.0, quantile_interval(row, LOW)) for row in drawn.tolist())
    assert coverage(found, 1 - math.exp(-6 + 2.326348)) >= LEAST


TimedPair = tuple[list[Metric], list[Metric]]


def timed(
    chance: numpy.random.Generator, eval: TimedEval, process: float, drift: Callable[[Draw], Draw], ratio: float = 1.0
) -> TimedPair:
    """Return 1500 simulated measurements of two models in turns: repeats 1% apart, processes
    `process` apart, while the machine drifts.
    """
    draws, turns, repeats = 1500, eval.turns(), 2
    order = [model for index in range(turns) for model in ((0, 1) if index % 2 == 0 else (1, 0))]
    places = [[place for place, model in enumerate(order) if model == wanted] for wanted in (0, 1)]
    moved = drift(chance.normal(size=(draws, 2 * turns)))
    spread = process * chance.normal(size=(draws, 2 * turns, 1)) + 0.01 * chance.normal(
        size=(draws, 2 * turns, repeats)
    )
    seconds = numpy.exp(moved[..., None] + spread)
    baseline, artifact = seconds[:, places[0]], ratio * seconds[:, places[1]]
    found = [
        [[metric(sum(row) / repeats, samples=tuple(row)) for row in run] for run in model.tolist()]
        for model in (artifact, baseline)
    ]
    return [pooled(eval, run) for run in found[0]], [pooled(eval, run) for run in found[1]]


DRIFTS: dict[str, Callable[[Draw], Draw]] = {
    "none": lambda noise: 0 * noise,
    "2% steadily": lambda noise: 0 * noise + numpy.linspace(0, 0.02, noise.shape[1]),
    "1% a turn, at random": lambda noise: 0.01 * noise.cumsum(axis=1),
    "5% at once, some time": lambda noise: 0.05 * (numpy.arange(noise.shape[1]) > 4 + 2 * noise[:, :1]),  # type: ignore[return-value]
}


@pytest.mark.parametrize(("process", "drift"), crossed([0.0, 0.01, 0.02], [*DRIFTS]))
def test_the_ratio_of_timings(chance: numpy.random.Generator, process: float, drift: str) -> None:
    """At a ratio of 1 this is an A/A comparison: it finds nothing in 93 of 100 or more, and neither
    model looks better more often.
    """
    for ratio in (1.0, 0.25):
        ours, theirs = timed(chance, Throughput(), process, DRIFTS[drift], ratio)
        found = [ratio_to_baseline(*pair) for pair in zip(ours, theirs, strict=True)]
        assert coverage(found, ratio) >= LEAST
        assert sum(estimate.value < ratio for estimate in found) / len(found) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("eval", "process"), crossed({"speed": Throughput(), "texts": Encoding()}, [0, 0.01, 0.02]))
def test_timings_of_one_model(chance: numpy.random.Generator, eval: TimedEval, process: float) -> None:
    found, _ = timed(chance, eval, process, DRIFTS["none"])
    assert coverage((Estimate(one.value, one.interval) for one in found), math.exp((process**2 + 0.01**2) / 2)) >= LEAST
