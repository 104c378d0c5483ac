"""Student's t intervals for a handful of seeds, without SciPy."""

from __future__ import annotations

import math
from collections.abc import Sequence

Interval = tuple[float, float]
_PRIOR = 4  # degrees of freedom of a spread that is shared

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
    mean, deviation = sum(values) / len(values), spread(values)
    if deviation is None:
        return mean, (-math.inf, math.inf)
    return mean, _around(mean, deviation, len(values), len(values) - 1)


def another_interval(values: Sequence[float]) -> tuple[float, Interval]:
    """The mean, and where one more value lies in 95 % of all cases (the t interval of a prediction).

    A fresh network is one draw too: the one that is probed differs from the mean by as much as any other.

    >>> mean, (low, high) = another_interval([1.0, 2.0, 3.0])
    >>> mean, round(low, 2), round(high, 2)
    (2.0, -2.97, 6.97)
    """
    mean, deviation = sum(values) / len(values), spread(values)
    if deviation is None:
        return mean, (-math.inf, math.inf)
    return mean, _around(mean, deviation * math.sqrt(len(values) + 1), len(values), len(values) - 1)


def shared_interval(values: Sequence[float], typical: float) -> tuple[float, Interval]:
    """The mean and its interval, where `typical` is the spread of other groups like this one.

    A spread from three values is hardly known: it is averaged with the typical one, which counts as four degrees of
    freedom (moderated t, Smyth 2004).

    >>> mean, (low, high) = shared_interval([1.0, 2.0, 3.0], 1.0)
    >>> mean, round(low, 2), round(high, 2)
    (2.0, 0.59, 3.41)
    """
    mean, own = sum(values) / len(values), spread(values)
    if own is None:
        return mean, (-math.inf, math.inf)
    freedom = len(values) - 1 + _PRIOR
    deviation = math.sqrt(((len(values) - 1) * own**2 + _PRIOR * typical**2) / freedom)
    return mean, _around(mean, deviation, len(values), freedom)


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation; None of one value.

    >>> spread([1.0, 2.0, 3.0]), spread([1.0])
    (1.0, None)
    """
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _around(mean: float, deviation: float, count: int, freedom: int) -> Interval:
    half = (_T[freedom - 1] if freedom <= len(_T) else 1.96) * deviation / math.sqrt(count)
    return mean - half, mean + half
