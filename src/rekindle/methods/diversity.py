"""Orthogonal starts, and losses that keep neurons different.

Rows are neurons (n of them, in d dimensions). n > d neurons cannot be mutually orthogonal: their mean squared
cosine is at least the Welch bound (n/d − 1)/(n − 1) (Welch, 1974), so diversity is reported as a ratio to it. A QR
start reaches that bound almost exactly; the losses keep training from leaving it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from rekindle.blocks import names
from rekindle.measures.matrices import welch_bound
from rekindle.sharding.team import refuse_shards

Penalty = Callable[[Tensor], Tensor]


@torch.no_grad()
def orthogonal_(tensor: Tensor, *, gain: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Fill a (…, n, d) tensor in place with matrices whose smaller side is orthonormal, uniformly drawn.

    Tall matrices get orthonormal columns, wide ones orthonormal rows, each matrix of a batch its own draw. The
    sign of R's diagonal is moved into Q: without that, QR does not draw uniformly (Mezzadri, 2007).

    >>> w = orthogonal_(torch.empty(6, 3), generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(w.T @ w, torch.eye(3), atol=1e-5)
    True
    """
    if tensor.ndim < 2:
        raise ValueError(f"an orthogonal start needs (…, n, d) with at least two axes, not shape {tuple(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"an orthogonal start needs a floating-point tensor, not {tensor.dtype}")
    *batch, rows, columns = tensor.shape
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    tall, short = max(rows, columns), min(rows, columns)
    device = generator.device if generator is not None else tensor.device
    gaussian = torch.randn(*batch, tall, short, generator=generator, dtype=dtype, device=device)
    q, r = torch.linalg.qr(gaussian)
    signs = r.diagonal(dim1=-2, dim2=-1).sign()
    q *= torch.where(signs == 0, 1, signs)[..., None, :]
    return tensor.copy_(gain * (q if rows >= columns else q.mT))


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

    >>> start = orthogonal_(torch.empty(512, 16), generator=torch.Generator().manual_seed(0))
    >>> round(diversity_loss(start).item(), 2), round(diversity_loss(torch.ones(512, 16)).item(), 1)
    (1.0, 16.5)
    """
    n, d = vectors.shape[-2:]
    value = mean_squared_cosine(vectors).mean()
    return value / float(welch_bound(n, d)) if relative and n > d else value


def orthogonality_loss(vectors: Tensor, *, unit: bool = False) -> Tensor:
    """‖G − I‖²_F / k of the Gram matrix on the smaller side, averaged over a batch: 0 for an isometry.

    `unit` looks at the directions of the rows only (their norms are divided out first), which n ≤ d rows can
    bring to 0 and n > d rows cannot.

    >>> orthogonality_loss(2 * torch.eye(3)), orthogonality_loss(2 * torch.eye(3), unit=True)
    (tensor(9.), tensor(0.))
    """
    rows = nn.functional.normalize(vectors, dim=-1) if unit else vectors
    n, d = rows.shape[-2:]
    gram = rows.mT @ rows if d < n else rows @ rows.mT
    identity = torch.eye(min(n, d), dtype=rows.dtype, device=rows.device)
    return ((gram - identity).square().sum((-2, -1)) / min(n, d)).mean()


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


@dataclass
class Penalised:
    """A loss on chosen parameters as a regulariser: add `loss_term(model)` to the training loss.

    `targets` are globs of parameter names; each parameter must have at least two axes (a convolution is taken as
    one row per filter). Zero matches is an error.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    >>> term = Penalised(diversity_loss, ["0.weight"], coefficient=0.01).loss_term(model)
    >>> term.requires_grad
    True
    """

    penalty: Penalty
    targets: Sequence[str]
    coefficient: float = 1.0
    flatten: bool = field(default=True)

    def loss_term(self, model: nn.Module) -> Tensor:
        """The coefficient times the sum of the penalty over the matching parameters."""
        refuse_shards(model, "Penalised", "steps")
        chosen = {
            name: parameter
            for name, parameter in names.named_parameters(model)
            if any(fnmatchcase(name, target) for target in self.targets)
        }
        if not chosen:
            raise ValueError(f"targets {list(self.targets)} match no parameter")
        for name, parameter in chosen.items():
            if parameter.ndim < 2:
                raise ValueError(f"{name!r} has shape {tuple(parameter.shape)}: it holds no rows to compare")
        rows = [p.flatten(1) if p.ndim > 2 and self.flatten else p for p in chosen.values()]
        return self.coefficient * torch.stack([self.penalty(r) for r in rows]).sum()
