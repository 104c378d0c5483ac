"""Coefficients of the steps that pull singular values to 1: pure Python floats, computed once.

Each step is an odd function that maps a spectrum inside [low, 1] into [reached, 1] with `reached` as near to 1 as its
kind allows. Its coefficients depend on `low` alone, so a whole schedule is known before any tensor is touched, which is
also what `torch.compile(fullgraph=True)` needs.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class Halley(NamedTuple):
    """x → x(a + bx²)/(1 + cx²), as βx + αx/(1 + cx²) with `shift` β and `gain` α."""

    shift: float
    gain: float
    c: float
    reached: float


class Polynomial(NamedTuple):
    """x → ax + bx³ + cx⁵."""

    a: float
    b: float
    c: float
    reached: float


def halley(low: float) -> Halley:
    """The dynamically weighted Halley step for a spectrum in [low, 1] (Nakatsukasa, Bai and Gygi, 2010).

    >>> halley(1e-3).reached > 0.24     # one step lifts a singular value of 0.001 by about 250
    True
    """
    if low >= 1 - 1e-9:
        a, b, c = 3.0, 1.0, 3.0
    else:
        d = (4 * (1 - low * low) / low**4) ** (1 / 3)
        root = math.sqrt(1 + d)
        a = root + 0.5 * math.sqrt(max(0.0, 8 - 4 * d + 8 * (2 - low * low) / (low * low * root)))
        b = (a - 1) ** 2 / 4
        c = a + b - 1
    return Halley(b / c, a - b / c, c, min(1.0, low * (a + b * low * low) / (1 + c * low * low)))


def cubic(low: float) -> Polynomial:
    """The best odd cubic on [low, 1], scaled so that its maximum is 1 (closed form).

    >>> cubic(0.9).reached > 0.99
    True
    """
    peak = math.sqrt((1 + low + low * low) / 3)  # where the maximum lies if both ends are equally low
    a = 1.5 / peak
    b = -a / (3 * peak * peak)
    return Polynomial(a, b, 0.0, a * low + b * low**3)


@lru_cache(maxsize=256)
def quintic(low: float) -> Polynomial:
    """The best odd quintic on [low, 1], scaled so that its maximum is 1, by Remez exchange (Amsel et al., 2025).

    >>> round(quintic(1e-3).reached / 1e-3, 1)     # a small singular value is lifted about fourfold
    4.3
    """
    if low > 1 - 1e-3:  # the exchange is ill-conditioned here and the Padé step is as good
        return Polynomial(1.875, -1.25, 0.375, min(1.0, 1.875 * low - 1.25 * low**3 + 0.375 * low**5))
    inner, outer = (3 * low + 1) / 4, (low + 3) / 4
    a = b = c = error = 0.0
    for _ in range(60):
        x = np.array([low, inner, outer, 1.0])
        system = np.stack([x, x**3, x**5, [1.0, -1.0, 1.0, -1.0]], axis=1)
        a, b, c, error = (float(value) for value in np.linalg.solve(system, np.ones(4)))
        spread = math.sqrt(9 * b * b - 20 * a * c)
        near, far = sorted(((-3 * b - spread) / (10 * c), (-3 * b + spread) / (10 * c)))
        moved = abs(math.sqrt(near) - inner) + abs(math.sqrt(far) - outer)
        inner, outer = math.sqrt(near), math.sqrt(far)
        if moved < 1e-12:
            break
    top = 1 + abs(error)
    return Polynomial(a / top, b / top, c / top, (1 - abs(error)) / top)


def centered(step: Polynomial) -> Polynomial:
    """The same step scaled so that its errors lie evenly around 1: a quarter of the DfI at no cost.

    >>> step = cubic(0.9)
    >>> 1 - step.reached > 0.004, 1 - centered(step).reached < 0.0022
    (True, True)
    """
    middle = 2 / (1 + step.reached)
    return Polynomial(step.a * middle, step.b * middle, step.c * middle, step.reached * middle)


@lru_cache(maxsize=32)
def products(low: float, spread: float = 5e-4) -> tuple[Polynomial, ...]:
    """Quintic steps, then cubic ones, that take [low, 1] to within `spread` of 1; products only, for accelerators.

    >>> ["quintic" if step.c else "cubic" for step in products(0.05)]
    ['quintic', 'quintic', 'quintic', 'cubic']
    """
    steps: list[Polynomial] = []
    while True:
        # A quintic costs 3 products against 2; close to 1 both square the error, and the cubic is enough.
        step = quintic(round(low, 12)) if low < 0.93 else cubic(low)
        low = step.reached
        if (1 - low) / (1 + low) <= spread:
            return (*steps, centered(step))
        steps.append(step)


@lru_cache(maxsize=64)
def bulk(low: float, spread: float) -> tuple[Polynomial, ...]:
    """The fewest products that take [low, 1] to within `spread` of 1, as a quintic, up to two cubics, and quintics.

    A quintic lifts by 4.3 for three products, a cubic by 2.6 for two.

    >>> ["quintic" if step.c else "cubic" for step in bulk(0.02, 0.009)]
    ['quintic', 'cubic', 'quintic', 'quintic']
    """
    for products in range(3, 100):
        cubics = -products % 3
        if 3 + 2 * cubics <= products and _off(steps := _some(low, products, cubics)) <= spread:
            break
    return (*steps[:-1], centered(steps[-1]))


def _some(low: float, products: int, cubics: int) -> tuple[Polynomial, ...]:
    """The best steps on [low, 1]: a quintic, the cubics, and quintics for the products that remain."""
    steps: list[Polynomial] = []
    for i in range(cubics + (products - 2 * cubics) // 3):
        steps.append(cubic(low) if 1 <= i <= cubics else quintic(round(low, 12)))
        low = steps[-1].reached
    return tuple(steps)


def _off(steps: tuple[Polynomial, ...]) -> float:
    """How far from 1 the steps leave a spectrum once they are centered."""
    return (1 - steps[-1].reached) / (1 + steps[-1].reached)
