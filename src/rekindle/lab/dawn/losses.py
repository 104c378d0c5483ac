"""Losses that keep neurons different.

Rows are neurons (n of them, in d dimensions). n > d neurons cannot be mutually orthogonal: their mean squared
cosine is at least the Welch bound (n/d − 1)/(n − 1) (Welch, 1974), so diversity is reported as a ratio to it. A QR
start reaches that bound almost exactly; the losses keep training from leaving it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rekindle.measures import welch_bound


def mean_squared_cosine(vectors: Tensor) -> Tensor:
    """Mean of cos² over all pairs of different rows of a (…, n, d) tensor, with gradients.

    ‖X̂X̂ᵀ‖_F = ‖X̂ᵀX̂‖_F, so memory is that of the smaller Gram matrix: n = 100,000 neurons in d = 64 dimensions
    need a 64×64 one. A zero row counts as orthogonal to all others.

    >>> mean_squared_cosine(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]))
    tensor(0.3333)
    """
    n, d = vectors.shape[-2:]
    if n < 2:
        raise ValueError(f"diversity needs at least two rows, the tensor has shape {tuple(vectors.shape)}")
    unit = nn.functional.normalize(vectors, dim=-1)
    gram = unit.mT @ unit if d < n else unit @ unit.mT
    alone = unit.square().sum(-1).square().sum(-1)
    return ((gram.square().sum((-2, -1)) - alone) / (n * (n - 1))).clamp_min(0)


def diversity_loss(vectors: Tensor, *, relative: bool = True) -> Tensor:
    """Mean squared cosine between rows, averaged over a batch; as a ratio to the Welch bound where n > d.

    1 is as different as n > d neurons can be; for n ≤ d the plain value, which can reach 0.

    >>> from rekindle.initial import orthogonal_
    >>> start = orthogonal_(torch.empty(512, 16), generator=torch.Generator().manual_seed(0))
    >>> round(diversity_loss(start).item(), 2), round(diversity_loss(torch.ones(512, 16)).item(), 1)
    (1.0, 16.5)
    """
    n, d = vectors.shape[-2:]
    value = mean_squared_cosine(vectors).mean()
    return value / float(welch_bound(n, d)) if relative and n > d else value


def basis_usage(coefficients: Tensor) -> Tensor:
    """How many basis elements each row effectively uses: (Σc²)²/Σc⁴, between 1 and d, smooth and scale-free.

    (The participation ratio. Counting entries above a threshold, as the orthogonal-start document does, has a
    gradient of zero everywhere.)

    >>> basis_usage(torch.tensor([[1.0, 0.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0], [1.0, 1.0, -1.0, 1.0]]))
    tensor([1., 2., 4.])
    """
    square = coefficients.square()
    tiny = torch.finfo(coefficients.dtype).tiny
    share = square / square.sum(-1, keepdim=True).clamp_min(tiny)
    return 1 / share.square().sum(-1).clamp_min(1 / coefficients.shape[-1])


def basis_usage_loss(coefficients: Tensor, *, at_least: float = 3.0) -> Tensor:
    """Mean shortfall of rows that use fewer than `at_least` basis elements, relative to it; 0 if none does.

    >>> basis_usage_loss(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))
    tensor(0.3333)
    """
    if not 1 <= at_least <= coefficients.shape[-1]:
        raise ValueError(f"at_least={at_least} must lie between 1 and the {coefficients.shape[-1]} basis elements")
    return (1 - basis_usage(coefficients) / at_least).clamp_min(0).mean()
