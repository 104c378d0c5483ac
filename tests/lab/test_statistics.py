"""Statistics against slow references, written from their definitions."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.lab.results import statistics as lab

VALUE = st.floats(-5, 5, allow_nan=False).map(lambda x: round(x, 6))
SAMPLE = st.lists(VALUE, min_size=3, max_size=12)


def t_density(x: float, freedom: int) -> float:
    half = (freedom + 1) / 2
    log = math.lgamma(half) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    return math.exp(log - half * math.log1p(x * x / freedom))


def t_tail(x: float, freedom: int) -> float:
    """P(|T| > x) by Simpson's rule on the density, with s = arctan(t) so that the whole line is a short interval."""
    points = 20001
    grid = [math.atan(x) + (math.pi / 2 - math.atan(x)) * i / (points - 1) for i in range(points - 1)]
    heights = [t_density(math.tan(s), freedom) / math.cos(s) ** 2 for s in grid]
    heights.append(0.0 if freedom > 1 else 1 / math.pi)  # the limit at s = π/2
    step = (math.pi / 2 - math.atan(x)) / (points - 1)
    weights = [1, *([4, 2] * points)[: points - 2], 1]
    return 2 * step / 3 * sum(w * h for w, h in zip(weights, heights, strict=True))


def t_quantile(level: float, freedom: int) -> float:
    """The x with P(|T| > x) = 1 − level, by halving."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > 1 - level else (low, middle)
    return low


@pytest.mark.parametrize("count", [3, 5, 10])
def test_t_interval(count: int) -> None:
    draw = random.Random(count)
    values = [draw.gauss(0.5, 0.1) for _ in range(count)]
    got = lab.t_interval(values)
    half = t_quantile(0.95, count - 1) * statistics.stdev(values) / math.sqrt(count)
    assert got.mean == pytest.approx(statistics.fmean(values))
    assert (got.low, got.high) == (pytest.approx(got.mean - half, rel=1e-5), pytest.approx(got.mean + half, rel=1e-5))
    assert got.count == count and got.note is None


def test_two_seeds_give_their_values_and_neither_interval_nor_p() -> None:
    """t with one degree of freedom is 12.7: [−17, 51] beside a difference that both seeds agree on."""
    for interval in (lab.t_interval([0.5, 0.7]),):
        assert (interval.low, interval.high, interval.values) == (None, None, (0.5, 0.7))
    got = lab.paired({0: 0.5, 1: 0.7}, {0: 0.25, 1: 0.5})
    assert got is not None and (got.low, got.high, got.p) == (None, None, None)
    assert got.values == (0.25, pytest.approx(0.2))


def test_the_t_interval_holds_the_truth_as_often_as_it_says() -> None:
    draw = random.Random(0)
    hits = 0
    for _ in range(1000):
        interval = lab.t_interval([draw.gauss(1.0, 2.0) for _ in range(4)])
        assert interval.low is not None and interval.high is not None
        hits += interval.low <= 1.0 <= interval.high
    assert 0.93 <= hits / 1000 <= 0.97


@pytest.mark.parametrize("count", [3, 4, 7])
def test_paired_difference(count: int) -> None:
    draw = random.Random(count)
    arm = {seed: draw.gauss(0.6, 0.2) for seed in range(count)}
    reference = {seed: value - draw.gauss(0.1, 0.05) for seed, value in arm.items()}
    got = lab.paired(arm | {99: 5.0}, reference | {98: -5.0})
    assert got is not None and got.count == count, "only common seeds"
    differences = [arm[seed] - reference[seed] for seed in range(count)]
    t = statistics.fmean(differences) / (statistics.stdev(differences) / math.sqrt(count))
    assert got.mean == pytest.approx(statistics.fmean(differences))
    assert got.p == pytest.approx(t_tail(abs(t), count - 1), rel=1e-4)
    interval = lab.t_interval(differences)
    assert (got.low, got.high) == (interval.low, interval.high)
    assert got.low is not None and got.high is not None
    assert (got.p < 0.05) == (got.low > 0 or got.high < 0), "the interval and the test agree"


def test_pairing_sees_what_the_spread_of_seeds_hides() -> None:
    draw = random.Random(0)
    reference = {seed: draw.gauss(0.0, 1.0) for seed in range(6)}
    arm = {seed: value + 0.1 + draw.gauss(0.0, 0.01) for seed, value in reference.items()}
    got = lab.paired(arm, reference)
    assert got is not None and got.low is not None and got.low > 0.08 and got.p is not None and got.p < 1e-3


def test_degenerate_differences_say_so() -> None:
    assert lab.paired({0: 1.0}, {1: 2.0}) is None
    one = lab.paired({0: 1.0}, {0: 0.5})
    assert one == lab.Difference(0.5, None, None, 1, note="one seed: no interval")
    assert str(one) == "+0.500"
    same = lab.paired({0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert same is not None and (same.mean, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    shifted = lab.paired({0: 0.3, 1: 0.2, 2: 0.7}, {0: 0.2, 1: 0.1, 2: 0.6})  # equal up to the last bit
    assert shifted is not None and shifted.p is None and "no test" in str(shifted.note)


@pytest.mark.parametrize("interval", [lab.t_interval])
def test_degenerate_samples_say_so(interval: object) -> None:
    assert callable(interval)
    assert interval([0.5]) == lab.Interval(0.5, None, None, 1, "one seed: no interval")
    assert interval([0.5, 0.5, 0.5]) == lab.Interval(0.5, 0.5, 0.5, 3, "all seeds equal")
    with pytest.raises(ValueError, match="no values"):
        interval([])
    with pytest.raises(ValueError, match="finite"):
        interval([0.1, float("nan")])


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.one_of(st.none(), st.floats(0, 1)), max_size=8))
def test_holm_rejects_what_the_step_down_procedure_rejects(p_values: dict[str, float | None]) -> None:
    corrected = lab.holm(p_values)
    assert corrected.keys() == p_values.keys()
    known = {name: p for name, p in p_values.items() if p is not None}
    assert all((corrected[name] is None) == (p is None) for name, p in p_values.items())
    for level in (0.01, 0.05, 0.2):
        rejected, left = set(), dict(known)
        while left:  # the procedure itself: the smallest against level ÷ how many are left
            name = min(left, key=lambda n: left[n])
            if left[name] * len(left) > level:
                break
            rejected.add(name)
            del left[name]
        # Ties may be taken in either order; both are rejected or neither is.
        assert {name for name in known if (corrected[name] or 0.0) <= level} == rejected
