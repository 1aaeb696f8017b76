"""Confidence intervals of means of few values, by Student's t."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

_LEVEL = 0.95
_POINTS = 20_001  # of the numerical integral; the quantile is then right to five digits


class Mean(NamedTuple):
    """A mean with its 95 % confidence interval; one value has a mean only."""

    mean: float
    std: float | None  # of the sample, n - 1 in the denominator
    standard_error: float | None
    low: float | None
    high: float | None


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of independent values, of which there is at least one."""
    if len(values) == 1:
        return Mean(values[0], None, None, None, None)
    mean, std = fmean(values), stdev(values)
    error = std / math.sqrt(len(values))
    reach = t_quantile(len(values) - 1) * error
    return Mean(mean, std, error, mean - reach, mean + reach)


def t_quantile(dof: int) -> float:
    """The t with P(|T| < t) = 0.95 for Student's distribution of ``dof`` degrees of freedom.

    With t = sqrt(dof) tan(theta) its density is proportional to cos(theta)^(dof - 1) on (-pi/2, pi/2).
    """
    theta = np.linspace(0.0, math.pi / 2, _POINTS)
    density = np.cos(theta) ** (dof - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(dof) * math.tan(float(np.interp(_LEVEL * mass[-1], mass, theta)))
