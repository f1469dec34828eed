import math

import numpy
import pytest

from optkit.common.paired_items import flips, is_binary, mcnemar, paired_mean_ratio, paired_share_ratio
from optkit.common.statistics import paired_ratio


def test_flips_are_counted_in_both_directions():
    assert flips((1.0, 0.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0, 0.0, 1.0)) == (2, 1)


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (1, 0), (8, 3), (3, 8), (5, 5), (40, 21)])
def test_mcnemar_is_the_exact_sign_test(lost, won):
    turned, few = lost + won, min(lost, won)
    tail = sum(math.comb(turned, count) for count in range(few + 1)) / 2**turned
    assert mcnemar(lost, won) == pytest.approx(min(1.0, 2 * tail))


def test_the_ratio_of_shares_is_near_the_bootstrap_of_many_items():
    draws = numpy.random.default_rng(3).multinomial(1500, [0.6, 0.04, 0.03, 0.33], size=20000)
    ratios = (draws[:, 0] + draws[:, 2]) / (draws[:, 0] + draws[:, 1])
    found = paired_share_ratio(900, 60, 45)
    assert found.value == pytest.approx(945 / 960)
    assert found.interval == pytest.approx(numpy.quantile(ratios, [0.025, 0.975]), abs=1e-3)


def test_pairs_narrow_the_interval_and_no_flip_leaves_a_width():
    ours, theirs = [1.0] * 60 + [0.0] * 40, [1.0] * 60 + [0.0] * 40
    same = paired_mean_ratio(ours, theirs)
    assert same.value == 1.0
    assert 0.95 < same.interval[0] < 1.0 < same.interval[1] < 1.05
    shuffled = paired_mean_ratio(ours, theirs[::-1])
    assert shuffled.value == 1.0
    assert shuffled.interval[1] - shuffled.interval[0] > 4 * (same.interval[1] - same.interval[0])


def test_a_model_that_has_nothing_right_has_a_ratio_of_0_with_an_upper_end():
    found = paired_mean_ratio([0.0] * 20, [1.0] * 10 + [0.0] * 10)
    assert found.value == found.interval[0] == pytest.approx(0.0, abs=1e-12)
    assert 0.0 < found.interval[1] < 0.5


def test_scores_that_are_no_shares_are_divided_with_the_interval_of_t():
    ours, theirs = (0.2, 0.5, 0.9), (0.3, 0.5, 1.0)
    assert not is_binary(ours)
    assert paired_mean_ratio(ours, theirs) == paired_ratio(ours, theirs)


@pytest.mark.parametrize(("ours", "theirs"), [((1.0,), (1.0, 0.0)), ((), ())])
def test_other_items_are_refused(ours, theirs):
    with pytest.raises(ValueError, match=f"{len(ours)} items cannot be paired with {len(theirs)}"):
        paired_mean_ratio(ours, theirs)


def test_a_ratio_to_nothing_right_is_refused():
    with pytest.raises(ValueError, match="a ratio to 0 has no value"):
        paired_mean_ratio((1.0, 0.0), (0.0, 0.0))
