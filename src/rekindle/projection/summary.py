"""A cheap look at a block: the norm of each matrix and the DfI, from one Gram product, in bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.blocks.layouts import Block

# Elements converted to float32 at a time: 8 MB.
_CHUNK = 1 << 21


def look(block: Block, weight: Tensor, scale: float | None, measure: bool) -> tuple[Tensor, float | None, float | None]:
    """(norm of each matrix, DfI of the block at `scale`, DfI at each matrix's own scale ‖W‖_F/√k).

    Without a scale the first DfI is taken at the own one too; with `measure=False` both are None.

    >>> from rekindle.blocks.layouts import matrices
    >>> block = matrices("out in")((2, 3))[0]
    >>> look(block, 2 * torch.eye(2, 3), 1.0, True)
    (tensor([2.8284]), 18.0, 0.0)
    """
    if not measure:
        return block.layout.norms(weight, at_least_float32(weight)), None, None
    window = block.read(weight.detach())
    wide = window if block.out <= block.in_ else window.mT
    squares, total, free = [], 0.0, 0.0
    for several in torch.split(wide, max(1, _CHUNK // (block.out * block.in_))):
        gram = _gram(several)
        square = gram.diagonal(dim1=1, dim2=2).sum(1)
        own = square / block.smaller
        squares.append(square)
        # A zero matrix has no scale of its own: at any other it is k away from an isometry.
        free += _deviation(gram, own.where(own > 0, 1.0))
        total += _deviation(gram, own.where(own > 0, 1.0) if scale is None else torch.full_like(own, scale**2))
    return torch.cat(squares).sqrt(), total, free


def _deviation(gram: Tensor, squared_scale: Tensor) -> float:
    off = gram / squared_scale[:, None, None]
    off.diagonal(dim1=1, dim2=2).sub_(1.0)
    return float(off.square().sum())


def _gram(wide: Tensor) -> Tensor:
    """M·Mᵀ of matrices (count, k, n) with k ≤ n, in at least float32, a slice of columns at a time."""
    count, k, _ = wide.shape
    gram = torch.zeros(count, k, k, dtype=at_least_float32(wide), device=wide.device)
    for columns in torch.split(wide, max(1, _CHUNK // (count * k)), dim=2):
        columns = columns.to(gram.dtype)
        gram.baddbmm_(columns, columns.mT)
    return gram


def at_least_float32(tensor: Tensor) -> torch.dtype:
    """The dtype to compute in: float64 stays, everything else becomes float32.

    >>> at_least_float32(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
