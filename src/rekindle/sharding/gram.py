"""Tall matrices cut along their long side: the Gram matrices of the pieces are added up instead of moving the rows.

With W = [W₁; W₂; …] the polar factor is W(WᵀW)^(-1/2), and WᵀW = ΣWᵢᵀWᵢ: each rank sends k×k numbers, gets a k×k
factor back and multiplies its own rows. That squares the condition number, so sums are float64 and the owner rejects
ill-conditioned matrices (`factor` returns None); they are assembled like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from rekindle.engine.arithmetic import gram, mirrored
from rekindle.engine.bulk import MOST
from rekindle.engine.isometry import polar
from rekindle.engine.solving import Certificate, Solving
from rekindle.sharding.owners import Parcel
from rekindle.sharding.spread import Piece

# σ_min/σ_max below which the route is not taken. In float64 the factor is then good to 1e-16·(1e3)² = 1e-10.
WORST_CONDITION = 1e-3
ROUNDED_CONDITION = 1e-2  # from which on float32 is used
_ROWS = 1 << 18  # elements converted to float64 at a time


def pays(parcel: Parcel) -> bool:
    """Whether the Gram route moves less than assembling the matrix: one 2-D matrix, cut along its long side only.

    >>> from rekindle.blocks.layouts import matrices
    >>> from rekindle.sharding.spread import Spread
    >>> from rekindle.sharding.units import units
    >>> def parcel(rows):
    ...     spread = Spread((rows, 8), (2,), (0, 1), ((0, 0),))
    ...     return Parcel(0, units([matrices("out in")((rows, 8))[0].layout], spread)[0], spread, 4)
    >>> pays(parcel(64)), pays(parcel(16))
    (True, False)
    """
    unit, spread = parcel.unit, parcel.spread
    if len(unit.shape) != 2 or len(unit.parts) != 1 or parcel.itemsize < 4:
        return False
    count, out, in_ = unit.parts[0].layout.sizes
    if count != 1 or out * in_ != unit.shape[0] * unit.shape[1] or unit.parts[0].layout.take:
        return False
    long = 0 if unit.shape[0] >= unit.shape[1] else 1
    if not spread.splits or any(dim != long for dim, _ in spread.splits) or spread.holders(unit.box):
        return False
    pieces = sum(bool(spread.held(rank, unit.box)) for rank in spread.ranks if spread.sends(rank, spread.ranks[0]))
    whole = unit.shape[0] * unit.shape[1] * parcel.itemsize
    short = 8 * unit.shape[1 - long] ** 2
    # One piece is at the owner already; copies of a piece get the result too, in both routes.
    return (pieces - 1) * short < whole * (pieces - 1) / pieces


def gram_of(local: Tensor, pieces: Sequence[Piece], shape: Sequence[int]) -> Tensor:
    """The Gram matrix, on the short side, of a rank's own pieces of a matrix of `shape`; float64.

    >>> gram_of(torch.ones(3, 2), [Piece((slice(0, 3), slice(0, 2)), (slice(0, 3), slice(0, 2)), (3, 2))], (6, 2))
    tensor([[3., 3.],
            [3., 3.]], dtype=torch.float64)
    """
    tall = shape[0] >= shape[1]
    side = min(shape)
    total = torch.zeros(1, side, side, dtype=torch.float64, device=local.device)
    for piece in pieces:
        rows = local[piece.local] if tall else local[piece.local].mT
        for part in torch.split(rows, max(1, _ROWS // side)):
            gram(part.double().mT[None], by="half", out=total, add=True)
    return mirrored(total)[0]


def factor(products: Tensor, dtype: torch.dtype, **solving: Unpack[Solving]) -> tuple[Tensor, Certificate] | None:
    """What to multiply the rows of a weight of `dtype` with, and its certificate; None if G is ill-conditioned.

    An exact G^(-1/2) would be 1e-4 from what one process writes, which ends within the tolerance and no further. So
    the solver gets [G^½ 0]: it has the Gram matrix of W, and every route is a function of that times the matrix.

    >>> change, certificate = factor(4 * torch.eye(2, dtype=torch.float64), torch.float32)
    >>> change.tolist(), float(certificate.nuclear)
    ([[0.5, 0.0], [0.0, 0.5]], 4.0)
    >>> factor(torch.diag(torch.tensor([1.0, 1e-9], dtype=torch.float64)), torch.float32) is None
    True
    """
    values, vectors = torch.linalg.eigh(products)
    if not bool(values[0] > WORST_CONDITION**2 * values[-1]):
        return None
    root = values.sqrt()
    # Rounded to float32 G^½ is off by 6e-8/1e-2 in its smallest direction; beyond that float64 is the solver's way too,
    # except for small matrices, whose own rounding in float32 no other way repeats.
    rounded = dtype != torch.float64 and bool(root[0] > ROUNDED_CONDITION * root[-1])
    if dtype != torch.float64 and not rounded and len(root) <= MOST:
        return None
    same = products.new_zeros(len(root), 2 * len(root))  # wide enough for the routes of any wider one
    same[:, : len(root)] = (vectors * root) @ vectors.mT
    isometry, certificate = polar(same.to(torch.float32 if rounded else torch.float64), certificate=True, **solving)
    if not bool(certificate.converged) or bool(certificate.completed):
        return None
    inverse = (vectors / root) @ vectors.mT
    return inverse @ isometry[:, : len(root)].double().mT, certificate.to_host()


class Scratch:
    """Memory for `apply_factor`, allocated beforehand: once all ranks agreed to write, nothing may fail."""

    def __init__(self, side: int, device: torch.device) -> None:
        self._rows, self._products = (torch.empty(max(_ROWS, side), dtype=torch.float64, device=device) for _ in "ab")

    @property
    def size(self) -> int:
        """Bytes."""
        return 2 * self._rows.numel() * self._rows.element_size()

    def multiply(self, part: Tensor, change: Tensor) -> None:
        """part ← part·change, computed in float64."""
        rows, products = (each[: part.numel()].view(part.shape) for each in (self._rows, self._products))
        part.copy_(torch.mm(rows.copy_(part), change, out=products))


def apply_factor(
    local: Tensor, pieces: Sequence[Piece], shape: Sequence[int], change: Tensor, scratch: Scratch
) -> None:
    """Multiply a rank's own pieces by the k×k matrix that came back, in place."""
    tall = shape[0] >= shape[1]
    for piece in pieces:
        rows = local[piece.local] if tall else local[piece.local].mT
        for part in torch.split(rows, max(1, _ROWS // min(shape))):
            scratch.multiply(part, change)
