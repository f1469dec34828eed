import math

import numpy
import pytest

from optkit.common.statistics import (
    Estimate,
    binomial_interval,
    correlation_estimate,
    exact_ratio,
    independent_ratio,
    mean_estimate,
    neighbours_estimate,
    neighbours_half_width,
    paired_log_ratio,
    paired_ratio,
    quantile,
    quantile_interval,
    share_estimate,
    standard_error,
    t_quantile,
    tail_estimate,
)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (1, 12.7062),
        (4, 2.7764),
        (10, 2.2281),
        (11, 2.2010),
        (14, 2.1448),
        (30, 2.0423),
        (100, 1.9840),
        (1000, 1.9623),
        (1e9, 1.9600),
    ],
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
        [low <= 1.0 <= high for row in draws for low, high in [mean_estimate(row.tolist(), least).interval]]
        for least in (-9.0, 0.0)
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


def test_paired_ratio_divides_the_means_and_ignores_what_pairs_share():
    baseline = [10.0, 11.0, 20.0, 21.0]
    ratio = paired_ratio([12.0, 13.2, 24.0, 25.4], baseline)
    assert ratio.value == pytest.approx(74.6 / 62)
    assert 1.19 < ratio.interval[0] < ratio.value < ratio.interval[1] < 1.22
    assert ratio.interval[0] * ratio.interval[1] == pytest.approx(ratio.value**2)
    assert paired_ratio([2.0], [1.0]) == Estimate(2.0)
    assert paired_ratio([0.0, 0.0], [1.0, 2.0]) == Estimate(0.0)
    with pytest.raises(ValueError, match="ratio to 0"):
        paired_ratio([1.0, 1.0], [0.0, 0.0])


def test_independent_ratio_keeps_intervals_that_are_not_symmetric():
    assert independent_ratio(Estimate(1.0), Estimate(4.0)) == Estimate(0.25)
    ratio = independent_ratio(Estimate(1.0, (0.9, 1.0)), Estimate(1.0, (0.8, 1.0)))
    assert ratio.interval == pytest.approx((0.9, 1 / 0.8))
    both = independent_ratio(Estimate(6.0, (5.0, 8.0)), Estimate(3.0, (2.0, 4.0)))
    assert both.interval[0] == pytest.approx(2 * math.exp(-math.hypot(math.log(6 / 5), math.log(4 / 3))))
    assert both.interval[1] == pytest.approx(2 * math.exp(math.hypot(math.log(8 / 6), math.log(3 / 2))))
    nothing = independent_ratio(Estimate(0.0, (0.0, 0.2)), Estimate(0.5, (0.4, 0.6)))
    assert (nothing.value, nothing.interval) == (0.0, pytest.approx((0.0, 0.5)))
    assert math.isfinite(independent_ratio(Estimate(0.5, (0.0, 1.0)), Estimate(0.5, (0.0, 1.0))).interval[1])


def test_exact_ratio_has_no_interval():
    assert exact_ratio(1.0, 4.0) == Estimate(0.25, None)
    with pytest.raises(ValueError, match="ratio to 0"):
        exact_ratio(1.0, 0.0)


def test_a_tail_is_that_of_all_values_and_its_interval_that_of_the_groups_tails():
    generator = numpy.random.default_rng(4)
    groups = [(generator.exponential(size=200) * scale).tolist() for scale in (1.0, 1.0, 3.0, 3.0)]
    estimate = tail_estimate(groups, 0.99)
    assert estimate.value == pytest.approx(numpy.quantile(numpy.concatenate(groups), 0.99))
    half = neighbours_half_width([math.log(quantile(group, 0.99)) for group in groups])
    assert estimate.interval == pytest.approx((estimate.value * math.exp(-half), estimate.value * math.exp(half)))
    assert tail_estimate([[0.0, 0.0], [0.0, 0.0]], 0.99) == Estimate(0.0, (0.0, 0.0))
    assert tail_estimate([[0.0, 0.0], [0.0, 1.0]], 0.99).interval[0] == 0.0
    with pytest.raises(ValueError, match="at least 2 are needed"):
        tail_estimate([[1.0]], 0.5)


def test_neighbours_that_correlate_widen_the_interval():
    alone = neighbours_estimate([1.0, 2.0])
    assert alone.interval[1] - 1.5 == pytest.approx(12.7062 * 0.5 * math.sqrt(1.4 / 0.6), rel=1e-4)
    rising = [1.0, 1.1, 1.2, 1.3, 2.0, 2.1, 2.2, 2.3]
    mixed = [1.0, 2.0, 1.1, 2.1, 1.2, 2.2, 1.3, 2.3]
    assert neighbours_half_width(rising) > 1.3 * neighbours_half_width(mixed)
    assert neighbours_half_width(rising[:7]) / standard_error(rising[:7]) == neighbours_half_width(
        mixed[:7]
    ) / standard_error(mixed[:7])
    assert neighbours_estimate([0.1, 0.9], 0.0, 1.0).interval == (0.0, 1.0)
    assert neighbours_estimate([3.0] * 12) == Estimate(3.0, (3.0, 3.0))


def test_a_correlation_from_its_parts():
    found = correlation_estimate(0.5, [0.4, 0.6])
    half = 12.7062 * abs(math.atanh(0.6) - math.atanh(0.4)) / 2
    assert found.interval == pytest.approx((math.tanh(math.atanh(0.5) - half), math.tanh(math.atanh(0.5) + half)))
    assert correlation_estimate(1.0, [1.0, 1.0]) == Estimate(1.0, (pytest.approx(1.0), 1.0))


def test_a_quantiles_interval_by_order():
    # of 20 draws the 6th and the 15th hold the median in 95.9% (Conover, Practical Nonparametric Statistics)
    assert quantile_interval([float(each) for each in range(1, 21)], 0.5) == (6.0, 15.0)
    assert quantile_interval([3.0, 1.0, 2.0], 0.99) == (2.0, 3.0)


def test_a_binomial_interval_is_clopper_and_pearsons():
    """Against the definition, in fractions; limits of 7 of 8 from their table."""
    assert binomial_interval(8, 8) == pytest.approx((0.025 ** (1 / 8), 1.0))
    assert binomial_interval(0, 8) == pytest.approx((0.0, 1 - 0.025 ** (1 / 8)))
    assert binomial_interval(7, 8) == pytest.approx((0.4735, 0.9968), abs=1e-4)
    low, high = binomial_interval(30, 50)

    def tail(probability, counts):
        return math.fsum(
            math.comb(50, count) * probability**count * (1 - probability) ** (50 - count) for count in counts
        )

    assert tail(low, range(30, 51)) == pytest.approx(0.025)
    assert tail(high, range(31)) == pytest.approx(0.025)


def test_a_share_is_never_certain():
    assert share_estimate([1.0] * 4, [100] * 4).interval == pytest.approx((0.025 ** (1 / 400), 1.0))
    assert share_estimate([1.0, 0.0, 1.0, 1.0], [1] * 4).interval == pytest.approx(binomial_interval(3, 4))
    assert share_estimate([0.25], [4]).interval == pytest.approx(binomial_interval(1, 4))
    apart = share_estimate([0.1, 0.9, 0.2, 0.8], [1000] * 4)
    assert apart.value == pytest.approx(0.5)
    assert apart.interval == mean_estimate([0.1, 0.9, 0.2, 0.8], 0.0, 1.0).interval
    assert share_estimate([0.1, 0.9, 0.2, 0.8], [1000] * 4, neighbours=True).interval == (0.0, 1.0)
