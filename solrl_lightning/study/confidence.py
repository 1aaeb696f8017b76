"""Confidence intervals of means of few values, by Student's t."""

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

_LEVEL = 0.95
_POINTS = 20_001  # of the numerical integral, for a quantile accurate to five digits


class Mean(NamedTuple):
    """Mean with its 95 % confidence interval; the other fields are None for a single value."""

    mean: float
    std: float | None  # of the sample, n - 1 in the denominator
    standard_error: float | None
    low: float | None
    high: float | None


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of at least one independent value."""
    if len(values) == 1:
        return Mean(values[0], None, None, None, None)
    mean, std = fmean(values), stdev(values)
    error = std / math.sqrt(len(values))
    reach = t_quantile(len(values) - 1) * error
    return Mean(mean, std, error, mean - reach, mean + reach)


def difference_of_means(first: Sequence[float], second: Sequence[float]) -> Mean:
    """Return mean(first) - mean(second) of independent samples; no interval if one of them is a single value.

    The standard error does not assume equal variances (Welch); the smaller sample gives the degrees of freedom, which
    makes the interval conservative. ``std`` is None.
    """
    (mean, _, error, _, _), (other_mean, _, other_error, _, _) = mean_of(first), mean_of(second)
    difference = mean - other_mean
    if error is None or other_error is None:
        return Mean(difference, None, None, None, None)
    both = math.hypot(error, other_error)
    reach = t_quantile(min(len(first), len(second)) - 1) * both
    return Mean(difference, None, both, difference - reach, difference + reach)


@cache
def t_quantile(dof: int) -> float:
    """Return t with P(|T| < t) = 0.95 for Student's distribution with ``dof`` degrees of freedom.

    Substitutes t = sqrt(dof) tan(theta), which has a density proportional to cos(theta)^(dof - 1) on (-pi/2, pi/2).
    """
    theta = np.linspace(0.0, math.pi / 2, _POINTS)
    density = np.cos(theta) ** (dof - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(dof) * math.tan(float(np.interp(_LEVEL * mass[-1], mass, theta)))
