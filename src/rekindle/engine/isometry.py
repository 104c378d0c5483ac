"""polar(): the nearest isometry of every matrix in a tensor, checked numerically. Knows tensors only.

The polar factor Q of W is the (semi-)orthogonal matrix nearest to it; FIRE replaces weights by it. The public verb
checks its input and calls the operator (`operator.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from rekindle.engine.devices import to_float64
from rekindle.engine.operator import operator
from rekindle.engine.solving import Certificate, NotFinite, Solver, Solving, checked_options

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
    Gradients flow, in both directions and twice; torch.compile, torch.export and vmap take it as one operator.

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
    for i, x in enumerate(tensors):
        _check(x, "w" if isinstance(w, Tensor) else f"w[{i}]")
    found = operator(tensors, solver, tol, options.steps, complete, seed, certificate) if tensors else []
    factors = [q.to(x.dtype) for x, q in zip(tensors, found[: len(tensors)], strict=True)]
    if not certificate:
        return factors[0] if isinstance(w, Tensor) else factors
    measured = found[len(tensors) :]
    size = len(measured) // max(1, len(tensors))
    certificates = [Certificate(*measured[i * size : (i + 1) * size]) for i in range(len(tensors))]
    return (factors[0], certificates[0]) if isinstance(w, Tensor) else (factors, certificates)


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
