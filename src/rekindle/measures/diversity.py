"""How different the neurons (rows) of a weight matrix are: angles between them, and which are dead.

Every function takes any number of leading dimensions and gives one number per matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rekindle.engine.devices import for_lapack
from rekindle.measures.spectra import gram, real

# A row whose norm is below this share of the largest row's holds rounding only.
DEAD_SHARE = 1e-6
# Cosines that one strip may hold at a time: all pairs of a 50,000-token head would take 10 GB.
_STRIP = 16_000_000


def mean_squared_cosine(w: Tensor) -> Tensor:
    """Mean cos² over all pairs of different neurons (rows that are not dead); NaN with fewer than two.

    ‖ŴŴᵀ‖_F = ‖ŴᵀŴ‖_F, so the smaller Gram matrix of the normalized rows is enough.

    >>> mean_squared_cosine(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 5.0]]))
    tensor(0.3333, dtype=torch.float64)
    """
    rows, live = _unit_rows(w)
    n = live.sum(-1)
    total = gram(rows).square().sum((-2, -1))
    return (total - n).clamp_min(0) / pairs_or_nan(n)


def welch_bound(neurons: int | Tensor, dimensions: int) -> float | Tensor:
    """The least mean cos² that n unit vectors can have in d dimensions: (n/d − 1)/(n − 1), 0 if n ≤ d.

    >>> round(welch_bound(512, 16), 4)
    0.0607
    """
    if isinstance(neurons, Tensor):
        n = neurons.to(torch.float64)
        return ((n / dimensions - 1) / (n - 1)).clamp_min(0)
    return max(0.0, (neurons / dimensions - 1) / (neurons - 1)) if neurons > 1 else 0.0


def welch_ratio(w: Tensor) -> Tensor:
    """Mean cos² ÷ the Welch bound: 1 is as diverse as can be. NaN where the bound is 0 (out ≤ in).

    >>> three = torch.tensor([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]])
    >>> round(welch_ratio(three).item(), 4)
    1.0
    """
    w = for_lapack(w)
    cosine = mean_squared_cosine(w)
    bound = welch_bound(_live(real(w)).sum(-1), w.shape[-1])
    assert isinstance(bound, Tensor)
    bound = bound.to(cosine.dtype)
    return torch.where(bound > 0, cosine / bound, torch.full_like(cosine, math.nan))


def similar_pairs(w: Tensor, tau: float = 0.8) -> Tensor:
    """Share of neuron pairs with |cosine| > τ among the rows that are not dead; NaN with fewer than two.

    >>> similar_pairs(torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 1.0]]))
    tensor(0.3333, dtype=torch.float64)
    """
    rows, live = _unit_rows(w)
    neurons, count = rows.shape[-2], live.sum(-1)
    found = torch.zeros(count.shape, dtype=torch.int64, device=rows.device)
    strip = max(1, min(neurons, _STRIP // max(1, neurons * max(1, count.numel()))))
    for start in range(0, neurons, strip):
        cosines = rows[..., start : start + strip, :] @ rows.mT
        found += torch.count_nonzero(cosines.abs() > tau, dim=(-2, -1))
    # Each live neuron was compared with itself once.
    return (found - count * (tau < 1)).to(rows.dtype) / pairs_or_nan(count)


def dead_rows(w: Tensor, share: float = DEAD_SHARE) -> Tensor:
    """How many neurons have no incoming weight: row norm ≤ `share` of the largest row's.

    >>> dead_rows(torch.tensor([[1.0, 2.0], [0.0, 0.0]]))
    tensor(1)
    """
    return w.shape[-2] - _live(real(w), share).sum(-1)


def dead_columns(w: Tensor, share: float = DEAD_SHARE) -> Tensor:
    """How many inputs are barely used: column norm ≤ `share` of the largest column's.

    >>> dead_columns(torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
    tensor(1)
    """
    return dead_rows(w.mT, share)


def row_norm_spread(w: Tensor) -> Tensor:
    """Standard deviation of the row norms ÷ their mean; NaN for a zero matrix.

    >>> row_norm_spread(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    tensor(0.5000)
    """
    norms = real(w).square().sum(-1).sqrt()
    return norms.std(-1, correction=0) / norms.mean(-1)


def above(norms: Tensor, share: float = DEAD_SHARE) -> Tensor:
    """Which norms are more than rounding, relative to the largest.

    >>> above(torch.tensor([1.0, 1e-9]))
    tensor([ True, False])
    """
    return norms > share * norms.amax(-1, keepdim=True)


def _live(w: Tensor, share: float = DEAD_SHARE) -> Tensor:
    return above(w.square().sum(-1).sqrt(), share)


def _unit_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    w = real(for_lapack(w))
    live = _live(w)
    norms = w.square().sum(-1, keepdim=True).sqrt()
    return torch.where(live[..., None], w / norms.clamp_min(torch.finfo(w.dtype).tiny), 0), live


def pairs_or_nan(n: Tensor) -> Tensor:
    """n(n − 1), the ordered pairs of n things; NaN where there are none.

    >>> pairs_or_nan(torch.tensor([3, 1])).tolist()
    [6.0, nan]
    """
    pairs = (n * (n - 1)).double()
    return torch.where(pairs > 0, pairs, math.nan)
