"""The directions that an iteration could not lift: rebuilt from the matrix itself, or invented where it has none.

A dead neuron, a duplicate or a very small singular value leaves an iterate X (n × m, n ≤ m) that is an isometry on most
directions and falls short on a few. Those are found in I − XXᵀ, cut out of X, and rebuilt in float64 from the original
matrix W. Where W is zero along them too, any orthonormal filling is equally near to W; ours is the projection of a
fixed random matrix drawn in the *ambient* space, because coordinates inside the null space change with the thread
count while the null space itself does not.

Everything here works on a batch (batch, n, m) and costs thin products only, a few percent of a solve for a few
directions. The matrices of a batch share one number of directions, the largest; rows of zeros stand for those that a
matrix does not lack. A CPU therefore passes one matrix at a time and wastes nothing; an accelerator passes all of a
shape and waits once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NULL = 1e-10  # of σ_max: below this float64 cannot distinguish a direction of W from rounding in the projections
SINGLE = 3e-5  # of σ_max: above this float32 rebuilds a direction to better than 1e-3
MARGIN = 6  # probes beyond the expected number of directions


@dataclass(frozen=True)
class Rebuilt:
    """The repaired matrices, in how many directions each W is zero, and which lack too much to be repaired."""

    x: Tensor
    null: Tensor
    failed: Tensor


def rebuild(
    x: Tensor, w: Tensor, *, sigma: Tensor, expected: int, most: int, threshold: float, seeds: Tensor, complete: bool
) -> Rebuilt:
    """Repair the directions in which XXᵀ differs from I by more than `threshold`.

    `sigma` is σ_max of each matrix of `w`, `expected` a guess at the number of such directions. A matrix has failed if
    there are more than `most`: then X is not an isometry with gaps, and another route is cheaper.
    """
    n = x.shape[1]
    size = min(n, int(1.3 * expected) + MARGIN)
    while True:
        left, count = _short_directions(x, size, threshold, seeds)
        largest = int(count.max())
        if largest < size or size == n or size > most:
            break
        size = min(n, 2 * size)
    failed = (count >= size) & (size < n)
    null = torch.zeros_like(count, dtype=torch.int32)
    if not largest or (largest == size < n and x.shape[0] == 1):
        return Rebuilt(x, null, failed)
    left = left[:, :largest]

    rows = left.to(x.dtype)
    kept = torch.baddbmm(x, rows.mT, rows @ x, alpha=-1)
    exact = kept
    absent = torch.arange(largest, device=x.device) >= count[:, None]
    limit = sigma.double()[:, None]
    # Rows of left·W are as small as the singular values that were missed. Rounding puts about 1e-8 of σ_max into each
    # of them, so float32 settles those that are well above it, at a third of the cost; float64 the others.
    for dtype in dict.fromkeys((x.dtype, torch.float64)):
        exact = kept.to(dtype)
        q, c = torch.linalg.qr(_off_rows(left.to(dtype) @ w.to(dtype), exact).double().mT)
        c.diagonal(0, 1, 2).add_(absent * (10 * limit))  # padding rows: first in the order, far from null
        u, s, vh = torch.linalg.svd(c.mT)
        if bool((s[:, -1:] > SINGLE * limit).all()):
            break
    zero = s <= NULL * limit
    found = ~zero & (torch.arange(largest, device=x.device) >= largest - count[:, None])
    beside = found[:, :, None] * (vh @ q.mT)
    rebuilt = u @ beside
    null = zero.sum(1, dtype=torch.int32)
    lacking = int(null.max()) if complete else 0
    if lacking:
        inner = u[:, :, -lacking:] * zero[:, None, -lacking:]
        rebuilt += inner @ _invent(inner.mT @ left, null, exact, beside, seeds)
    return Rebuilt(kept.baddbmm_(rows.mT, rebuilt.to(x.dtype)), null, failed)


def fill(x: Tensor, left: Tensor, count: Tensor, seeds: Tensor) -> Tensor:
    """Complete partial isometries x (batch, n, m) that lack the orthonormal directions `left` (batch, k, n).

    Of a matrix that lacks fewer than k, `count` says how many, and its other rows of `left` are zero.

    >>> x = torch.eye(4, 6, dtype=torch.float64)[None].clone()
    >>> x[0, 1] = 0
    >>> left = torch.eye(4, dtype=torch.float64)[None, 1:2]
    >>> full = fill(x, left, torch.tensor([1]), seeds=torch.tensor([0]))
    >>> torch.allclose(full @ full.mT, torch.eye(4, dtype=torch.float64))
    True
    """
    nothing = left.new_zeros(left.shape[0], 1, x.shape[2])
    return x + (left.mT @ _invent(left, count, x.double(), nothing, seeds)).to(x.dtype)


def _short_directions(x: Tensor, size: int, threshold: float, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal rows, in float64, that span the directions where |I − XXᵀ| exceeds the threshold, and their number.

    The worst directions come first; rows beyond a matrix's number are zero.
    """
    batch, n, _ = x.shape
    if size == n:
        seen, basis = x.double(), None
    else:
        rows = _normal((size, n), seeds, x)
        for _ in range(2):  # twice: the bulk is at 5e-4, and must be negligible beside the threshold
            rows = rows - (rows @ x) @ x.mT
        basis = torch.linalg.qr(rows.double().mT)[0].mT
        seen = basis.to(x.dtype) @ x
    values, vectors = torch.linalg.eigh(torch.eye(size, dtype=seen.dtype, device=x.device) - seen @ seen.mT)
    values, order = values.abs().sort(1, descending=True)
    short = values > threshold
    left = vectors.double().gather(2, order[:, None].expand(batch, size, size)).mT * short[:, :, None]
    return left if basis is None else left @ basis, short.sum(1)


def _invent(left: Tensor, count: Tensor, kept: Tensor, beside: Tensor, seeds: Tensor) -> Tensor:
    """Orthonormal rows for the null directions `left`, orthogonal to the rows of `kept` and of `beside`."""
    ambient = _normal((left.shape[2], kept.shape[2]), seeds + 1, kept)
    rows = left @ ambient.double()
    for _ in range(2):  # one pass leaves what rounding put back
        rows = _off_rows(rows - (rows @ beside.mT) @ beside, kept)
    q, c = torch.linalg.qr(rows.mT)
    u, _, vh = torch.linalg.svd(c.mT)
    wanted = torch.arange(left.shape[1], device=left.device) < count[:, None]
    filled: Tensor = (u * wanted[:, None]) @ (vh @ q.mT)
    return filled


def _off_rows(rows: Tensor, isometry: Tensor) -> Tensor:
    """Remove from `rows` what lies in the row space of a nearly isometric matrix.

    The isometry is good to 5e-4, so each pass leaves 5e-4 of what lay inside. A row that was (nearly) all inside needs
    several, until what is left no longer shrinks.
    """
    length = torch.linalg.vector_norm(rows, dim=2)
    for _ in range(5):
        rows = torch.baddbmm(rows, rows @ isometry.mT, isometry, alpha=-1)
        before, length = length, torch.linalg.vector_norm(rows, dim=2)
        if bool((length >= 0.9 * before).all()):
            break
    return rows


def _normal(shape: tuple[int, int], seeds: Tensor, like: Tensor) -> Tensor:
    """Normal numbers for each matrix that depend on its seed alone: drawn on the CPU, whatever the device."""
    drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds.tolist()]
    return torch.stack(drawn).to(like.device, like.dtype)
