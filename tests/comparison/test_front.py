"""The front against its definition, tried pair by pair."""

from itertools import product
from pathlib import Path
from random import Random

import numpy
import pytest

from optkit.common.statistics import PAIRED_NEIGHBOURS, half_widths, neighbours_half_width, standard_error, t_quantile
from optkit.comparison import Comparison, compare_scorecards
from optkit.comparison.axes import Axis, widen
from optkit.comparison.columns import table_of
from optkit.comparison.front import _members, front_of
from optkit.measure import Metric
from optkit.scorecard import ratio_to_baseline
from tests.support.scorecards import card, decode, divergence, metric, perplexity, size

WINDOWS, COUNT = 12, 14


def drawn(draw: Random, count: int = COUNT, noise: float = 0.02) -> list:
    """Scorecards whose numbers trade against each other, with noise in perplexity and speed."""
    text = [3 + draw.gauss(0, 0.3) for _ in range(WINDOWS)]
    baseline = [perplexity(text), decode([20.0, 20.2, 19.9, 20.1]), size(500e6)]
    cards = []
    for index in range(count):
        loss, rate = draw.random() * 0.2, 20 + 30 * draw.random()
        losses = [each + loss + draw.gauss(0, noise) for each in text]
        rates = [rate * (1 + draw.gauss(0, noise)) for _ in range(4)]
        metrics = [perplexity(losses), decode(rates), size(round(50e6 + 300e6 * draw.random()))]
        cards.append(card(f"r{index}", metrics, baseline))
    return cards


def compared(cards: list, **options: object) -> Comparison:
    return compare_scorecards([(Path(each.name), each) for each in cards], **options)


def axes_of(cards: list) -> list[Axis]:
    table = table_of(cards)
    keys = ["perplexity", "size_bytes", "decode_tokens_per_s[batch=1]"]
    columns = [next(each for each in table.columns if each.key == key) for key in keys]
    axes = [Axis(column, [row[column.key] for row in table.rows], None, True) for column in columns]
    widen(axes)
    return axes


@pytest.mark.parametrize("seed", range(8))
def test_nobody_on_the_front_is_dominated_and_everybody_else_is(seed: int) -> None:
    cards = drawn(Random(seed), noise=0.05 * (seed % 4))
    axes = axes_of(cards)

    told = [[[each.relation for each in axis.differences(other)] for other in range(COUNT)] for axis in axes]

    def dominates(one: int, other: int) -> bool:
        relations = [relation[other][one] for relation in told]
        return "worse" not in relations and "better" in relations

    found = front_of(axes, [True] * COUNT)
    free = {one for one in range(COUNT) if not any(dominates(other, one) for other in range(COUNT))}
    assert free <= set(found.members)
    ringed = set(found.members) - free
    assert all(any(dominates(other, one) for other in ringed) for one in ringed)
    for one, other in product(range(COUNT), repeat=2):
        assert not (dominates(one, other) and dominates(other, one))
    for index, by in enumerate(found.dominators):
        assert bool(by) == (index not in found.members)
        assert all(dominates(each, index) for each in by)


@pytest.mark.parametrize("correlation", [None, 0.2, 0.4])
@pytest.mark.parametrize("count", [2, 7, 8, 40])
def test_half_widths_of_many_are_those_of_each(correlation: float | None, count: int) -> None:
    samples = numpy.random.default_rng(count).normal(size=(5, count)).cumsum(1)
    samples[3] = 1.5
    expected = [
        standard_error(row) * t_quantile(count - 1) if correlation is None else neighbours_half_width(row, correlation)
        for row in samples.tolist()
    ]
    assert half_widths(samples, correlation) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_exact_numbers_alone_give_the_ordinary_front() -> None:
    draw = Random(3)
    points = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(30)]
    cards = [
        card(f"r{index}", [size(first * 1e6), size(second * 1e6).model_copy(update={"name": "weights_bytes"})])
        for index, (first, second) in enumerate(points)
    ]
    found = compared(cards, axes=["size_bytes", "weights_bytes"])
    front = {
        f"r{index}"
        for index, one in enumerate(points)
        if not any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in points)
    }
    assert {entry.label for entry in found.entries if entry.front} == front


def scores(draw: Random, share: float, name: str = "acc") -> Metric:
    items = tuple(float(draw.random() < share) for _ in range(60))
    told = {"interval": (0.0, 1.0), "samples": items, "trials": (1,) * 60, "pairing": "paired_mean"}
    return metric(name, sum(items) / 60, "fraction", "task", higher_is_better=True, **told)


@pytest.mark.parametrize("key", ["perplexity", "acc", "graded"])
def test_differences_are_the_ratios_of_paired_metrics(key: str) -> None:
    """A ratio of two artifacts is formed as that of an artifact to its baseline."""
    draw = Random(5)
    cards = []
    for index in range(6):
        graded = scores(draw, 0.7, "graded")
        samples = tuple(each * draw.random() + 0.1 for each in graded.samples)
        graded = graded.model_copy(update={"samples": samples, "value": sum(samples) / 60})
        losses = [3 + draw.gauss(0, 0.1) for _ in range(WINDOWS)]
        cards.append(card(f"r{index}", [perplexity(losses), scores(draw, 0.6), graded]))
    table = table_of(cards)
    column = next(each for each in table.columns if each.key == key)
    axis = Axis(column, [row[key] for row in table.rows], None, True)
    metrics = [row[key].metric for row in table.rows]
    for other in range(6):
        for one, found in enumerate(axis.differences(other)):
            if one == other:
                continue
            expected = ratio_to_baseline(metrics[one], metrics[other])
            assert found.relative
            assert (found.value, *(found.interval or ())) == pytest.approx((expected.value, *(expected.interval or ())))


def test_means_of_windows_are_subtracted_window_by_window() -> None:
    draw = Random(2)
    cards = [card(f"r{index}", [divergence([0.1 + draw.random() for _ in range(9)])]) for index in range(4)]
    table = table_of(cards)
    axis = Axis(table.columns[0], [row["kl_divergence"] for row in table.rows], None, True)
    samples = [row["kl_divergence"].metric.samples for row in table.rows]
    for one, found in enumerate(axis.differences(1)):
        deltas = [ours - theirs for ours, theirs in zip(samples[one], samples[1], strict=True)]
        half = neighbours_half_width(deltas, PAIRED_NEIGHBOURS)
        assert not found.relative
        assert found.value == pytest.approx(sum(deltas) / 9)
        if one != 1:
            assert found.interval == pytest.approx((found.value - half, found.value + half))


def test_a_ring_stays_on_the_front() -> None:
    """Each is better than the next in one axis, and by too little to tell in the others."""
    dominated = numpy.zeros((5, 5), dtype=bool)
    for one, by in ((0, 1), (1, 2), (2, 0), (3, 0), (4, 3)):
        dominated[one, by] = True
    assert _members(dominated) == {0, 1, 2}
    dominated[2, 4] = True
    assert _members(dominated) == {0, 1, 2, 3, 4}
    assert _members(numpy.zeros((2, 2), dtype=bool)) == {0, 1}
