"""The directions that an iteration could not lift: rebuilt from the matrix itself, or invented where it has none.

A dead neuron, a duplicate or a very small singular value leaves an iterate X (n × m, n ≤ m) that is an isometry on most
directions and falls short on a few. Those are found in I − XXᵀ, cut out of X, and rebuilt in float64 from the original
matrix W. Where W is zero along them too, any orthonormal filling is equally near to W; ours is the projection of a
fixed random matrix drawn in the *ambient* space, because coordinates inside the null space change with the thread
count while the null space itself does not.

Everything here works on one matrix at a time and costs thin products only, a few percent of a solve for a few
directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NULL = 1e-10  # of σ_max: below this float64 cannot tell a direction of W from rounding in the projections
SINGLE = 3e-5  # of σ_max: above this float32 rebuilds a direction to better than 1e-3
MARGIN = 6  # probes beyond the expected number of directions


@dataclass(frozen=True)
class Rebuilt:
    """The repaired matrix, and in how many directions W is zero."""

    x: Tensor
    null: int


def rebuild(
    x: Tensor, w: Tensor, *, sigma: float, expected: int, most: int, threshold: float, seed: int, complete: bool
) -> Rebuilt | None:
    """Repair the directions in which XXᵀ differs from I by more than `threshold`.

    `sigma` is σ_max of `w`, `expected` a guess at the number of such directions. None if there are more than `most`:
    then X is not an isometry with gaps, and another route is cheaper.
    """
    n = x.shape[0]
    size = min(n, int(1.3 * expected) + MARGIN)
    while True:
        left = _short_directions(x, size, threshold, seed)
        if left.shape[0] < size or size == n:
            break
        if size > most:
            return None
        size = min(n, 2 * size)
    if not left.shape[0]:
        return Rebuilt(x, 0)

    rows = left.to(x.dtype)
    kept = torch.addmm(x, rows.mT, rows @ x, alpha=-1)
    exact = kept
    # Rows of left·W are as small as the singular values that were missed. Rounding puts about 1e-8 of σ_max into each
    # of them, so float32 settles those that are well above it, at a third of the cost; float64 the others.
    for dtype in dict.fromkeys((x.dtype, torch.float64)):
        exact = kept.to(dtype)
        q, c = torch.linalg.qr(_off_rows(left.to(dtype) @ w.to(dtype), exact).double().mT)
        u, s, vh = torch.linalg.svd(c.mT)
        if float(s.min()) > SINGLE * sigma:
            break
    found = s > NULL * sigma
    rebuilt = u[:, found] @ (vh[found] @ q.mT)
    null = int((~found).sum())
    if null and complete:
        inner = u[:, ~found]
        rebuilt += inner @ _invent(inner.mT @ left, exact, vh[found] @ q.mT, seed)
    return Rebuilt(kept.addmm_(rows.mT, rebuilt.to(x.dtype)), null)


def fill(x: Tensor, left: Tensor, seed: int) -> Tensor:
    """Complete a partial isometry x (n × m) that lacks the orthonormal directions `left` (k × n).

    >>> x = torch.eye(4, 6, dtype=torch.float64)
    >>> x[1] = 0
    >>> full = fill(x, torch.eye(4, dtype=torch.float64)[1:2], seed=0)
    >>> torch.allclose(full @ full.mT, torch.eye(4, dtype=torch.float64))
    True
    """
    return x + (left.mT @ _invent(left, x.double(), left.new_zeros(0, x.shape[1]), seed)).to(x.dtype)


def _short_directions(x: Tensor, size: int, threshold: float, seed: int) -> Tensor:
    """Orthonormal rows, in float64, that span the directions where |I − XXᵀ| exceeds the threshold."""
    n = x.shape[0]
    if size == n:
        wide = x.double()
        values, vectors = torch.linalg.eigh(torch.eye(n, dtype=torch.float64, device=x.device) - wide @ wide.mT)
        left: Tensor = vectors[:, values.abs() > threshold].mT.contiguous()
        return left
    rows = _normal((size, n), seed, x)
    for _ in range(2):  # twice: the bulk stands at 5e-4 against the threshold, and is to vanish beside it
        rows = rows - (rows @ x) @ x.mT
    basis = torch.linalg.qr(rows.double().mT)[0].mT
    seen = basis.to(x.dtype) @ x
    values, vectors = torch.linalg.eigh(torch.eye(size, dtype=seen.dtype, device=x.device) - seen @ seen.mT)
    left = vectors[:, values.abs() > threshold].double().mT @ basis
    return left


def _invent(left: Tensor, kept: Tensor, beside: Tensor, seed: int) -> Tensor:
    """Orthonormal rows for the null directions `left`, orthogonal to the rows of `kept` and of `beside`."""
    ambient = _normal((left.shape[1], kept.shape[1]), seed + 1, kept)
    rows = left @ ambient.double()
    for _ in range(2):  # once leaves what rounding put back
        rows = _off_rows(rows - (rows @ beside.mT) @ beside, kept)
    q, c = torch.linalg.qr(rows.mT)
    u, _, vh = torch.linalg.svd(c.mT)
    filled: Tensor = u @ (vh @ q.mT)
    return filled


def _off_rows(rows: Tensor, isometry: Tensor) -> Tensor:
    """Remove from `rows` what lies in the row space of a nearly isometric matrix.

    The isometry is good to 5e-4, so each pass leaves 5e-4 of what lay inside. A row that was (nearly) all inside needs
    several, until what is left no longer shrinks.
    """
    length = torch.linalg.vector_norm(rows, dim=1)
    for _ in range(5):
        rows = torch.addmm(rows, rows @ isometry.mT, isometry, alpha=-1)
        before, length = length, torch.linalg.vector_norm(rows, dim=1)
        if bool((length >= 0.9 * before).all()):
            break
    return rows


def _normal(shape: tuple[int, int], seed: int, like: Tensor) -> Tensor:
    """Normal numbers that depend on the seed alone: drawn on the CPU, whatever the device."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return drawn.to(like.device, like.dtype)
