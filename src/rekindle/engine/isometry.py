"""polar(): the nearest isometry of every matrix in a tensor, checked numerically. Knows tensors only.

The polar factor Q of W is the (semi-)orthogonal matrix nearest to it; FIRE replaces weights by it. The public verb
checks its input, has it solved (`solving.py`), and gives the result its derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from rekindle.engine.arithmetic import to_float64
from rekindle.engine.solving import Certificate, NotFinite, Solver, Solving, Source, checked_options, solutions

__all__ = ["Certificate", "NotFinite", "Solver", "Solving", "polar"]


@overload
def polar(w: Tensor, *, certificate: Literal[False] = ..., **solving: Unpack[Solving]) -> Tensor: ...
@overload
def polar(w: Tensor, *, certificate: Literal[True], **solving: Unpack[Solving]) -> tuple[Tensor, Certificate]: ...
@overload
def polar(w: Sequence[Tensor], *, certificate: Literal[False] = ..., **solving: Unpack[Solving]) -> list[Tensor]: ...
@overload
def polar(
    w: Sequence[Tensor], *, certificate: Literal[True], **solving: Unpack[Solving]
) -> tuple[list[Tensor], list[Certificate]]: ...
def polar(
    w: Tensor | Sequence[Tensor],
    *,
    solver: Solver = "auto",
    tol: float = 1e-6,
    steps: int | None = None,
    complete: bool = True,
    seed: int = 0,
    certificate: bool = False,
) -> Tensor | tuple[Tensor, Certificate] | list[Tensor] | tuple[list[Tensor], list[Certificate]]:
    """The nearest isometry of every matrix in `w` (…, out, in), in the dtype of `w`.

    A list of tensors of any shapes gives a list, solved in groups of one shape and in chunks that bound memory.
    Gradients flow (once; a second derivative raises).

    Args:
        w: a real floating tensor of at least two dimensions, or a list of them.
        solver: `"auto"` converges to `tol`; `"fast"` is the cheapest whose DfI is no worse than that of the paper's ten
            steps; `"paper"` is the released recipe; `"svd"` the float64 reference. `"products"`, `"halley"` and
            `"gram"` converge like `"auto"` and pin the route, which "auto" chooses by size and kind of CPU.
        tol: DfI/k to reach, k = min(out, in). 0 asks for what the arithmetic can give (about 1e-13 in float32).
        steps: how many steps of the recipe, for `solver="paper"` only (10 if not given).
        complete: fill the directions in which a matrix is zero, so that the result is a true isometry. Without it
            they stay zero.
        seed: what the filling is drawn from; the matrices of one call get different ones.
        certificate: return a pair, the second a `Certificate` with one entry per matrix. Without it a large matrix is
            trusted after a cheaper, probabilistic check.

    >>> w = torch.randn(3, 50, 80)
    >>> q, checked = polar(w, certificate=True)
    >>> bool(checked.converged.all()), bool((checked.residual <= 1e-6).all())
    (True, True)
    >>> torch.allclose(q @ q.mT, torch.eye(50).expand(3, 50, 50), atol=1e-2)
    True
    """
    options = checked_options(solver, tol, steps, complete, seed, certificate)
    tensors = [w] if isinstance(w, Tensor) else list(w)
    names = ["w"] if isinstance(w, Tensor) else [f"w[{i}]" for i in range(len(tensors))]
    for each, name in zip(tensors, names, strict=True):
        _check(each, name)
    sources = [
        Source((each.shape[:-2].numel(), *each.shape[-2:]), each.dtype, each.device, _reader(each)) for each in tensors
    ]
    factors = list(tensors)
    certificates: list[Certificate] = [None for _ in tensors]  # type: ignore[misc]
    for i, q, checked in _located(solutions(sources, options), tensors, names):
        each = tensors[i]
        q = q.reshape(each.shape)
        tracked = each.requires_grad and torch.is_grad_enabled()
        factors[i] = _Polar.apply(each, q) if tracked else q.to(each.dtype)  # type: ignore[no-untyped-call]
        if checked is not None:
            certificates[i] = checked.reshape(each.shape[:-2])
    if isinstance(w, Tensor):
        return (factors[0], certificates[0]) if certificate else factors[0]
    return (factors, certificates) if certificate else factors


def _reader(w: Tensor) -> Callable[[], Tensor]:
    return lambda: w.detach().reshape(w.shape[:-2].numel(), *w.shape[-2:])


def _check(w: Tensor, name: str) -> None:
    if not isinstance(w, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(w).__name__}")
    if w.is_complex() or not w.is_floating_point():
        raise TypeError(f"{name} has dtype {w.dtype}; a polar factor needs a real floating dtype (float16 to float64)")
    if w.layout != torch.strided:
        raise TypeError(f"{name} is sparse ({w.layout}); a polar factor needs a dense matrix: {name}.to_dense()")
    if w.is_meta:
        raise ValueError(f"{name} is on the meta device, where there are no numbers: load the weights first")
    if w.ndim < 2:
        raise ValueError(f"{name} has shape {tuple(w.shape)}; a polar factor needs two dimensions or more (…, out, in)")


def _located(results: Iterator[Any], tensors: list[Tensor], names: list[str]) -> Iterator[Any]:
    """The results; where a matrix turns out not to be finite, an error that says which and where.

    Every chunk looks at its largest entry anyway, so checking each tensor beforehand would do the work twice.
    """
    try:
        yield from results
    except NotFinite:
        _say_where(tensors, names)
        raise


def _say_where(tensors: list[Tensor], names: list[str]) -> None:
    for w, name in zip(tensors, names, strict=True):
        wrong = (~torch.isfinite(w.detach())).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise NotFinite(f"{name} is not finite: {w[at].item()} at index {at} ({len(wrong)} such entries in all)")


class _Polar(torch.autograd.Function):
    """Gives a polar factor its derivative.

    With W = QH wide or square, H = U diag(σ) Uᵀ and V = QᵀU, the adjoint of dW ↦ dQ takes G to
    U[(UᵀGV − VᵀGᵀU)ᵢⱼ/(σᵢ + σⱼ)]Vᵀ + U diag(1/σ) UᵀG(I − VVᵀ): sums of singular values and no differences, so
    repeated ones do no harm. Directions that W lacks were filled from the seed and do not move with W: they get 0.
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, q: Tensor) -> Tensor:
        ctx.save_for_backward(w, q)
        return q.to(w.dtype, copy=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        w, q, g = map(to_float64, (*ctx.saved_tensors, grad))
        tall = w.shape[-2] > w.shape[-1]
        if tall:
            w, q, g = w.mT, q.mT, g.mT
        h = w @ q.mT
        s, u = torch.linalg.eigh((h + h.mT) / 2)
        zero = s <= s.amax(-1, keepdim=True).clamp_min(0) * 1e-12
        s = s.masked_fill(zero, 0)
        v = q.mT @ u
        inner = u.mT @ g @ v
        sums = s[..., :, None] + s[..., None, :]
        turn = torch.where(sums > 0, (inner - inner.mT) / sums, 0)
        outside = g - (g @ v) @ v.mT
        out = u @ (turn @ v.mT + torch.where(zero, 0, 1 / s)[..., None] * (u.mT @ outside))
        return (out.mT if tall else out).to(grad), None


def by_svd_again(
    name: str, matrices: Tensor, factors: Tensor, certificate: Certificate, tol: float
) -> tuple[Tensor, Certificate]:
    """Solve again by float64 SVD what has not converged; an error with the name if that misses `tol` too."""
    missed = (~certificate.converged).nonzero().flatten()
    u, sigma, vh = torch.linalg.svd(to_float64(matrices[missed.to(matrices.device)]), full_matrices=False)
    q = u @ vh
    small = q @ q.mT if q.shape[1] <= q.shape[2] else q.mT @ q
    residual = (small - torch.eye(small.shape[1], dtype=small.dtype, device=small.device)).square().sum((1, 2))
    residual = residual / small.shape[1]
    if not bool((residual <= max(tol, 1e-20)).all()):
        worst = float(residual.max())
        raise RuntimeError(f"{name!r} reaches a residual of {worst:.1e} by float64 SVD, tol is {tol:.1e}")
    factors, residuals = factors.clone(), certificate.residual.clone()
    nuclear, converged = certificate.nuclear.clone(), torch.ones_like(certificate.converged)
    norms = certificate.factor_norm.clone()
    factors[missed.to(factors.device)] = q.to(factors)
    residuals[missed] = residual.to(residuals)
    nuclear[missed] = sigma.sum(1).to(nuclear)
    norms[missed] = torch.linalg.vector_norm(q, dim=(1, 2)).to(norms)
    return factors, replace(certificate, residual=residuals, nuclear=nuclear, factor_norm=norms, converged=converged)
