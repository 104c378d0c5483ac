"""The arithmetic that all routes share: in full precision, from one Gram matrix to a result that is checked.

`gram` is the one place that multiplies matrices by their own transposes. A route begins with what the Gram matrix shows
about W (`start`) and ends with `settle`, which repairs what is not yet an isometry and, with a Gram matrix, checks the
result. Batches are (batch, n, m) with n ≤ m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rekindle.engine.completion import rebuild

WHOLE = 160  # below this the halves of a Gram matrix cost more in calls than they save in products
HEADROOM = 1.2  # margin on the estimate of σ_max², which is a lower bound; Halley steps tolerate too large a value
WATCHED_FROM = 192  # rows from which on a power iteration is cheaper than a Gram matrix
CLOSE = 1e-6  # DfI/n that every route reaches before any polishing
SHORT = (1e-5, 0.45)  # of ‖W‖_* that tr(QᵀW) may lack: at least the first, and up to the second × √tol


def gram(
    x: Tensor,
    *,
    by: Literal["syrk", "blocks", "half"] = "syrk",
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """XXᵀ of x (batch, n, m), symmetric: half the products are enough.

    "syrk" goes through numpy on a CPU, which sees that both factors are one matrix (BLAS syrk; torch has none): 10 to
    25 % faster than "blocks" for single matrices, and not in batches. "blocks" computes the blocks up to the diagonal
    ones, those of all matrices at once, and mirrors them; "half" leaves the upper ones zero, or as they were in `out`.
    Both compute the whole product if n < WHOLE. `add` adds it to what `out` holds.

    >>> x = torch.randn(2, 400, 500, dtype=torch.float64)
    >>> all(torch.allclose(gram(x, by=way), x @ x.mT) for way in ("syrk", "blocks"))
    True
    """
    if by == "syrk":
        return _by_syrk(x)
    n = x.shape[1]
    if n < WHOLE and not add:
        return torch.bmm(x, x.mT) if out is None else torch.bmm(x, x.mT, out=out)
    if out is None:
        out = x.new_zeros(x.shape[0], n, n)
    step = band(n) if n >= WHOLE else max(1, n)
    for top in range(0, n, step):
        end = min(n, top + step)
        rows, columns, into = x[:, top:end], x[:, :end].mT, out[:, top:end, :end]
        if add:
            into.baddbmm_(rows, columns)
        else:
            torch.bmm(rows, columns, out=into)
    return mirrored(out) if by == "blocks" else out


def _by_syrk(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return x @ x.mT
    g = torch.empty((*x.shape[:-1], x.shape[-2]), dtype=x.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        for each, into in zip(x.reshape(-1, *x.shape[-2:]).numpy(), g.view(-1, *g.shape[-2:]).numpy(), strict=True):
            np.matmul(each, each.T, out=into)
    return g


def band(n: int) -> int:
    """Rows of a Gram matrix of side n that are computed at a time, measured best."""
    return 64 if n <= 512 else 128


def mirrored(a: Tensor) -> Tensor:
    """Copy the blocks below the diagonal blocks of a (batch, n, n) to above them, in place.

    >>> x = torch.randn(1, 400, 400)
    >>> torch.equal(mirrored(gram(x, by="half")), gram(x, by="blocks"))
    True
    """
    n = a.shape[1]
    step = band(n)
    for top in range(step, n, step):
        end = min(n, top + step)
        a[:, :top, top:end] = a[:, top:end, :top].mT
    return a


def norm2(a: Tensor) -> Tensor:
    """‖A‖²_F of Gram matrices from `gram(by="half")`: a mirrored half would be counted twice.

    >>> x = torch.randn(2, 400, 400, dtype=torch.float64)
    >>> torch.allclose(norm2(gram(x, by="half")), (x @ x.mT).square().sum((1, 2)))
    True
    """
    n = a.shape[1]
    total: Tensor = torch.linalg.vector_norm(a, dim=(1, 2)).square()
    if n < WHOLE:
        return total
    step = band(n)
    for top in range(0, n, step):
        corner = torch.linalg.vector_norm(a[:, top : top + step, top : top + step], dim=(1, 2)).square()
        total = total - corner / 2
    return 2 * total


@dataclass
class Start:
    """What is known of W beforehand: A = WWᵀ (lower half), and for each matrix σ_max² (an estimate) and ‖W‖²_F."""

    a: Tensor
    sigma2: Tensor
    norm2: Tensor


@dataclass
class Solved:
    """The matrices, and for each: steps taken, DfI/n, ‖X‖²_F, directions that W lacks, and two flags.

    `hard`: float32 was not precise enough; `deficit` is the largest |1 − σ²| seen before the last step.
    """

    x: Tensor
    steps: Tensor
    residual: Tensor
    size2: Tensor
    null: Tensor
    hard: Tensor
    deficit: Tensor

    @classmethod
    def new(cls, x: Tensor, steps: int) -> Solved:
        """A result with no measured values yet."""
        count = torch.full((x.shape[0],), steps, dtype=torch.int32, device=x.device)
        unknown = torch.full((x.shape[0],), torch.nan, dtype=x.dtype, device=x.device)
        none, easy = torch.zeros_like(count), torch.zeros_like(count, dtype=torch.bool)
        return cls(x, count, residual=unknown, size2=unknown, null=none, hard=easy, deficit=unknown)

    def put(self, index: Tensor, other: Solved) -> None:
        """Replace the matrices at `index` by another route's result for them."""
        self.x[index] = other.x.to(self.x.dtype)
        self.steps[index] += other.steps
        self.residual[index] = other.residual.to(self.residual.dtype)
        self.size2[index] = other.size2.to(self.size2.dtype)
        self.null[index] = other.null
        self.hard[index] = other.hard


