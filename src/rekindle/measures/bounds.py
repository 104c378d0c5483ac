"""The four bounds of the FIRE paper: what a small SFE and a small DfI promise about a network.

DfI here is at the layer's own scale (s = 1 after division). Bounds 3 and 4 say something only where ε = √DfI < 1
and out ≤ in; `tests/test_theorems.py` checks all four on random networks, `docs/theorems.md` shows how tight.

>>> rank_bound(dfi=0.0, dimensions=512, delta=0.01)
507
>>> score_bounds(dfi=81.0) is None  # what the released 10 steps leave on a Gaussian 512×512 matrix
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def covariance_bound(sfe: float, *, inputs: float, features: float, layers: int, spectral_norm: float) -> float:
    """Theorem 1: how far the normalized feature covariance C = HHᵀ/‖H‖²_F can move, ‖C − C̃‖_F.

    `sfe` is summed over the layers, `inputs` is ‖Z‖_F, `features` the smaller ‖H‖_F of the two networks and
    `spectral_norm` the largest of any layer of both. Holds for 1-Lipschitz activations with σ(0) = 0. Never
    more than √2 can happen, so a larger bound says nothing.

    >>> covariance_bound(1e-4, inputs=1.0, features=1.0, layers=1, spectral_norm=1.0)
    0.04
    """
    return 4 * inputs / features * math.sqrt(layers) * spectral_norm ** (layers - 1) * math.sqrt(sfe)


def curvature_bound(dfis: Sequence[float], *, hessian: float, gradient: float) -> float:
    """Theorem 2: how large the loss Hessian's norm can be, for whitened inputs and a fixed ReLU pattern.

    `hessian` and `gradient` bound the per-sample loss as a function of the network's output (½ and √2 for
    softmax cross-entropy). `dfis` holds one DfI per layer.

    >>> curvature_bound([0.0, 0.0], hessian=0.5, gradient=math.sqrt(2)).__round__(3)
    3.828
    """
    growth = [1 + math.sqrt(dfi) for dfi in dfis]
    layers = range(len(growth))

    def without(*left_out: int) -> float:
        return math.prod(growth[at] for at in layers if at not in left_out)

    own = sum(without(k) for k in layers)
    crossed = sum(without(k, j) for k in layers for j in layers if k < j)
    return hessian * own + 2 * gradient * crossed


def rank_bound(*, dfi: float, dimensions: int, delta: float = 0.01, spread: float = 1.0) -> int | None:
    """Theorem 3: the least srank_δ of a layer's output; None where DfI ≥ 1 and nothing follows.

    `spread` is the ratio of the largest to the smallest eigenvalue of the inputs' second moment. The output has
    `dimensions` ≤ in.

    >>> rank_bound(dfi=0.25, dimensions=100, delta=0.1), rank_bound(dfi=1.0, dimensions=100)
    (84, None)
    """
    ratio = _ratio(dfi)
    if ratio is None:
        return None
    # Rounding must not lift a whole number to the next one: a lower bound errs downwards.
    least = (1 - delta) * dimensions / (delta * ratio * math.sqrt(spread) + 1 - delta)
    return math.ceil(least * (1 - 1e-12))


def score_bounds(*, dfi: float) -> tuple[float, float] | None:
    """Theorem 4: the range of dormancy scores on Gaussian inputs; None where DfI ≥ 1 and nothing follows.

    Holds for positive-homogeneous activations (ReLU and leaky variants) where out ≤ in.

    >>> score_bounds(dfi=0.0)
    (1.0, 1.0)
    """
    ratio = _ratio(dfi)
    return None if ratio is None else (1 / ratio, ratio)


def _ratio(dfi: float) -> float | None:
    """√((1 + ε)/(1 − ε)), the most that σ_max/σ_min can be."""
    epsilon = math.sqrt(dfi)
    return None if epsilon >= 1 else math.sqrt((1 + epsilon) / (1 - epsilon))
