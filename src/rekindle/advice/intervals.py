"""Student's t intervals for a handful of seeds, without SciPy."""

from __future__ import annotations

import math
from collections.abc import Sequence

Interval = tuple[float, float]

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def mean_interval(values: Sequence[float]) -> tuple[float, Interval]:
    """The mean and its 95 % t interval; one value has no interval.

    >>> mean, (low, high) = mean_interval([1.0, 2.0, 3.0])
    >>> mean, round(low, 2), round(high, 2)
    (2.0, -0.48, 4.48)
    >>> mean_interval([2.0])
    (2.0, (-inf, inf))
    """
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, (-math.inf, math.inf)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    half = (_T[count - 2] if count <= 31 else 1.96) * deviation / math.sqrt(count)
    return mean, (mean - half, mean + half)
