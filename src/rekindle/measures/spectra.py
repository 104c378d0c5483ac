"""Singular values of matrices and the ranks that they give.

Exact spectra go through the eigenvalues of the smaller Gram matrix in float64; `spectral_norm_estimate`
needs products only. The ranks take descending singular values, of weights and of features alike.

LAPACK's eigenvalue routines move more memory than they multiply, and a second thread hardly helps them; two matrices
side by side on two cores take half the time (`side_by_side`).

>>> import torch
>>> round(effective_rank(singular_values(torch.eye(3, 5))).item(), 6)
3.0
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rekindle.engine.arithmetic import gram as product
from rekindle.engine.arithmetic import mirrored
from rekindle.engine.devices import for_lapack, to_float64

_SLICE = 1 << 21  # elements of a half-precision matrix that are converted to float32 at a time: 8 MB


class NoSpectrum(ValueError):
    """A matrix holds NaN or Inf, so that it has no spectrum."""


def gram(w: Tensor) -> Tensor:
    """WWᵀ or WᵀW, whichever is smaller, in at least float32: (..., k, k) with k = min(out, in).

    >>> gram(torch.tensor([[3.0, 4.0]]))
    tensor([[25.]])
    """
    w = w if w.dim() < 2 or w.shape[-2] <= w.shape[-1] else w.mT
    if w.dim() < 2 or not w.is_floating_point() or w.dtype.itemsize > 2 or w.numel() <= _SLICE:
        return product(real(w))
    # Half precision: without a float32 copy of the whole, some columns at a time.
    matrices = w.detach().reshape(-1, *w.shape[-2:])
    count, k, _ = matrices.shape
    total = torch.zeros(count, k, k, device=w.device)
    for columns in torch.split(matrices, max(1, _SLICE // (count * k)), dim=2):
        product(columns.float(), by="half", out=total, add=True)
    return mirrored(total).reshape(*w.shape[:-1], k)


def eigenvalues(g: Tensor) -> Tensor:
    """Ascending eigenvalues of symmetric matrices.

    >>> eigenvalues(torch.diag(torch.tensor([2.0, 1.0])))
    tensor([1., 2.])
    """
    g = for_lapack(g)
    if g.device.type != "cpu":
        values: Tensor = torch.linalg.eigvalsh(g)
        return values
    # numpy's LAPACK takes 14 ms for 512² in float64 and 40 ms for 768², torch's 21 ms and 63 ms.
    return torch.as_tensor(np.linalg.eigvalsh(g.detach().numpy()))


def frobenius_norm(w: Tensor) -> Tensor:
    """‖W‖_F, the root of the sum of the squared singular values.

    >>> frobenius_norm(torch.tensor([[3.0, 4.0]]))
    tensor(5.)
    """
    return real(w).square().sum((-2, -1)).sqrt()


def singular_values(w: Tensor) -> Tensor:
    """All singular values, largest first, in float64: the roots of the smaller Gram matrix's eigenvalues.

    The Gram route is several times faster than an SVD and exact down to 1e-8 of the largest value; below
    that only rounding is seen, so such values are given as 0.

    >>> singular_values(torch.diag(torch.tensor([1.0, 3.0])))
    tensor([3., 1.], dtype=torch.float64)
    """
    return roots(eigenvalues(gram(to_float64(finite(w)))))


def spectral_norm(w: Tensor) -> Tensor:
    """The largest singular value, exactly.

    >>> spectral_norm(torch.diag(torch.tensor([1.0, 3.0])))
    tensor(3., dtype=torch.float64)
    """
    return singular_values(w)[..., 0]


def spectral_norm_estimate(g: Tensor, steps: int = 16) -> Tensor:
    """The largest singular value from the Gram matrix by power iteration: products only, from below.

    Starts at the Gram column of the largest row, so that no random number is needed. 16 steps come within 5 %
    on Gaussian matrices, whose top singular values lie close together, and closer where one stands out.

    >>> spectral_norm_estimate(gram(torch.diag(torch.tensor([1.0, 3.0]))))
    tensor(3.)
    """
    k, tiny = g.shape[-1], torch.finfo(g.dtype).tiny
    largest = g.diagonal(dim1=-2, dim2=-1).argmax(-1)
    # A row times the matrix: a batch of columns takes torch's bmm 14 times longer (9 × 512² on CPU).
    v = g.gather(-2, largest[..., None, None].expand(*g.shape[:-2], 1, k))
    # Divided by the trace at each step, a vector shrinks at most k-fold: normalizing every eighth is enough.
    trace = g.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(tiny)
    shrink = trace.reciprocal()
    for step in range(steps):
        if step % 8 == 0:
            v = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(tiny)
        v = (v @ g) * shrink
    v = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(tiny) @ g
    estimate: Tensor = torch.linalg.vector_norm(v, dim=-1).squeeze(-1).sqrt()
    return estimate


def condition_number(spectrum: Tensor) -> Tensor:
    """σ_max/σ_min of descending singular values; infinite where the matrix is singular.

    >>> condition_number(torch.tensor([6.0, 2.0])), condition_number(torch.tensor([6.0, 0.0]))
    (tensor(3.), tensor(inf))
    """
    return spectrum[..., 0] / spectrum[..., -1]


def stable_rank(spectrum: Tensor) -> Tensor:
    """‖W‖²_F/σ²_max (Rudelson and Vershynin 2007): a rank that small singular values barely move.

    >>> stable_rank(torch.tensor([2.0, 2.0, 0.0]))
    tensor(2.)
    """
    return spectrum.square().sum(-1) / spectrum[..., 0].square()


def effective_rank(spectrum: Tensor) -> Tensor:
    """exp of the entropy of the singular values as shares of their sum (Roy and Vetterli 2007).

    >>> effective_rank(torch.ones(5)), effective_rank(torch.zeros(5))
    (tensor(5.), tensor(0.))
    """
    total = spectrum.sum(-1, keepdim=True)
    rank = torch.special.entr(spectrum / total).sum(-1).exp()
    return torch.where(total.squeeze(-1) > 0, rank, torch.zeros_like(rank))


def participation_rank(spectrum: Tensor) -> Tensor:
    """(Σσ²)²/Σσ⁴, the participation ratio: an effective rank of the energy, which needs products only.

    >>> participation_rank(torch.tensor([1.0, 1.0, 0.0]))
    tensor(2.)
    """
    squares = spectrum.square()
    return squares.sum(-1).square() / squares.square().sum(-1)


def srank(spectrum: Tensor, delta: float = 0.01) -> Tensor:
    """How many singular values it takes to reach 1 − δ of their sum (Kumar et al. 2021).

    >>> srank(torch.tensor([98.0, 1.5, 0.5])), srank(torch.zeros(3))
    (tensor(2), tensor(0))
    """
    return _reaching(spectrum, 1 - delta)


def pca_rank(spectrum: Tensor, share: float = 0.99) -> Tensor:
    """How many principal directions hold `share` of the energy Σσ² (as Lyle et al. 2022 count features).

    >>> pca_rank(torch.tensor([10.0, 1.0, 0.1]))
    tensor(1)
    """
    return _reaching(spectrum.square(), share)


def real(w: Tensor) -> Tensor:
    """The matrices in at least float32, detached; anything but real floating point is an error.

    >>> real(torch.eye(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    if w.dim() < 2:
        raise ValueError(f"a matrix needs two dimensions, got shape {tuple(w.shape)}")
    if not w.is_floating_point():
        raise TypeError(f"measures need real floating-point matrices, got {w.dtype}")
    w = w.detach()
    return w if w.dtype in (torch.float32, torch.float64) else w.float()


def finite(w: Tensor) -> Tensor:
    """The same as `real`, and an error on NaN or Inf: LAPACK's eigensolvers raise or do not terminate on those.

    >>> finite(torch.full((2, 2), float("nan")))
    Traceback (most recent call last):
    rekindle.measures.spectra.NoSpectrum: the matrices of shape (2, 2) hold NaN or Inf
    """
    w = real(w)
    # The sum is one pass without a temporary, and finite only if every value is.
    if not math.isfinite(w.sum().item()) and not torch.isfinite(w).all():
        raise NoSpectrum(f"the matrices of shape {tuple(w.shape)} hold NaN or Inf")
    return w


def roots(eigenvalues: Tensor) -> Tensor:
    """Descending singular values from a Gram matrix's ascending eigenvalues; rounding noise becomes 0.

    >>> roots(torch.tensor([-1e-9, 4.0]))
    tensor([2., 0.])
    """
    values = eigenvalues.flip(-1).clamp_min(0)
    noise = values[..., :1] * torch.finfo(values.dtype).eps * values.shape[-1]
    return torch.where(values > noise, values, 0).sqrt()


def _reaching(values: Tensor, share: float) -> Tensor:
    cumulative = to_float64(values).cumsum(-1)
    total = cumulative[..., -1:]
    # The rounding of the running sum must not ask for one more value than the definition does.
    below = (cumulative < share * total * (1 - 1e-12)).sum(-1)
    return torch.where(total.squeeze(-1) > 0, below + 1, 0)


WORTH = 4_000_000  # numbers in all; for fewer the threads cost more than they save

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(work: Callable[[T], R], items: Iterable[T], *, workers: int) -> Iterator[R]:
    """work(item) for every item, in their order, `workers` at a time; at most twice as many are drawn ahead.

    >>> list(side_by_side(abs, [-3, 1, -2], workers=2))
    [3, 1, 2]
    """
    if workers < 2:
        yield from map(work, items)
        return
    with one_blas_thread(), ThreadPoolExecutor(workers, thread_name_prefix="rekindle") as pool:
        waiting: deque[Future[R]] = deque()
        for item in items:
            if len(waiting) == 2 * workers:  # so that a slow first item does not hold up the others
                yield waiting.popleft().result()
            waiting.append(pool.submit(work, item))
        while waiting:
            yield waiting.popleft().result()


def workers_for(numbers: int) -> int:
    """How many matrices to process in parallel for this many numbers in all: 1, or torch's thread count.

    >>> workers_for(1000)
    1
    """
    return torch.get_num_threads() if numbers >= WORTH else 1


def one_blas_thread() -> AbstractContextManager[object]:
    """A context in which numpy's BLAS uses one thread per call, if threadpoolctl is installed.

    Without it the threads of both calls compete: slower, with the same result.
    """
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return nullcontext()
    limits: AbstractContextManager[object] = threadpool_limits(1, user_api="blas")
    return limits
