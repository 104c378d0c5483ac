"""Routes to the polar factor of a batch of matrices (batch, n, m) with n ≤ m, in float32 or float64.

Each route is a short function with one reason to exist; `solving.py` chooses between them. An iterative route returns
an X that has W's singular vectors and singular values close to 1, except in directions that were too small for it:
`arithmetic.settle` finds those and repairs them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.engine import schedules
from rekindle.engine.arithmetic import HEADROOM, WATCHED_FROM, Solved, Start, gram, lots, measure, mirrored
from rekindle.engine.completion import fill
from rekindle.engine.symmetric import factor, inverse, leaf, solve_lower, solve_upper, symmetric_product

# What a first Halley step may assume of σ_min/σ_max. In float32 its constant c is then 1.6e4, so that rounding in the
# Gram matrix (1e-7) moves the smallest directions by 1e-3 and no more; float64 has room to spare.
FLOOR = {torch.float32: 1e-3, torch.float64: 1e-8}
LIFTED = 0.005  # where a float64 Halley step leaves a singular value of 1e-8
GRAM_FLOOR = 0.05  # the same for the Gram-side route, whose matrices carry the squares
GRAM_REACHED = 0.46  # σ² that its first step must lift all directions to: then the second one reaches DfI/n = 8e-7
FAST_FLOORS = (0.03, 0.02, 0.014, 0.01, 0.007)  # the first leaves DfI/n at .09 on Gaussians, half of the recipe's
MANY = 0.3  # share of directions near zero from which on float64 is cheaper
ROUNDING = {torch.float32: 1e-11, torch.float64: 1e-25}  # DfI/n that rounding alone may leave


def by_recipe(x: Tensor, steps: int) -> Tensor:
    """The published recipe: divide by the Frobenius norm, then `steps` cubic Newton–Schulz steps on the tall side.

    Kept as published, for comparison and for reproducing results: it converges too slowly to certify. A zero matrix
    stays zero (published: NaN).
    """
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = (x / torch.where(norm == 0, 1.0, norm)).mT
    for _ in range(steps):
        x = 1.5 * x - 0.5 * (x @ (x.mT @ x))
    return x.mT


def by_schedule(x: Tensor, steps: tuple[schedules.Polynomial, ...]) -> Tensor:
    """Apply fixed odd polynomials to a batch whose singular values are at most 1: products only, no branches.

    This is what an accelerator runs, and what `torch.compile(fullgraph=True)` accepts.

    >>> w = torch.randn(1, 20, 40, dtype=torch.float64)
    >>> x = by_schedule(w / torch.linalg.matrix_norm(w), schedules.products(1e-3))
    >>> torch.allclose(x @ x.mT, torch.eye(20, dtype=torch.float64), atol=2e-3)
    True
    """
    for step in steps:
        a = torch.bmm(x, x.mT)
        if step.c:
            x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=step.b, alpha=step.c), x, beta=step.a)
        else:
            x = torch.baddbmm(x, a, x, beta=step.a, alpha=step.b)
    return x


def by_products(w: Tensor, known: Start) -> Solved:
    """Minimax quintics and a cubic: for small matrices and accelerators, where a factorization costs many products.

    Polynomials blow up beyond 1, so σ_max needs a rigorous bound and not an estimate: λ_max(A) ≤ ‖A²‖_F^½.
    """
    a = mirrored(known.a)
    squared = torch.bmm(a, a)
    bound = torch.linalg.vector_norm(squared, dim=(1, 2)).sqrt() * (1 + 2e-4)
    scale = torch.where(known.norm2 > 0, bound, 1.0).reciprocal()[:, None, None]
    first, *others = schedules.products(FLOOR[torch.float32])
    # The first quintic has its A and A² already: what is left of it is one product.
    p = squared.mul_(first.c * scale).add_(a, alpha=first.b).mul_(scale)
    p.diagonal(0, 1, 2).add_(first.a)
    x = torch.bmm(p, w).mul_(scale.sqrt())
    return Solved.new(by_schedule(x, tuple(others)), 1 + len(others))


def by_halley(w: Tensor, known: Start, floor: float) -> Solved:
    """Weighted Halley steps and a cubic: three steps for a spread of 1000, the cheapest on CPUs from n ≈ 100 on."""
    step = schedules.halley(floor)
    a = known.a
    x, near_zero = halley_step(w, a, step, known.sigma2)
    taken = 1
    while step.reached < 0.96:
        step = schedules.halley(step.reached)
        x, _ = halley_step(x, gram(x, by="half", out=a), step)
        taken += 1
    last = schedules.centered(schedules.cubic(step.reached))
    a = gram(x, by="blocks", out=a)
    deficit = largest_deficit(a) if w.shape[1] >= WATCHED_FROM else None
    a.mul_(last.b)
    a.diagonal(0, 1, 2).add_(last.a)
    solved = Solved.new(torch.bmm(a, x), taken + 1)
    solved.hard = near_zero > MANY * w.shape[1]
    if deficit is not None:
        solved.deficit = deficit
    return solved


def halley_step(x: Tensor, a: Tensor, step: schedules.Halley, sigma2: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """X ← (βI + α(I + cA)⁻¹)X/σ with A = XXᵀ/σ² (`a` is XXᵀ, destroyed), and how many directions still lie near zero.

    The inverse is never formed: two triangular solves cost less than inverting and multiplying. That
    tr (I + cA)⁻¹ = n − c‖L⁻¹X/σ‖²_F counts the directions that the step did not reach comes for free.
    """
    size = leaf(x.shape[1])
    scale = torch.ones_like(x[:, 0, 0]) if sigma2 is None else sigma2
    a.mul_((step.c / scale)[:, None, None])
    a.diagonal(0, 1, 2).add_(1)
    factor(a, size)
    y, z = x.clone(), torch.empty_like(x)
    solve_lower(a, y, z, size)
    near_zero = x.shape[1] - step.c / scale * torch.linalg.vector_norm(z, dim=(1, 2)).square()
    solve_upper(a, z, y, size)
    root = scale.rsqrt()[:, None, None]
    return y.mul_(step.gain * root).addcmul_(x, step.shift * root), near_zero


def by_gram(w: Tensor, known: Start, floor: float = GRAM_FLOOR) -> Solved:
    """Two Halley steps on the n×n side, applied to W once: for m ≥ 1.5n, where products with W are what costs.

    With P = (I + cA)⁻¹ the next Gram matrix is β²A + 2αβ(I − P)/c + α²(P − P²)/c: no product with X is needed.
    Squared singular values leave float32 room for a spread of 20, which wide random matrices keep well within.
    """
    first = schedules.halley(floor)
    a = mirrored(known.a).div_(known.sigma2[:, None, None])
    p = a * first.c
    p.diagonal(0, 1, 2).add_(1)
    p = inverse(p)
    a.mul_(first.shift**2).add_(p, alpha=(first.gain**2 - 2 * first.gain * first.shift) / first.c)
    a.add_(symmetric_product(p, p), alpha=-(first.gain**2) / first.c)
    a.diagonal(0, 1, 2).add_(2 * first.gain * first.shift / first.c)
    deficit = largest_deficit(a)

    # Each matrix has its own step: with one for the batch a result would depend, by 5e-5, on what it is solved with.
    lows = (1 - 1.1 * deficit).clamp_min(GRAM_REACHED).sqrt().clamp_max(first.reached).tolist()
    rows = [(each.c, each.gain, each.shift, 2 / (1 + each.reached)) for each in map(schedules.halley, lows)]
    c, gain, shift, middle = torch.tensor(rows, dtype=torch.float64).to(a.device, a.dtype).unbind(1)
    a.mul_(c[:, None, None])
    a.diagonal(0, 1, 2).add_(1)
    q = inverse(a).mul_(gain[:, None, None])
    q.diagonal(0, 1, 2).add_(shift[:, None])
    p.mul_(first.gain)
    p.diagonal(0, 1, 2).add_(first.shift)
    q = symmetric_product(p, q).mul_((middle * known.sigma2.rsqrt())[:, None, None])
    solved = Solved.new(torch.bmm(q, w), 2)
    solved.hard, solved.deficit = 1 - 1.1 * deficit < GRAM_REACHED, torch.zeros_like(deficit)
    return solved


def by_one_step(w: Tensor, known: Start) -> Solved:
    """A single Halley step, for `solver="fast"` on large square matrices: no more DfI than ten steps of the recipe.

    Those multiply the smallest singular values by 1.5¹⁰/‖W‖_F; ours must lift by as much, relative to σ_max. A dense
    spectrum, Gaussian or nearly so, keeps the recipe far from an isometry and one step suffices. Where many directions
    lie near zero (and the others apart from them) the recipe does the others well, and a quintic step follows.
    """
    n = w.shape[1]
    sigma2 = known.sigma2 / HEADROOM
    lift_needed = float((sigma2 / known.norm2.clamp_min(torch.finfo(w.dtype).tiny)).max().sqrt()) * 1.5**10
    candidates = [schedules.halley(floor) for floor in FAST_FLOORS]
    step = next((each for each in candidates if each.shift + each.gain >= lift_needed), candidates[-1])
    x, near_zero = halley_step(w, known.a, step, known.sigma2)
    solved = Solved.new(x, 1)
    # A few spikes over a dense bulk make the bulk look small, which is not the same as being parted from it.
    spiked = (known.norm2 < 0.1 * n * sigma2) & (near_zero < 0.5 * n)
    apart = (near_zero > 0.25 * n) & ~spiked
    parted = apart.nonzero().flatten()
    if len(parted):
        x[parted] = by_schedule(x[parted], (schedules.centered(schedules.quintic(step.reached)),))
        solved.steps[parted] += 1
    x[~apart] *= 2 / (1 + step.reached)
    return solved


def by_eigh(w: Tensor) -> Solved:
    """W ↦ (WWᵀ)^(-½)W by eigendecomposition in float64: for wide matrices of any spectrum, m ≥ 2n.

    One float64 Gram matrix resolves singular values down to 3e-6 of the largest; `settle` rebuilds what is below.
    """
    x = torch.empty_like(w)
    for one, out in zip(lots(w), lots(x), strict=True):
        some = one.double()
        values, vectors = torch.linalg.eigh(gram(some, by="blocks"))
        weight = torch.where(values > 1e-11 * values[:, -1:], values.clamp_min(1e-300).rsqrt(), 0.0)
        # In float32 small directions would be lost in rounding.
        out.copy_(((vectors * weight[:, None]) @ vectors.mT) @ some)
    return Solved.new(x, 1)


def by_svd(w: Tensor, *, complete: bool, seeds: Tensor) -> Solved:
    """The reference, in float64: UVᵀ, with null directions taken from the seed and not from LAPACK's last bits."""
    u, s, vh = torch.linalg.svd(w.double(), full_matrices=False)
    small = s <= s[:, :1] * (torch.finfo(torch.float64).eps * w.shape[2])
    x = (u * ~small[:, None]) @ vh
    count = small.sum(1, dtype=torch.int32)
    for index in lots(count.nonzero().flatten()) if complete else ():
        lacking = int(count[index].max())
        left = (u[index, :, -lacking:] * small[index, None, -lacking:]).mT
        x[index] = fill(x[index], left, count[index], seeds[index.cpu()])
    solved = Solved.new(x.to(w.dtype), 1)
    solved.null = count
    measure(solved, complete=complete)
    return solved


def lift(w: Tensor, sigma2: Tensor) -> Tensor:
    """One Halley step in float64: takes singular values from 1e-8 of the largest to where float32 can go on."""
    wide = w.double()
    return halley_step(wide, gram(wide, by="half"), schedules.halley(FLOOR[torch.float64]), sigma2.double())[0]


def largest_deficit(a: Tensor) -> Tensor:
    """The largest eigenvalue, in size, of I − A by a short power iteration from four random rows."""
    n = a.shape[1]
    rows = torch.randn(4, n, generator=torch.Generator().manual_seed(1)).to(a.device, a.dtype).expand(a.shape[0], 4, n)
    length = rows[:, :, :1]
    for _ in range(5):
        rows = torch.baddbmm(rows, rows, a.mT, alpha=-1)  # A is symmetric, and this form is the faster one
        length = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        rows = rows / length.clamp_min(1e-30)
    return length.amax((1, 2))
