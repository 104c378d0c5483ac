"""Statistics over a few seeds: intervals, paired differences, Holm's correction.

Runs of different arms share their seeds, and with a seed the data, their order and the initial weights. So arms are
compared seed by seed: the spread of the differences is much smaller than that of the values. Where the data are not
enough (one seed, no spread, too few streams), the value is left out and a note says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from types import ModuleType
from typing import Any

import numpy as np

from rekindle.extras import require

LEVEL = 0.95
SEEDS_FOR_INTERVAL = 3  # t with one degree of freedom is 12.7: an interval of two seeds is useless


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval; low and high are None where there can be none, and `note` says why.

    `values` are what the mean is of, where they are so few that they are shown instead of an interval.
    """

    mean: float
    low: float | None
    high: float | None
    count: int
    note: str | None = None
    values: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Difference(Interval):
    """Arm minus reference over the seeds that both have: t-interval, two-sided p, and Holm's p once it is known."""

    p: float | None = None
    holm: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+.3f}"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def t_interval(values: Sequence[float]) -> Interval:
    """The mean and its t-interval: mean ± t·s/√n with n − 1 degrees of freedom.

    >>> print(t_interval([0.1, 0.2, 0.3]))
    0.200 [-0.048, 0.448]
    >>> t_interval([0.5]).note, t_interval([0.5, 0.7]).values
    ('one seed: no interval', (0.5, 0.7))
    """
    few = _too_few(values)
    if few is not None:
        return few
    count, mean = _count_and_mean(values)
    half = float(scipy_stats().t.ppf((1 + LEVEL) / 2, count - 1)) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def paired(arm: Mapping[int, float], reference: Mapping[int, float]) -> Difference | None:
    """The difference arm − reference over their common seeds; None if they have none.

    >>> print(paired({0: 0.5, 1: 0.7, 2: 0.6}, {0: 0.4, 1: 0.5, 2: 0.5}))
    +0.133 [-0.010, +0.277]
    """
    seeds = sorted(arm.keys() & reference.keys())
    if not seeds:
        return None
    differences = [arm[seed] - reference[seed] for seed in seeds]
    interval = t_interval(differences)
    if len(seeds) < SEEDS_FOR_INTERVAL:
        return Difference(interval.mean, None, None, len(seeds), note=interval.note, values=interval.values)
    if _equal(differences):
        zero = interval.mean == 0.0
        note = "equal on every seed" if zero else "the same difference on every seed: no test"
        return Difference(interval.mean, interval.low, interval.high, len(seeds), note, p=1.0 if zero else None)
    p = float(scipy_stats().ttest_rel([arm[seed] for seed in seeds], [reference[seed] for seed in seeds]).pvalue)
    return Difference(interval.mean, interval.low, interval.high, len(seeds), p=p)


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Holm's step-down p values, which keep the chance of any false finding among all arms below the level.

    What has no p value takes no part, and gets none.
    """
    known = sorted((p, name) for name, p in p_values.items() if p is not None)
    out: dict[str, float | None] = dict.fromkeys(p_values)
    so_far = 0.0
    for rank, (p, name) in enumerate(known):
        so_far = max(so_far, min(1.0, (len(known) - rank) * p))
        out[name] = so_far
    return out


def scipy_stats() -> ModuleType:
    """`scipy.stats`, or an error that says how to install it."""
    stats: ModuleType = require("scipy.stats", "lab", "an interval")
    return stats


def _too_few(values: Sequence[float]) -> Interval | None:
    """The mean without an interval where there can be none."""
    count, mean = _count_and_mean(values)
    if count < SEEDS_FOR_INTERVAL:
        note = "one seed: no interval" if count == 1 else "two seeds: their values, no interval"
        return Interval(mean, None, None, count, note, tuple(values) if count > 1 else ())
    return Interval(mean, mean, mean, count, "all seeds equal") if _equal(values) else None


def _count_and_mean(values: Sequence[float]) -> tuple[int, float]:
    if not len(values):
        raise ValueError("no values to average")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"values must be finite, got {list(values)}")
    return len(values), fmean(values)


def _equal(values: Sequence[float]) -> bool:
    """No spread beyond rounding: differences of equal floats may differ in their last bit."""
    return max(values) - min(values) <= 1e-12 * max(1.0, max(map(abs, values)))
