"""Means and their confidence intervals, against scipy."""

import pytest
from scipy import stats

from solrl_lightning.study.confidence import difference_of_means, mean_of, t_quantile


@pytest.mark.parametrize("dof", [1, 2, 3, 10, 63, 1000])
def test_quantile_matches_scipy(dof: int) -> None:
    assert t_quantile(dof) == pytest.approx(stats.t.ppf(0.975, dof), rel=1e-5)


def test_interval_matches_scipy() -> None:
    values = [0.1, 0.4, -0.2, 0.3, 0.25]
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    mean = mean_of(values)
    assert (mean.low, mean.high) == pytest.approx((expected.low, expected.high), rel=1e-5)
    assert (mean.mean, mean.standard_error) == pytest.approx((0.17, stats.sem(values)))


def test_difference_has_the_errors_of_both_and_the_degrees_of_freedom_of_the_smaller_sample() -> None:
    difference = difference_of_means([1.0, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    error = (0.5 / 2 + 2.5 / 5) ** 0.5
    assert difference[:3] == (-1.5, None, pytest.approx(error))
    assert difference[3:] == pytest.approx((-1.5 - 12.7062 * error, -1.5 + 12.7062 * error), rel=1e-5)
    assert difference_of_means([1.0], [2.0, 3.0]) == (-1.5, None, None, None, None)


def test_single_value_has_no_interval_and_equal_values_one_of_no_width() -> None:
    assert mean_of([0.3]) == (0.3, None, None, None, None)
    assert mean_of([0.5, 0.5, 0.5]) == (0.5, 0.0, 0.0, 0.5, 0.5)
