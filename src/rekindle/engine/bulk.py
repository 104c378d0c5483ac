"""by_bulk(): the polar factors of many small matrices on a CPU.

Polynomials bring the bulk of the spectrum to 1, and one rank-one correction does the rest. Up to about a hundred rows
every pass over memory counts, and a factorization costs many products. A square random matrix often has one singular
value far below the others. Polynomials that reach so far down cost as much as the published recipe; so the schedule
covers the others, and where one direction is missing at its end, it is read off the Gram matrix that the last step
needs anyway.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from rekindle.engine import schedules
from rekindle.engine.arithmetic import Solved, Start, lacking

# σ_min/σ_max that the schedule must cover, times n: about one random matrix in 1/FAR or 1/NEAR has a value below it.
FAR, NEAR = 0.1, 0.15
FAR_UP_TO = 56  # rows up to which a product more costs less than correcting half as many matrices again
PART = 2**18  # entries processed at a time, nearly: the four arrays of a part stay in the caches
ROOM = 9 * PART // 2  # entries of three arrays of a part, which may be half as large again
MOST = 128  # rows: beyond, a Gram matrix has more noise than the bound in `by_bulk` allows for
BEFORE = 0.017  # over n^¼: how far from 1 the schedule leaves singular values before the last cubic step
LIFTED = 0.045  # length that a missing direction must have been lifted to: below, float32 has too little left of it
SIGNED = 7e-4  # the same for a square matrix, where its sign alone must be sure
TILT = 2e-4  # by how much a corrected direction may lean towards another one


class _Workspace(threading.local):
    """Work arrays that are kept between calls, one set per thread: new ones cost a tenth of the time in page faults."""

    room: Tensor | None = None

    def arrays(self, like: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
        sizes = [math.prod(shape) for shape in shapes]
        if type(like) is not Tensor or sum(sizes) > ROOM:
            room = like.new_empty(sum(sizes))
        else:
            if self.room is None:
                with torch.inference_mode(False):  # tensors made in inference mode cannot be written to outside of it
                    self.room = torch.empty(ROOM, dtype=torch.float32, device="cpu")
            room = self.room[: sum(sizes)]
        return [part.view(shape) for part, shape in zip(torch.split(room, sizes), shapes, strict=True)]


_workspace = _Workspace()


def schedule(n: int) -> tuple[schedules.Polynomial, ...]:
    """The steps for matrices of n rows, but for the last one, which is cubic."""
    return schedules.bulk((FAR if n <= FAR_UP_TO else NEAR) / n, BEFORE / n**0.25)


def by_bulk(w: Tensor, known: Start, tol: float) -> Solved:
    """The polar factors of a batch of small matrices; what one correction cannot finish is marked as hard.

    A cubic step takes σ² = 1 − e to 1 − ¾e² − ¼e³, so that ‖XXᵀ − I‖²_F = r before it bounds DfI by .64r² after it
    (for r ≤ .04). That bound costs one pass over a matrix that is already computed. tr(QᵀW) then lacks at most
    .4r‖W‖_F, and ‖W‖_F/‖W‖_* ≤ (‖WWᵀWWᵀ‖_F/‖W‖⁴_F)^⅓ by Hölder's inequality.

    Parts of the batch go through it one after the other, in arrays that stay in the caches.
    """
    count, n, m = w.shape
    steps = schedule(n)
    solved = Solved.new(torch.empty_like(w), len(steps) + 1)
    size = -(-count // max(1, round(count * n * m / PART)))
    room_x, room_a, room_p = _workspace.arrays(w, (size, n, m), (size, n, n), (size, n, n))
    bound, r = torch.empty_like(known.norm2), torch.empty_like(known.norm2)
    for top in range(0, count, size):
        part = slice(top, min(top + size, count))
        x, a, p = (room[: part.stop - top] for room in (room_x, room_a, room_p))
        y = solved.x[part]
        if len(steps) % 2 == 0:  # steps alternate between two arrays, and the last one must end in `solved.x`
            x, y = y, x
        bound[part] = _first_step(w[part], a, known.norm2[part], steps[0], p, x)
        for step in steps[1:]:
            torch.bmm(x, x.mT, out=a)
            _step(x, a, step, p, y)
            x, y = y, x
        torch.linalg.vector_norm(_off_identity(x, a), dim=(1, 2), out=r[part])
        _last_step(x, a, out=y)
    r = r.square()
    most = (0.8 * max(tol, 1e-6) * n / 0.64) ** 0.5
    enough = (lacking(tol) / 0.4 * (known.norm2 / bound).pow(2 / 3)).clamp_max(most)
    left = (~(r <= enough)).nonzero().flatten()
    if len(left):
        needed = enough[left]
        solved.x[left], found = _finished(solved.x[left], needed)
        solved.hard[left] = ~(found <= needed)
        r[left] = found
    solved.residual = 0.64 / n * r.square()
    return solved


def _first_step(w: Tensor, a: Tensor, norm2: Tensor, step: schedules.Polynomial, p: Tensor, out: Tensor) -> Tensor:
    """out ← the first step on W/√bound, where λ_max(WWᵀ) ≤ bound = ‖(WWᵀ)²‖_F^½, which is returned.

    It is a quintic, which needs A = WWᵀ and A² anyway. `a` and `p` are work arrays.
    """
    torch.bmm(w, w.mT, out=a)
    torch.bmm(a, a, out=p)
    bound = torch.linalg.vector_norm(p, dim=(1, 2)).sqrt() * (1 + 2e-4)
    bound = torch.where(norm2 > 0, bound, 1.0)
    scale = bound.reciprocal()[:, None, None]
    root = scale.sqrt()
    p.mul_(step.c * root * scale.square()).addcmul_(a, step.b * root * scale)
    p.diagonal(0, 1, 2).add_(step.a * root[:, :, 0])
    torch.bmm(p, w, out=out)
    return bound


def _step(x: Tensor, a: Tensor, step: schedules.Polynomial, p: Tensor, out: Tensor) -> None:
    """out ← (αI + βA + γA²)X as products and diagonals alone: baddbmm would copy what it adds to.

    The square is completed: γA² + βA + αI = γ((A + β/2γ)² + (α/γ − β²/4γ²)I).
    """
    if step.c:
        half = step.b / (2 * step.c)
        a.diagonal(0, 1, 2).add_(half)
        torch.bmm(a, a, out=p)
        p.diagonal(0, 1, 2).add_(step.a / step.c - half * half)
        out.baddbmm_(p, x, beta=0, alpha=step.c)
    else:
        a.diagonal(0, 1, 2).add_(step.a / step.b)
        out.baddbmm_(a, x, beta=0, alpha=step.b)


def _off_identity(x: Tensor, out: Tensor | None = None) -> Tensor:
    g = torch.bmm(x, x.mT) if out is None else torch.bmm(x, x.mT, out=out)
    g.diagonal(0, 1, 2).sub_(1)
    return g


def _last_step(x: Tensor, g: Tensor, *, out: Tensor) -> Tensor:
    """out ← (3I − XXᵀ)X/2 from G = XXᵀ − I, which is destroyed."""
    g.diagonal(0, 1, 2).sub_(2)
    return out.baddbmm_(g, x, beta=0, alpha=-0.5)


def _finished(x: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    """One more cubic step, a missing direction where that is not enough, and the last step; r before it.

    The first brings to 1 what the schedule left a little below it, so that where a direction is missing it stands out.
    """
    x = torch.baddbmm(x, _off_identity(x), x, alpha=-0.5)
    g = _off_identity(x)
    r = torch.linalg.vector_norm(g, dim=(1, 2)).square()
    far = (~(r <= enough)).nonzero().flatten()
    if len(far):
        x[far], g[far], r[far] = _one_direction(x[far], g[far])
    return _last_step(x, g, out=torch.empty_like(x)), r


def _row_times(row: Tensor, x: Tensor) -> Tensor:
    """A row (batch, 1, n) times X: torch multiplies up to 400 numbers in a slow loop of its own."""
    return torch.bmm(row, x) if x.shape[1] * x.shape[2] >= 400 else (row.mT * x).sum(1, keepdim=True)


def _one_direction(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give the one left direction v that is missing its length: X ← X + v(û − vᵀX) with û near vᵀX/‖vᵀX‖.

    G = XXᵀ − I is −(1 − s²)vvᵀ and a remainder of .001, so that its largest row is nearly v, and a few products with G
    make it so. Of a square X the other rows leave one direction for û, however short vᵀX is: I − XᵀX multiplies what
    leans towards them by .001. G changes by two rank-one terms, which are added instead of computed anew. Where û is
    not sharp enough, or its sign not sure, r is infinite.
    """
    at = g.diagonal(0, 1, 2).abs().argmax(1)
    v = g[torch.arange(len(g), device=g.device), at][:, None]
    transposed = g.mT  # G is symmetric, and products with this form are faster for few rows
    for _ in range(3):  # the wanted eigenvalue is near −1, so that v keeps its length
        v = torch.bmm(v, transposed)
    v = v / torch.linalg.vector_norm(v, dim=2, keepdim=True)
    row = _row_times(v, x)
    length = torch.linalg.vector_norm(row, dim=2, keepdim=True)
    u = row / length
    if x.shape[1] == x.shape[2]:
        u = u - _row_times(torch.bmm(u, x.mT), x)
        u = u / torch.linalg.vector_norm(u, dim=2, keepdim=True)
        image, shortest = torch.bmm(u, x.mT), SIGNED
    else:
        image, shortest = torch.bmm(v, transposed) / length, LIFTED
    lean = torch.linalg.vector_norm(image - (image * v).sum(2, keepdim=True) * v, dim=2)
    change = u - row
    moved = torch.bmm(change, x.mT).addcmul_(v, torch.linalg.vecdot(change, change)[:, :, None], value=0.5)
    x = x.addcmul(v.mT, change)  # a product with one column goes through a slower loop
    g = g.addcmul(v.mT, moved).addcmul_(moved.mT, v)
    r = torch.linalg.vector_norm(g, dim=(1, 2)).square()
    sharp = (length[:, :, 0] > shortest) & (lean < TILT)
    return x, g, torch.where(sharp[:, 0], r, torch.inf)
