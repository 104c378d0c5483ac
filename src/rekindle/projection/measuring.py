"""What is measured of matrices for a plan and a receipt, beyond the solver's own numbers.

`look` is for one block, `looks` for the blocks of a model whose parameters are spread over processes, `references_of`
for the initial weights; `observed` and `measured` are about what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from rekindle.blocks.entries import Found
from rekindle.blocks.layouts import Block
from rekindle.blocks.names import is_sharded
from rekindle.engine.devices import for_lapack, has_float64, to_float64
from rekindle.measures.matrices import deviation_from_isometry, measure, squared_frobenius_error
from rekindle.measures.spectra import gram, spectral_norm_estimate
from rekindle.projection.entries import PlanEntry
from rekindle.projection.receipt import finite_mean, finite_sum
from rekindle.projection.scales import Scale
from rekindle.sharding.assembly import Assembly, Item, inside
from rekindle.sharding.spread import Spread
from rekindle.sharding.team import Team
from rekindle.sharding.units import Part

Reader = Callable[[Found], Tensor | None]
Look = tuple[Tensor, float | None, float | None]

_SPECTRAL = ("effective_rank", "stable_rank", "srank", "condition_number", "spectrum")
# Elements of matrices whose Gram matrices are held at a time.
_CHUNK = 1 << 21
# DfI is estimated where all Gram matrices would take more multiplications than this, of matrices with so many rows;
# by so many vectors, with at most so many numbers in a float32 copy (64 MB).
_EXACT, _LARGE = 4e11, 1024
_SPAN, _PROBES, _COPY = 16, 32, 1 << 24


def look(block: Block, weight: Tensor, scale: float | None, estimate: bool = False) -> Look:
    """(norm of each matrix, DfI of the block at `scale`, DfI at each matrix's own scale ‖W‖_F/√k).

    From one Gram matrix each, in bounded memory. Without a scale the first DfI is taken at the own one too. `estimate`
    takes both DfI from products with random vectors instead.

    >>> from rekindle.blocks.layouts import matrices
    >>> block = matrices("out in")((2, 3))[0]
    >>> look(block, 2 * torch.eye(2, 3), 1.0)
    (tensor([2.8284]), 18.0, 0.0)
    """
    squares, total, free = [], 0.0, 0.0
    weight = for_lapack(weight)
    if estimate:
        for matrix in block.read(weight.detach()):
            square, at_scale, at_own = _estimated(matrix if block.out <= block.in_ else matrix.mT, scale)
            squares.append(square)
            total, free = total + at_scale, free + at_own
        return torch.stack(squares).sqrt(), total, free
    for several in torch.split(block.read(weight.detach()), max(1, _CHUNK // (block.out * block.in_))):
        products = gram(several)
        square = products.diagonal(dim1=1, dim2=2).sum(1)
        own = square / block.smaller
        squares.append(square)
        # A zero matrix has no scale of its own: at any other it is k away from an isometry.
        own = own.where(own > 0, 1.0)
        apart, diagonal = _apart(products, own)
        free += _deviation(apart, diagonal, torch.ones_like(own))
        total += _deviation(apart, diagonal, torch.ones_like(own) if scale is None else own / scale**2)
    return torch.cat(squares).sqrt(), total, free


def too_many(weights: Iterable[PlanEntry]) -> set[str]:
    """The weights whose DfI is estimated: the large ones of a model whose Gram matrices would take longer than _EXACT.

    Of TinyLlama (1.1 B) they are 2 × 10¹² operations, half of each matrix: 10 s for two cores at the peak of float32.
    """
    chosen = [(f.name, block) for f in weights if f.refusal is None for block in f.blocks]
    work = sum(b.count * b.smaller**2 * max(b.out, b.in_) for _, b in chosen)
    return {name for name, block in chosen if block.smaller >= _LARGE} if work > _EXACT else set()


def _estimated(w: Tensor, scale: float | None) -> tuple[Tensor, float, float]:
    """(‖W‖²_F, DfI at the scale, DfI at the own one) of a wide matrix, the two DfI as estimates.

    DfI is the trace of D², D = WWᵀ/s² − I. Hutch++ (Meyer et al., SOSA 2021): exactly on the span of WWᵀS, where the
    largest singular values are, and by random signs on the rest: 4·km operations for each of 64 vectors instead of
    k²m in all.
    """
    k, dtype = len(w), torch.promote_types(w.dtype, torch.float32)
    generator = torch.Generator(w.device).manual_seed(0)
    signs = torch.randint(0, 2, (k, _SPAN + _PROBES), generator=generator, device=w.device).to(dtype) * 2 - 1
    lots = torch.split(w, max(1, _COPY // k), dim=1)
    if len(lots) == 1:
        lots = (w.to(dtype),)  # once for both passes

    def products(x: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        for columns in lots:
            columns = columns.to(dtype)
            made.addmm_(columns, columns.mT @ x)
        return made

    square = torch.zeros((), dtype=torch.float64, device=w.device)
    for columns in lots:  # in rows or columns as they lie in memory
        square += torch.linalg.vector_norm(columns, dim=int(w.stride(1) == 1), dtype=dtype).double().square().sum()
    if not torch.isfinite(square):
        return square, float("nan"), float("nan")
    span = torch.linalg.qr(products(signs[:, :_SPAN].contiguous()))[0]
    rest = signs[:, _SPAN:] - span @ (span.mT @ signs[:, _SPAN:])
    both = torch.cat([span, rest], 1)
    seen = products(both)
    own = float(square) / k or 1.0

    def deviation(squared_scale: float) -> float:
        apart = (seen / squared_scale - both).double().square().sum(0)
        return float(apart[:_SPAN].sum() + apart[_SPAN:].mean())

    return square, deviation(own if scale is None else scale**2), deviation(own)


def _apart(products: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the squares beside the diagonal, and the diagonal, of G/own; one pass over G, which is used up.

    Rows are summed in float64: one float32 sum over four million squares is off in the fifth digit.
    """
    low, high = (float(each) for each in own.aminmax())
    if not (low > 1e-9 and high < 1e9):  # squares of the Gram matrix would leave float32's range
        products = products.div_(own[:, None, None])
        own = torch.ones_like(own)
    values = products.diagonal(dim1=1, dim2=2)
    diagonal = (values / own[:, None]).double()
    values.zero_()
    rows = torch.linalg.vector_norm(products, dim=2).double()
    return rows.square().sum(1) / own.double().square(), diagonal


def _deviation(apart: Tensor, diagonal: Tensor, ratio: Tensor) -> float:
    """DfI summed over matrices, at scales whose squares are 1/ratio of the own ones."""
    ratio = ratio.double()
    return float((apart * ratio.square() + (diagonal * ratio[:, None] - 1.0).square().sum(1)).sum())


def looks(
    team: Team, spreads: Mapping[str, Spread], weights: Iterable[PlanEntry], read: Reader, rule: Scale, measure: bool
) -> dict[tuple[str, int], Look]:
    """What `look` returns for every chosen block of a sharded parameter, by (name, place of the block); collective."""
    chosen = [f for f in weights if f.refusal is None and f.key in spreads]
    items = []
    for f in chosen:
        weight = read(f)
        assert weight is not None
        layouts = tuple(block.layout for block in f.blocks)
        items.append(Item(f.name, weight, spreads[f.key], layouts))
    if not items:
        return {}
    assembly = Assembly(team, items)
    norms = assembly.norms()
    measured: dict[tuple[int, int], list[tuple[Part, Look]]] = {}
    if measure:

        def look_at(number: int, part: Part, box: Tensor) -> Look:
            whole = chosen[number].blocks[part.block]
            return look(inside(whole, part), box, rule.known(whole))

        measured = assembly.measure(look_at)
    found: dict[tuple[str, int], Look] = {}
    for number, f in enumerate(chosen):
        for place in range(len(f.blocks)):
            parts = [result for _, result in measured.get((number, place), [])]
            dfi = sum(part[1] or 0.0 for part in parts) if parts else None
            free = sum(part[2] or 0.0 for part in parts) if parts else None
            found[f.name, place] = (norms[number][place], dfi, free)
    return found


def references_of(f: PlanEntry, initial: Reader | None) -> tuple[tuple[float, ...], ...]:
    """The norm of each matrix of a weight in the initial model, for the scale "reference"."""
    start = initial(f) if initial is not None else None
    if start is None:
        raise ValueError(f"{f.name}: the reference has no such weight; exclude it or choose another scale")
    if is_sharded(start):
        start = cast("Any", start).full_tensor()  # one parameter at a time
        assert isinstance(start, Tensor)
    if tuple(start.shape) != f.shape:
        raise ValueError(f"{f.name} has shape {f.shape}, the reference has {tuple(start.shape)}")
    norms = [torch.linalg.vector_norm(to_float64(b.read(start)), dim=(1, 2)).tolist() for b in f.blocks]
    if any(n == 0.0 for per in norms for n in per):
        raise ValueError(f"{f.name}: a matrix of the reference is zero, which gives no scale; exclude it")
    return tuple(tuple(per) for per in norms)


def observed(stored: Tensor, scale: Tensor, converged: bool) -> Tensor:
    """Measures of the stored matrices (count, out, in), on their device: DfI/k, ‖·‖_F and σ_max.

    σ_max is 0 where all have converged: there it is the scale.
    """
    off = deviation_from_isometry(stored, scale)
    norm = torch.linalg.vector_norm(stored.detach(), dim=(1, 2), dtype=off.dtype)
    largest = torch.zeros_like(norm) if converged else spectral_norm_estimate(gram(stored))
    seen = torch.stack([off, norm, largest]).to(torch.float64 if has_float64(stored.device) else off.dtype)
    seen[0] /= min(stored.shape[1:])
    return seen


def measured(before: Tensor, stored: Tensor, scale: Tensor) -> dict[str, Any]:
    """The full measures of a block's matrices before the write and as they now are."""
    before, stored, scale = for_lapack(before), for_lapack(stored), for_lapack(scale)
    first, last = (measure(matrices, scale=scale, mode="full") for matrices in (before, stored))
    values: dict[str, Any] = {}
    for key in _SPECTRAL:
        for when, found in (("before", first), ("after", last)):
            value = getattr(found, key)
            values[f"{key}_{when}"] = value.tolist() if key == "spectrum" else finite_mean(value.tolist())
    return {
        "dfi_before": finite_sum(first.dfi.tolist()),
        "dfi_after": finite_sum(last.dfi.tolist()),
        "dfi_free_before": finite_mean(first.dfi_scale_free.tolist()),
        "dfi_free_after": finite_mean(last.dfi_scale_free.tolist()),
        "sfe": float(squared_frobenius_error(before.double(), stored.double()).sum()),
        "norm_before": float(first.norm.square().sum().sqrt()),
        "norm_after": float(last.norm.square().sum().sqrt()),
        "spectral_before": float(first.spectral_norm.max()),
        "spectral_after": float(last.spectral_norm.max()),
        "values": values,
    }