def start(w: Tensor, *, estimate: bool = True) -> Start:
    """One Gram matrix, and σ_max² by power iteration in row form, up to 7 times cheaper on a CPU than column form.

    The first vector is random, because a structured one can be orthogonal to the top singular vector (opposite rows).
    Without `estimate` σ_max² is only bounded, by ‖W‖²_F: for tiny matrices the iteration costs as much as eight
    products.
    """
    a = gram(w, by="half")
    weight = a.diagonal(0, 1, 2)
    total = weight.sum(1)
    if not estimate:
        return Start(a, torch.where(total > 0, total, 1.0), total)
    signs = torch.randn(w.shape[1], generator=torch.Generator().manual_seed(0)).to(w.device, w.dtype)
    u = (weight.sqrt() * signs)[:, None]
    for _ in range(4):
        u = torch.bmm(torch.bmm(u, w), w.mT)
        length = torch.linalg.vector_norm(u, dim=2, keepdim=True)
        u = u / length.clamp_min(1e-30)
    sigma2 = torch.maximum(length[:, 0, 0], total / w.shape[1]) * HEADROOM
    return Start(a, torch.where(total > 0, sigma2, 1.0), total)


def norms(w: Tensor) -> Start:
    """‖W‖²_F, which bounds σ_max², and no Gram matrix: for a route that computes its own."""
    total = torch.linalg.vector_norm(w, dim=(1, 2)).square()
    return Start(w.new_empty(0), torch.where(total > 0, total, 1.0), total)


def measure(solved: Solved, *, complete: bool = True) -> None:
    """Fill in ‖X‖²_F and the residual DfI/n; without `complete`, over the directions that W has."""
    g = gram(solved.x, by="half")
    g.diagonal(0, 1, 2).sub_(1)
    solved.size2 = g.shape[1] + g.diagonal(0, 1, 2).sum(1)
    solved.residual = norm2(g) / g.shape[1]
    if not complete:
        solved.residual = solved.residual - solved.null / g.shape[1]


