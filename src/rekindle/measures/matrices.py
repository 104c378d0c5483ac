"""Numbers about weight matrices: how far from an isometry, what spectrum, how different the neurons.

Knows tensors only. A matrix is (out, in) as torch stores it, a row is a neuron; every function takes any
number of leading dimensions and gives one number per matrix. `measure` gathers them all in one pass.

>>> import torch
>>> m = measure(torch.eye(4).expand(3, 4, 4), mode="full")
>>> m.dfi.tolist(), m.effective_rank.tolist()
([0.0, 0.0, 0.0], [4.0, 4.0, 4.0])
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from rekindle.engine.devices import for_lapack
from rekindle.measures.diversity import (
    above,
    dead_columns,
    dead_rows,
    mean_squared_cosine,
    pairs_or_nan,
    row_norm_spread,
    similar_pairs,
    welch_bound,
    welch_ratio,
)
from rekindle.measures.spectra import (
    condition_number,
    effective_rank,
    eigenvalues,
    finite,
    frobenius_norm,
    gram,
    participation_rank,
    pca_rank,
    real,
    roots,
    singular_values,
    spectral_norm,
    spectral_norm_estimate,
    srank,
    stable_rank,
)

__all__ = [
    "Measures",
    "Mode",
    "condition_number",
    "dead_columns",
    "dead_rows",
    "deviation_from_isometry",
    "deviation_per_dimension",
    "effective_rank",
    "frobenius_norm",
    "gram",
    "mean_squared_cosine",
    "measure",
    "participation_rank",
    "pca_rank",
    "row_norm_spread",
    "scale_free_deviation",
    "similar_pairs",
    "singular_values",
    "spectral_norm",
    "spectral_norm_estimate",
    "squared_frobenius_error",
    "srank",
    "stable_rank",
    "welch_bound",
    "welch_ratio",
]

Mode = Literal["cheap", "full"]

# Elements of temporaries that one chunk of matrices may take: 128 MB in float64.
_CHUNK = 16_000_000
# ‖W‖²_F within which fourth powers fit into float32.
_TAME = (1e-12, 1e12)
# Products that comparing all neurons of one matrix may take.
_PAIR_PRODUCTS = 200_000_000


def deviation_from_isometry(w: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """DfI: ‖(W/s)(W/s)ᵀ − I‖²_F on the smaller side (FIRE, the constraint of its problem).

    >>> deviation_from_isometry(2 * torch.eye(3)), deviation_from_isometry(2 * torch.eye(3), scale=2.0)
    (tensor(27.), tensor(0.))
    """
    return _deviation(gram(w), _scale(scale, w))


def deviation_per_dimension(w: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """DfI ÷ k, so that matrices of different size compare.

    >>> deviation_per_dimension(2 * torch.eye(3))
    tensor(9.)
    """
    return deviation_from_isometry(w, scale) / min(w.shape[-2:])


def scale_free_deviation(w: Tensor) -> Tensor:
    """DfI ÷ k at each matrix's own scale s = ‖W‖_F/√k: the shape of the spectrum, whatever its size.

    NaN (unmeasured) for a zero matrix. It equals k·Σσ⁴/(Σσ²)² − 1, which is k ÷ participation rank − 1.

    >>> scale_free_deviation(7 * torch.eye(3)), scale_free_deviation(torch.zeros(3, 3))
    (tensor(0.), tensor(nan))
    """
    g = gram(w)
    return _deviation(g, _own_scale(g)) / g.shape[-1]


def squared_frobenius_error(w: Tensor, changed: Tensor, *, relative: bool = False) -> Tensor:
    """SFE: ‖W − W̃‖²_F (FIRE, the objective of its problem); `relative` divides by ‖W‖²_F.

    >>> squared_frobenius_error(torch.eye(2), torch.zeros(2, 2))
    tensor(2.)
    """
    w, changed = real(w), real(changed)
    if w.shape != changed.shape:
        raise ValueError(f"the two matrices differ in shape: {tuple(w.shape)} and {tuple(changed.shape)}")
    error = (w - changed).square().sum((-2, -1))
    return error / w.square().sum((-2, -1)) if relative else error


@dataclass(frozen=True)
class Measures:
    """Every measure of a batch of matrices, one entry per matrix; None is unmeasured, NaN undefined.

    `spectral_norm` and `stable_rank` come from the exact spectrum in full mode, from 16 power steps otherwise. Cheap
    mode compares rows only where the Gram matrix holds them (out ≤ in); the Welch ratio is of the other case.
    """

    mode: Mode
    shape: tuple[int, int]
    norm: Tensor
    dfi: Tensor
    dfi_per_dimension: Tensor
    dfi_scale_free: Tensor
    spectral_norm: Tensor
    stable_rank: Tensor
    participation_rank: Tensor
    dead_rows: Tensor
    dead_columns: Tensor
    row_norm_spread: Tensor
    mean_squared_cosine: Tensor | None = None
    welch_ratio: Tensor | None = None
    condition_number: Tensor | None = None
    effective_rank: Tensor | None = None
    srank: Tensor | None = None
    pca_rank: Tensor | None = None
    similar_pairs: Tensor | None = None
    spectrum: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Each measured (name, one entry per matrix), the spectrum left out.

        >>> [name for name, _ in measure(torch.eye(2)).items()][:2]
        ['norm', 'dfi']
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "spectrum" and isinstance(value, Tensor):
                yield field.name, value

    def summary(self) -> dict[str, float]:
        """One number per measure for the whole block; what no matrix could measure is left out.

        DfI and dead rows and columns are summed, the norm is the block's, condition number and spectral norm
        are the worst, the rest is the mean.

        >>> measure(torch.eye(2).expand(3, 2, 2), scale=2.0).summary()["dfi"]
        3.375
        """
        names, values = zip(*self.items(), strict=True)
        out: dict[str, float] = {}
        for name, row in zip(names, torch.stack([v.reshape(-1).double() for v in values]).tolist(), strict=True):
            known = [value for value in row if not math.isnan(value)]
            if not known:
                continue
            if name in ("dfi", "dead_rows", "dead_columns"):
                out[name] = math.fsum(known)
            elif name == "norm":
                out[name] = math.hypot(*known)
            elif name in ("condition_number", "spectral_norm"):
                out[name] = max(known)
            else:
                out[name] = math.fsum(known) / len(known)
        return out


def measure(w: Tensor, *, scale: float | Tensor = 1.0, mode: Mode = "cheap", tau: float = 0.8) -> Measures:
    """Every measure of the matrices w (..., out, in); `scale` is a number, or one per matrix.

    Cheap mode multiplies matrices in at least float32 and finds no eigenvalue; full mode adds the exact
    spectrum in float64 and the share of similar pairs (|cosine| > `tau`; where out > in and all pairs would take
    more than 2·10⁸ products, among evenly spaced neurons).

    >>> m = measure(torch.diag(torch.tensor([3.0, 1.0])), mode="full")
    >>> m.condition_number.item(), m.srank.item(), m.dead_rows.item()
    (3.0, 2, 0)
    """
    if mode not in ("cheap", "full"):
        raise ValueError(f"mode is 'cheap' or 'full', not {mode!r}")
    leading, (out, in_) = w.shape[:-2], w.shape[-2:]
    flat = for_lapack(w.detach()).reshape(-1, out, in_)
    scale = for_lapack(scale) if isinstance(scale, Tensor) else scale
    scales = torch.as_tensor(scale, dtype=torch.float64, device=flat.device).expand(leading).reshape(-1)
    chunk = max(1, _CHUNK // max(1, out * in_))
    pieces = [_measure(flat[at : at + chunk], scales[at : at + chunk], mode, tau) for at in range(0, len(flat), chunk)]
    if not pieces:
        raise ValueError(f"no matrix in a tensor of shape {tuple(w.shape)}")
    joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    return Measures(
        mode=mode,
        shape=(out, in_),
        **{name: value.reshape((*leading, *value.shape[1:])) for name, value in joined.items()},
    )


def _measure(w: Tensor, scale: Tensor, mode: Mode, tau: float) -> dict[str, Tensor]:
    w = real(w)
    # BLAS reads a transposed matrix as it is; taps of a convolution are strided and worth one copy.
    w = w if 1 in (w.stride(-1), w.stride(-2)) else w.contiguous()
    out, in_ = w.shape[-2:]
    g = gram(w.double() if mode == "full" else w)
    diagonal = g.diagonal(dim1=-2, dim2=-1)
    smallest, largest = (each.item() for each in diagonal.sum(-1).aminmax())
    if not math.isfinite(largest):
        finite(w)
    if w.dtype == torch.float32 and not (_TAME[0] < smallest and largest < _TAME[1]):
        # Squares of squares would leave float32's range, and small numbers would count as zero.
        return _measure(w.double(), scale, mode, tau)
    # One of the two norms lies on the diagonal of the Gram matrix.
    shorter, longer = diagonal.clamp_min(0).sqrt(), w.square().sum(-2 if out <= in_ else -1).sqrt()
    rows, columns = (shorter, longer) if out <= in_ else (longer, shorter)
    live = above(rows)
    count = live.sum(-1)
    found: dict[str, Tensor] = {
        "dead_rows": out - count,
        "dead_columns": in_ - above(columns).sum(-1),
        "row_norm_spread": rows.std(-1, correction=0) / rows.mean(-1),
    }
    # Squared with the diagonal taken out: DfI and cosines then need no difference of large numbers.
    apart = g.to(w.dtype).square()
    apart.diagonal(dim1=-2, dim2=-1).zero_()
    if out <= in_:
        norms = diagonal.to(w.dtype)
        inverse = torch.where(live, norms.clamp_min(torch.finfo(w.dtype).tiny).reciprocal(), 0)[..., None]
        pairs = pairs_or_nan(count)
        found["mean_squared_cosine"] = (inverse.mT @ apart @ inverse).squeeze((-2, -1)) / pairs
        if mode == "full":
            # cos² > τ² without a division; no cosine of a dead row exceeds infinity.
            least = torch.where(live, tau * norms, math.inf)
            similar = torch.count_nonzero(apart > least[..., :, None] * least[..., None, :], dim=(-2, -1))
            found["similar_pairs"] = similar / pairs
    elif mode == "full":
        # Pairs of rows are not in this Gram matrix: another product, which cheap mode does without.
        found["mean_squared_cosine"] = mean_squared_cosine(w)
        # All pairs of 3,072 neurons of 768 inputs would take longer than their spectrum: a sample of neurons then.
        most = max(2, int(math.sqrt(_PAIR_PRODUCTS / in_)))
        found["similar_pairs"] = similar_pairs(w[..., :: -(-out // most), :], tau)
        bound = welch_bound(count, in_)
        assert isinstance(bound, Tensor)
        found["welch_ratio"] = torch.where(bound > 0, found["mean_squared_cosine"] / bound, math.nan)
    if mode == "full":
        return found | _from_spectrum(g, scale)
    return found | _from_products(g, diagonal, apart.sum((-2, -1)), scale.to(g.dtype))


def _from_products(g: Tensor, diagonal: Tensor, apart: Tensor, scale: Tensor) -> dict[str, Tensor]:
    k = g.shape[-1]
    squared, energy = diagonal.sum(-1), apart + diagonal.square().sum(-1)
    own, largest = squared / k, spectral_norm_estimate(g)

    def deviation(square: Tensor) -> Tensor:
        return apart / square.square() + (diagonal / square[..., None] - 1).square().sum(-1)

    dfi = deviation(scale.square())
    return {
        "norm": squared.sqrt(),
        "dfi": dfi,
        "dfi_per_dimension": dfi / k,
        "dfi_scale_free": deviation(torch.where(own > 0, own, math.nan)) / k,
        "spectral_norm": largest,
        "stable_rank": squared / largest.square(),
        "participation_rank": squared.square() / energy,
    }


def _from_spectrum(g: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """The same and more: ‖G/s² − I‖²_F is the sum of (λ/s² − 1)² over the eigenvalues."""
    k = g.shape[-1]
    spectrum = roots(eigenvalues(g))
    values = spectrum.square()
    own = values.mean(-1, keepdim=True)
    dfi = (values / scale.square()[..., None] - 1).square().sum(-1)
    return {
        "norm": values.sum(-1).sqrt(),
        "dfi": dfi,
        "dfi_per_dimension": dfi / k,
        "dfi_scale_free": (values / torch.where(own > 0, own, math.nan) - 1).square().mean(-1),
        "spectrum": spectrum,
        "spectral_norm": spectrum[..., 0],
        "stable_rank": stable_rank(spectrum),
        "participation_rank": participation_rank(spectrum),
        "condition_number": condition_number(spectrum),
        "effective_rank": effective_rank(spectrum),
        "srank": srank(spectrum),
        "pca_rank": pca_rank(spectrum),
    }


def _scale(scale: float | Tensor, w: Tensor) -> Tensor:
    dtype = w.dtype if w.dtype == torch.float64 else torch.float32
    return torch.as_tensor(scale, dtype=dtype, device=w.device).expand(w.shape[:-2])


def _own_scale(g: Tensor) -> Tensor:
    mean = g.diagonal(dim1=-2, dim2=-1).mean(-1)
    return torch.where(mean > 0, mean, math.nan).sqrt()


def _deviation(g: Tensor, scale: Tensor) -> Tensor:
    # Subtracts before it squares: the expanded form cancels to noise close to an isometry.
    eye = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
    return (g / scale.square()[..., None, None] - eye).square().sum((-2, -1))
