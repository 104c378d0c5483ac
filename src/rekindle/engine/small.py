"""Small matrices on a CPU: polynomials for the bulk of the spectrum, and one rank-one correction for the rest.

Up to about a hundred rows every pass over memory counts, and a factorisation costs many products. A square random
matrix often has one singular value far below the others. Polynomials that reach so far down cost as much as the
published recipe; so the schedule covers the others, and where one direction is missing at its end, it is read off the
Gram matrix that the last step needs anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.engine import schedules
from rekindle.engine.routes import Solved, Start, lacking
from rekindle.engine.symmetric import mirrored

REACH = 0.2  # σ_min/σ_max that the schedule covers is this over n: the second smallest of a random matrix lies above
PART = 2**18  # entries worked on at a time: the four arrays of a part stay near the caches
MOST = 128  # rows: beyond, a Gram matrix has more noise than the proof of `by_bulk` allows for
BEFORE = 0.017  # over n^¼: how far from 1 the schedule leaves singular values before the last cubic step
MILD = 0.1  # ‖XXᵀ − I‖²_F up to which one more cubic step is enough: all σ² are then above .68
LIFTED = 0.02  # length that a missing direction must have been lifted to: below, float32 has too little left of it
TILT = 2e-4  # by how much a corrected direction may lean towards another one


def by_bulk(w: Tensor, known: Start, tol: float) -> Solved:
    """The polar factors of a batch of small matrices; what one correction cannot finish is marked as hard.

    A cubic step takes σ² = 1 − e to 1 − ¾e² − ¼e³, so that ‖XXᵀ − I‖²_F = r before it bounds DfI by .64r² after it
    (for r ≤ .04). That is a proof, for one pass over a matrix that is there already. tr(QᵀW) then lacks at most
    .4r‖W‖_F, and ‖W‖_F/‖W‖_* ≤ (‖WWᵀWWᵀ‖_F/‖W‖⁴_F)^⅓ by Hölder's inequality.

    `known.a` is destroyed. Parts of the batch go through it one after the other, in arrays that stay in the caches and
    are not allocated anew: a fresh one costs as much as a product in page faults.
    """
    count, n, m = w.shape
    steps = schedules.bulk(REACH / n, BEFORE / n**0.25)
    solved = Solved.new(torch.empty_like(w), len(steps) + 1)
    solved.residual = torch.empty_like(known.norm2)
    most = (0.8 * max(tol, 1e-6) * n / 0.64) ** 0.5
    size = min(count, max(1, PART // (n * m)))
    room_x, room_p = torch.empty_like(w[:size]), torch.empty_like(known.a[:size])
    for top in range(0, count, size):
        part = slice(top, min(top + size, count))
        x, y, p = room_x[: part.stop - top], solved.x[part], room_p[: part.stop - top]
        a = mirrored(known.a[part])
        if len(steps) % 2 == 0:  # steps go to and fro between two arrays, and the last one is to end in `solved.x`
            x, y = y, x
        bound = _first_step(w[part], a, known.norm2[part], steps[0], p, x)
        for step in steps[1:]:
            torch.bmm(x, x.mT, out=a)
            _step(x, a, step, p, y)
            x, y = y, x
        g = _off_identity(x, a)
        r = torch.linalg.vector_norm(g, dim=(1, 2)).square()
        enough = (lacking(tol) / 0.4 * (known.norm2[part] / bound).pow(2 / 3)).clamp_max(most)
        short = (~(r <= enough)).nonzero().flatten()
        if len(short):
            far = r[short] > MILD
            for index, finish in ((short[~far], _once_more), (short[far], _one_direction)):
                if len(index):
                    x[index], g[index], r[index] = finish(x[index], g[index])
        g.diagonal(0, 1, 2).sub_(2)
        y.baddbmm_(g, x, beta=0, alpha=-0.5)
        solved.hard[part] = ~(r <= enough)
        solved.residual[part] = 0.64 * r.square() / n
    return solved


def _first_step(w: Tensor, a: Tensor, norm2: Tensor, step: schedules.Polynomial, p: Tensor, out: Tensor) -> Tensor:
    """out ← the first step on W/√bound, where λ_max(A) ≤ bound = ‖A²‖_F^½, which is returned.

    A quintic has A and A² already. `p` is an array to work in.
    """
    torch.bmm(a, a, out=p)
    bound = torch.linalg.vector_norm(p, dim=(1, 2)).sqrt() * (1 + 2e-4)
    bound = torch.where(norm2 > 0, bound, 1.0)
    scale = bound.reciprocal()[:, None, None]
    root = scale.sqrt()
    if step.c:
        p.mul_(step.c * root * scale.square()).addcmul_(a, step.b * root * scale)
    else:
        torch.mul(a, step.b * root * scale, out=p)
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


def _once_more(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.baddbmm(x, g, x, alpha=-0.5)
    g = _off_identity(x, g)
    return x, g, torch.linalg.vector_norm(g, dim=(1, 2)).square()


def _one_direction(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give the one left direction v that is missing its length: X ← X + v(û − vᵀX) with û = vᵀX/‖vᵀX‖.

    G = XXᵀ − I is −(1 − s²)vvᵀ and a remainder of .02, so that its largest row is nearly v, and a few products with G
    make it so. G changes by two rank-one terms, which are added instead of computed anew. Where v is not sharp enough
    for û, or too short, r is infinite.
    """
    at = g.diagonal(0, 1, 2).abs().argmax(1)
    v = g[torch.arange(len(g), device=g.device), at][:, None]
    for _ in range(4):
        v = torch.bmm(v / torch.linalg.vector_norm(v, dim=2, keepdim=True), g)
    v = v / torch.linalg.vector_norm(v, dim=2, keepdim=True)
    image = torch.bmm(v, g)
    value = (image * v).sum(2, keepdim=True)
    row = torch.bmm(v, x)
    length = torch.linalg.vector_norm(row, dim=2, keepdim=True)
    lean = torch.linalg.vector_norm(image - value * v, dim=2, keepdim=True) / (value.abs() * length)
    change = row * (1 / length - 1)
    moved = (
        torch.bmm(change, x.mT)
        .add_(v, alpha=0.5)
        .addcmul_(v, torch.linalg.vector_norm(change, dim=2, keepdim=True).square().sub_(1), value=0.5)
    )
    x = torch.baddbmm(x, v.mT, change)
    g = torch.baddbmm(g, torch.cat((v, moved), 1).mT, torch.cat((moved, v), 1))
    r = torch.linalg.vector_norm(g, dim=(1, 2)).square()
    sharp = (length > LIFTED) & (lean < TILT)
    return x, g, torch.where(sharp[:, 0, 0], r, torch.inf)