def settle(
    w: Tensor,
    solved: Solved,
    known: Start,
    *,
    tol: float,
    complete: bool,
    seeds: Tensor,
    exact: bool,
    last: bool,
    resolve_up_to: int = 0,
) -> None:
    """Repair what is not yet an isometry, and mark as hard what should be solved again in float64.

    A route that measured its largest deficit before the last step knows which matrices lack a direction. With `exact`
    (and always where that is cheap) a Gram matrix measures every result, and what still falls short is repaired too.
    With `last` no matrix is marked as hard because too much is missing. Up to `resolve_up_to` rows nothing is repaired
    matrix by matrix: one batched SVD of all that fall short costs less than the calls.
    """
    n, sigma2 = w.shape[1], known.sigma2
    # A cubic step leaves ¾e² of a deficit e; one direction may take up a third of the tolerance, and no more than is
    # allowed to be missing from tr(QᵀW) if it is the largest one: σ_max/‖W‖_* ≤ σ_max²/‖W‖²_F.
    watched = ~solved.deficit.isnan()
    allowed = (2 * lacking(tol) * known.norm2 / sigma2).clamp_max((0.3 * max(tol, CLOSE) * n) ** 0.5)
    short = watched & (0.75 * solved.deficit.square() > allowed) & ~solved.hard
    expected = torch.zeros_like(solved.steps)
    for attempt in range(2):
        for some in lots(short.nonzero().flatten()) if n > resolve_up_to else ():
            _repair(some, w, solved, sigma2, expected, complete, seeds, n if last else n // 4)
        if not exact and n >= WATCHED_FROM and tol >= CLOSE and bool(watched.all()):
            solved.residual = torch.zeros_like(solved.residual)
            return
        measure(solved, complete=complete)
        polish(solved, near_enough(w, solved, known.norm2, tol).clamp_max(max(tol, CLOSE)), complete=complete)
        if n <= resolve_up_to:
            break
        short = (solved.residual > max(tol, CLOSE)) & ~solved.hard
        expected = (solved.residual * n).int()
        if attempt or not bool(short.any()):
            break
    polish(solved, tol, complete=complete)


def lacking(tol: float) -> float:
    """The share of ‖W‖_* that tr(QᵀW) may fall short by at this tolerance."""
    return max(SHORT[0], SHORT[1] * math.sqrt(tol))


def near_enough(w: Tensor, solved: Solved, norm2: Tensor, tol: float) -> Tensor:
    """The residual DfI/n of each matrix at which tr(QᵀW) is guaranteed to be as near to ‖W‖_* as promised.

    The residual is a mean over n directions, ‖W‖_* a sum weighted by singular values. One direction that is off by 2e-3
    is within 1e-6 of 80, and if W has its weight there, all of it is missing. With singular values q of X,
    ‖W‖_* − tr(XᵀW) = Σσ(1 − q) ≤ ‖W‖_F·‖1 − q‖ ≤ ½‖W‖_F·√(n·residual).
    """
    found = torch.linalg.vecdot(solved.x.flatten(1), w.flatten(1))
    bound = (2 * lacking(tol) * found).square() / (w.shape[1] * norm2)
    return torch.where(norm2 > 0, bound, torch.inf)


def lots(several: Tensor) -> tuple[Tensor, ...]:
    """What is processed together: one matrix on a CPU, to save memory; all on an accelerator, to save waits."""
    return torch.split(several, 1 if several.device.type == "cpu" else len(several)) if len(several) else ()


def _repair(
    index: Tensor,
    w: Tensor,
    solved: Solved,
    sigma2: Tensor,
    expected: Tensor,
    complete: bool,
    seeds: Tensor,
    most: int,
) -> None:
    """Rebuild the missing directions of the matrices at `index`; those with more than `most` are marked as hard."""
    many = expected[index] > most
    solved.hard[index[many]] = True
    index = index[~many]
    if not len(index):
        return
    # A single matrix is processed in place; several are gathered.
    at: Any = slice(int(index), int(index) + 1) if len(index) == 1 else index
    repaired = rebuild(
        solved.x[at],
        w[at],
        sigma=sigma2[at].sqrt(),
        expected=int(expected[at].max()),
        most=most,
        threshold=2e-3,
        seeds=seeds[at if isinstance(at, slice) else at.cpu()],
        complete=complete,
    )
    keep = repaired.failed
    solved.hard[at] = keep
    if len(index) > 1 or bool(keep.any()):
        repaired = replace(
            repaired,
            x=torch.where(keep[:, None, None], solved.x[at], repaired.x),
            null=torch.where(keep, solved.null[at], repaired.null),
        )
    solved.x[at], solved.null[at] = repaired.x, repaired.null


def polish(solved: Solved, tol: float | Tensor, *, complete: bool = True) -> None:
    """Cubic steps, each squaring the error, while the residual is above `tol` and falls; not for missing directions."""
    n = solved.x.shape[1]
    for _ in range(3):
        near = (solved.residual > tol) & (solved.residual < 0.3 / n) & ~solved.hard
        index = near.nonzero().flatten()
        if not len(index):
            return
        x = solved.x[index]
        g = gram(x, by="blocks").mul_(-0.5)
        g.diagonal(0, 1, 2).add_(1.5)
        better = Solved.new(torch.bmm(g, x), 1)
        better.null = solved.null[index]
        measure(better, complete=complete)
        keep = better.residual < 0.5 * solved.residual[index]  # chosen by `where`: no wait for an accelerator
        solved.x[index] = torch.where(keep[:, None, None], better.x, x)
        solved.residual[index] = torch.where(keep, better.residual, solved.residual[index])
        solved.size2[index] = torch.where(keep, better.size2, solved.size2[index])
        solved.steps[index] += keep.int()
