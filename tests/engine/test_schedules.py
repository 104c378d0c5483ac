"""Each step maps [low, 1] into [reached, 1], and no step of its kind does better."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.schedules import centered, cubic, halley, products, quintic

floors = st.floats(-6, -0.01).map(lambda e: 10.0**e)


def grid(low: float) -> np.ndarray:
    return np.concatenate([np.geomspace(low, 1, 4000), np.linspace(low, 1, 4000)])


@given(floors)
def test_halley_maps_into_its_interval(low: float) -> None:
    step = halley(low)
    y = step.shift * grid(low) + step.gain * grid(low) / (1 + step.c * grid(low) ** 2)
    assert y.max() <= 1 + 1e-9 and y.min() >= step.reached - 1e-9 * step.c


@given(floors.filter(lambda low: low > 1e-4))
def test_polynomials_map_into_their_intervals(low: float) -> None:
    for step in (cubic(low), quintic(low)):
        x = grid(low)
        y = step.a * x + step.b * x**3 + step.c * x**5
        assert y.max() <= 1 + 1e-6
        assert y.min() >= step.reached - 1e-6


@pytest.mark.parametrize("low", [0.01, 0.1, 0.5, 0.9])
def test_no_small_change_of_the_coefficients_does_better(low: float) -> None:
    """The ratio of the lowest to the highest value is what counts, since any step may be scaled."""
    x, rng = grid(low), np.random.default_rng(0)

    def quality(a: float, b: float, c: float) -> float:
        y = a * x + b * x**3 + c * x**5
        return float(y.min() / y.max())

    for step, free in ((cubic(low), (1, 1, 0)), (quintic(low), (1, 1, 1))):
        best = quality(step.a, step.b, step.c)
        for _ in range(200):
            noise = 1 + 1e-3 * rng.standard_normal(3) * free
            assert quality(step.a * noise[0], step.b * noise[1], step.c * noise[2]) <= best + 1e-7


@given(floors.filter(lambda low: low > 1e-4))
def test_a_schedule_of_products_ends_within_its_spread(low: float) -> None:
    x = grid(low)
    for step in products(low):
        x = step.a * x + step.b * x**3 + step.c * x**5
    assert np.abs(x - 1).max() <= 6e-4


def test_centering_puts_the_errors_on_both_sides() -> None:
    step = centered(cubic(0.8))
    y = step.a * grid(0.8) + step.b * grid(0.8) ** 3
    assert y.max() - 1 == pytest.approx(1 - y.min(), rel=1e-3)
    assert step.reached == pytest.approx(y.min(), rel=1e-6)
