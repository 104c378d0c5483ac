"""Symmetric matrices at half the price: products of two that commute, and solves with I + cA by block Cholesky.

All functions take batches (batch, n, …). A positive definite matrix is factored in place, recursively, into blocks
large enough that nearly all the work is matrix products: worth it on CPUs, where LAPACK's own routines reach a third to
a half of the speed of a product at these sizes (benchmarks/polar.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.engine.arithmetic import WHOLE, band, mirrored


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """A·B of two symmetric matrices that commute, so that the product is symmetric and half of it is enough.

    >>> a = torch.randn(1, 400, 400, dtype=torch.float64)
    >>> a = a + a.mT
    >>> torch.allclose(symmetric_product(a, a), a @ a)
    True
    """
    n = a.shape[1]
    if n < WHOLE:
        return torch.bmm(a, b)
    out = torch.empty_like(a)
    step = band(n)
    for top in range(0, n, step):
        end = min(n, top + step)
        torch.bmm(a[:, top:end], b[:, :, :end], out=out[:, top:end, :end])
    return mirrored(out)


def leaf(n: int) -> int:
    """Side of the diagonal blocks that LAPACK factors; measured best on both sides of 512."""
    return 32 if n <= 512 else 64


def factor(a: Tensor, size: int) -> None:
    """Factor a = LLᵀ in place: below the diagonal blocks L itself, on them the *inverse* of L's block.

    Keeping the inverses turns every triangular solve into products. Only the lower half of `a` is read.
    """
    n = a.shape[-1]
    if n <= size:
        lower, _ = torch.linalg.cholesky_ex(a)
        identity = torch.eye(n, dtype=a.dtype, device=a.device).expand_as(a)
        a.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return
    h = _half(n, size)
    first, below, last = a[:, :h, :h], a[:, h:, :h], a[:, h:, h:]
    factor(first, size)
    _solve_right(first, below, size)
    step = band(n - h)
    for top in range(0, n - h, step):  # last −= below·belowᵀ, its lower half
        end = min(n - h, top + step)
        last[:, top:end, :end].baddbmm_(below[:, top:end], below[:, :end].mT, alpha=-1)
    factor(last, size)


def solve_lower(factored: Tensor, x: Tensor, out: Tensor, size: int) -> None:
    """out ← L⁻¹x for `factored` as `factor` left it; x is used up, so that nothing needs to be copied."""
    n = factored.shape[-1]
    if n <= size:
        torch.bmm(factored, x, out=out)
        return
    h = _half(n, size)
    solve_lower(factored[:, :h, :h], x[:, :h], out[:, :h], size)
    x[:, h:].baddbmm_(factored[:, h:, :h], out[:, :h], alpha=-1)
    solve_lower(factored[:, h:, h:], x[:, h:], out[:, h:], size)


def solve_upper(factored: Tensor, x: Tensor, out: Tensor, size: int) -> None:
    """out ← L⁻ᵀx for `factored` as `factor` left it; x is used up."""
    n = factored.shape[-1]
    if n <= size:
        torch.bmm(factored.mT, x, out=out)
        return
    h = _half(n, size)
    solve_upper(factored[:, h:, h:], x[:, h:], out[:, h:], size)
    x[:, :h].baddbmm_(factored[:, h:, :h].mT, out[:, h:], alpha=-1)
    solve_upper(factored[:, :h, :h], x[:, :h], out[:, :h], size)


def inverse(a: Tensor) -> Tensor:
    """a⁻¹ of a positive definite batch, of which the lower half is read and destroyed; both halves returned.

    >>> x = torch.randn(1, 200, 300, dtype=torch.float64)
    >>> a = x @ x.mT
    >>> torch.allclose(inverse(a.clone()) @ a, torch.eye(200, dtype=torch.float64), atol=1e-9)
    True
    """
    size = leaf(a.shape[-1])
    factor(a, size)
    lower = torch.zeros_like(a)
    _invert(a, lower, size)
    n, out = a.shape[-1], a
    step = band(n) if n >= WHOLE else n
    for left in range(0, n, step):  # L⁻ᵀL⁻¹, its lower half, past the zeros of L⁻¹
        end = min(n, left + step)
        torch.bmm(lower[:, left:, left:end].mT, lower[:, left:, :end], out=out[:, left:end, :end])
    return mirrored(out) if n >= WHOLE else out


def _half(n: int, size: int) -> int:
    """Where to cut: the middle, at a whole number of leaves."""
    return -(-n // size) // 2 * size


def _solve_right(factored: Tensor, x: Tensor, size: int) -> None:
    """x ← xL⁻ᵀ in place."""
    n = factored.shape[-1]
    if n <= size:
        x.copy_(torch.bmm(x, factored.mT))
        return
    h = _half(n, size)
    _solve_right(factored[:, :h, :h], x[:, :, :h], size)
    x[:, :, h:].baddbmm_(x[:, :, :h], factored[:, h:, :h].mT, alpha=-1)
    _solve_right(factored[:, h:, h:], x[:, :, h:], size)


def _invert(factored: Tensor, out: Tensor, size: int) -> None:
    """out ← L⁻¹, whose upper half the caller has zeroed."""
    n = factored.shape[-1]
    if n <= size:
        out.copy_(factored)
        return
    h = _half(n, size)
    _invert(factored[:, :h, :h], out[:, :h, :h], size)
    _invert(factored[:, h:, h:], out[:, h:, h:], size)
    corner = torch.bmm(factored[:, h:, :h], out[:, :h, :h])
    out[:, h:, :h].baddbmm_(out[:, h:, h:], corner, alpha=-1)
