from __future__ import annotations

import math

import numpy
import pytest

from optkit.statistics import (
    Estimate,
    exact_ratio,
    independent_ratio,
    mean_estimate,
    paired_log_ratio,
    pooled_quantile,
    quantile,
    standard_error,
    t_quantile,
)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (4, 2.7764), (10, 2.2281), (11, 2.2010), (14, 2.1448), (30, 2.0423), (100, 1.9840), (1000, 1.9623), (1e9, 1.9600)],
)
def test_t_quantile_is_that_of_the_printed_tables(degrees, expected):
    assert t_quantile(degrees) == pytest.approx(expected, abs=1e-4)


def test_t_quantile_falls_between_whole_degrees_and_needs_one():
    values = [t_quantile(1 + step / 10) for step in range(150)]
    assert values == sorted(values, reverse=True)
    with pytest.raises(ValueError, match=r"0\.5 degrees of freedom: at least 1"):
        t_quantile(0.5)


def test_mean_estimate_covers_the_truth_95_times_in_100():
    draws = numpy.random.default_rng(0).normal(3.0, 2.0, size=(4000, 5))
    intervals = [mean_estimate(row.tolist()).interval for row in draws]
    assert numpy.mean([low <= 3.0 <= high for low, high in intervals]) == pytest.approx(0.95, abs=0.01)


def test_an_interval_ends_where_nothing_is_possible():
    samples = [0.1, 0.9, 0.2]
    assert mean_estimate(samples).interval[0] < 0.0
    assert mean_estimate(samples, least=0.0).interval == (0.0, mean_estimate(samples).interval[1])
    assert mean_estimate(samples, 0.0, 1.0).interval == (0.0, 1.0)
    draws = numpy.random.default_rng(0).exponential(1.0, size=(500, 3))
    covered = [
        [low <= 1.0 <= high for row in draws for low, high in [mean_estimate(row.tolist(), least).interval]] for least in (-9.0, 0.0)
    ]
    assert covered[0] == covered[1]


def test_standard_error_is_numpys_and_needs_two_samples():
    samples = [1.0, 2.5, 4.0, 8.0]
    assert standard_error(samples) == pytest.approx(numpy.std(samples, ddof=1) / 2)
    with pytest.raises(ValueError, match=r"1 sample\(s\) have no standard error"):
        standard_error([1.0])


def test_quantile_is_numpys():
    samples = numpy.random.default_rng(1).random(57).tolist()
    for fraction in (0.0, 0.5, 0.95, 0.99, 1.0):
        assert quantile(samples, fraction) == pytest.approx(numpy.quantile(samples, fraction))


def test_paired_log_ratio_is_the_ratio_of_perplexities_and_ignores_what_windows_share():
    generator = numpy.random.default_rng(2)
    baseline = generator.normal(3.0, 0.5, size=15)
    ours = baseline + generator.normal(0.1, 0.01, size=15)
    ratio = paired_log_ratio(ours.tolist(), baseline.tolist())
    assert ratio.value == pytest.approx(math.exp(ours.mean()) / math.exp(baseline.mean()))
    low, high = ratio.interval
    assert low < math.exp(0.1) < high
    assert high - low < 0.03


def test_paired_log_ratio_refuses_unequal_counts_and_never_overflows():
    with pytest.raises(ValueError, match="3 samples cannot be paired with 2"):
        paired_log_ratio([1.0, 2.0, 3.0], [1.0, 2.0])
    assert math.isfinite(paired_log_ratio([600.0, 1.0], [1.0, 1.0]).interval[1])


def test_independent_ratio_covers_the_truth_95_times_in_100():
    generator = numpy.random.default_rng(3)
    hits = []
    for _ in range(3000):
        low, high = independent_ratio(generator.normal(30, 1.5, 5).tolist(), generator.normal(20, 0.4, 8).tolist()).interval
        hits.append(low <= 1.5 <= high)
    assert numpy.mean(hits) == pytest.approx(0.95, abs=0.015)


def test_independent_ratio_divides_the_means():
    ratio = independent_ratio([10.0, 12.0], [5.0, 5.0])
    assert ratio.value == pytest.approx(2.2)
    assert ratio.interval[0] < 2.2 < ratio.interval[1]
    assert independent_ratio([4.0, 4.0], [2.0, 2.0]) == Estimate(2.0, (2.0, 2.0))
    with pytest.raises(ValueError, match="needs positive ones"):
        independent_ratio([0.0, 0.0], [1.0, 1.0])


def test_exact_ratio_has_no_interval():
    assert exact_ratio(1.0, 4.0) == Estimate(0.25, None)
    with pytest.raises(ValueError, match="ratio to 0"):
        exact_ratio(1.0, 0.0)


def test_pooled_quantile_is_seeded_and_resamples_whole_groups():
    generator = numpy.random.default_rng(4)
    groups = [(generator.exponential(size=200) + shift).tolist() for shift in (0.0, 0.0, 3.0, 3.0)]
    estimate = pooled_quantile(groups, 0.99, seed=7)
    assert estimate == pooled_quantile(groups, 0.99, seed=7)
    assert estimate.value == pytest.approx(numpy.quantile(numpy.concatenate(groups), 0.99))
    assert estimate.interval[0] < estimate.value <= estimate.interval[1]
    narrow = pooled_quantile([[each] for group in groups for each in group], 0.5, seed=7).interval
    wide = pooled_quantile(groups, 0.5, seed=7).interval
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])
    with pytest.raises(ValueError, match=r"1 group\(s\) cannot be resampled"):
        pooled_quantile([[1.0]], 0.5, seed=0)
