"""solve(): the polar factors of many matrices, checked numerically; small ones in bulk.

From top to bottom: `solve` brings matrices into groups of one shape and chunks that bound memory; `_by_route` chooses a
route. `arithmetic.py` is how all routes begin and end, `routes.py` has the routes, `completion.py` the directions that
a matrix lacks, `symmetric.py` and `schedules.py` what they are made of, `bulk.py` the way for small matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, TypedDict, cast, get_args

import torch
from torch import Tensor

from rekindle.engine import arithmetic, routes
from rekindle.engine.arithmetic import Solved, Start, norm2
from rekindle.engine.bulk import MOST, by_bulk
from rekindle.engine.devices import full_precision, has_float64, to_float64, to_host
from rekindle.engine.tuning import tuning
from rekindle.spelling import argument

Solver = Literal["auto", "fast", "paper", "svd", "products", "halley", "gram"]
CONVERGING = ("auto", "svd", "products", "halley", "gram")  # the solvers that promise the tolerance

# Elements processed at a time. On CPUs a million keeps the working set near the caches (8 million take 30 % more
# time); accelerators want more work per call.
CPU_CHUNK = 2**20
ACCELERATOR_CHUNK = 2**24

ONE_STEP_FROM = 384  # rows from which on one Halley step leaves less DfI than ten steps of the recipe
FLAT = 0.4  # mean σ² over σ_max² (a Gaussian has .25) from which on the recipe converges, and one step is not enough
TAME = (1e-12, 1e12)  # ‖W‖²_F within which fourth powers fit into float32
WIDE = 1.5  # m/n from which on working on the n×n side pays


@dataclass(frozen=True)
class Certificate:
    """What is known of each polar factor, and of the matrix that it came from: tensors with one entry per matrix.

    Attributes:
        residual: DfI/k of the factor in the arithmetic that it was computed in, before any cast; with `complete=False`
            over the directions that the matrix has.
        steps: how many steps the solver took.
        completed: directions in which the matrix was zero and that were filled from the seed; 0 with `complete=False`.
        converged: whether `residual` is within the tolerance.
        norm: ‖W‖_F.
        gram_norm: ‖WWᵀ‖_F on the smaller side.
        spectral_norm: σ_max by a short power iteration, from below: up to 15% low where the spectrum is flat.
        nuclear: tr(QᵀW), which is ‖W‖_* for the polar factor and less for any other isometry.
        factor_norm: ‖Q‖_F.
    """

    residual: Tensor
    steps: Tensor
    completed: Tensor
    converged: Tensor
    norm: Tensor
    gram_norm: Tensor
    spectral_norm: Tensor
    nuclear: Tensor
    factor_norm: Tensor

    def __getitem__(self, part: Any) -> Certificate:
        return self._each(lambda entry: entry[part])

    def reshape(self, shape: Sequence[int]) -> Certificate:
        """The same with its entries arranged as the batch dimensions of the input."""
        return self._each(lambda entry: entry.reshape(tuple(shape)))

    def __str__(self) -> str:
        if not self.residual.numel():
            return "no matrices"
        filled = int(self.completed.sum())
        return (
            f"{int(self.converged.sum())} of {self.residual.numel()} converged, "
            f"DfI/k ≤ {float(self.residual.max()):.1e}, at most {int(self.steps.max())} steps"
            + (f", {filled} directions completed" if filled else "")
        )

    def to_host(self) -> Certificate:
        """The same on the CPU, with one wait."""
        held: list[Tensor] = [getattr(self, field.name) for field in fields(self)]
        return self if all(value.device.type == "cpu" for value in held) else Certificate(*to_host(held))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Certificate:
        return Certificate(*(change(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True)
class Source:
    """Matrices (count, out, in) that are read only when their turn comes, so that memory stays bounded.

    `numbers` are (source, matrix) that the seeds of its matrices come from: by default its place in the list, so that
    a part of a larger job is solved exactly as the whole job would solve it.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    read: Callable[[], Tensor]
    numbers: Sequence[tuple[int, int]] | None = None


@dataclass(frozen=True)
class Options:
    """The keywords of `polar`, and whether certificates are wanted, and wanted on the host."""

    solver: Solver
    tol: float
    steps: int
    complete: bool
    seed: int
    certificate: bool
    on_host: bool = False


class Solving(TypedDict, total=False):
    """The keywords of `polar` that say how to solve; `solve` and `fire` have the same ones."""

    solver: Solver
    tol: float
    steps: int | None
    complete: bool
    seed: int


def solve(
    sources: Sequence[Source],
    *,
    solver: Solver = "auto",
    tol: float = 1e-6,
    steps: int | None = None,
    complete: bool = True,
    seed: int = 0,
) -> Iterator[tuple[int, Tensor, Certificate]]:
    """Polar factors of many sources, each yielded as (index, Q (count, out, in), certificate) when it is ready.

    Matrices of one shape (or its transpose) are solved together, so the order is not that of the sources. Q is in the
    arithmetic's dtype: float64 for float64, float32 for all others. Certificates are on the host, whatever the device.

    >>> weights = [torch.randn(1, 20, 30), torch.randn(4, 30, 20)]
    >>> sources = [Source(tuple(w.shape), w.dtype, w.device, lambda w=w: w) for w in weights]
    >>> sorted((i, tuple(q.shape)) for i, q, _ in solve(sources))
    [(0, (1, 20, 30)), (1, (4, 30, 20))]
    """
    options = replace(checked_options(solver, tol, steps, complete, seed, certificate=True), on_host=True)
    return cast(Iterator[tuple[int, Tensor, Certificate]], solutions(sources, options))


def solutions(sources: Sequence[Source], options: Options) -> Iterator[tuple[int, Tensor, Certificate | None]]:
    """Group the sources by shape, and pack neighbors into chunks."""
    groups: dict[tuple[int, int, torch.dtype, torch.device], list[int]] = {}
    for i, source in enumerate(sources):
        _, rows, columns = source.shape
        arithmetic = torch.float64 if source.dtype == torch.float64 else torch.float32
        groups.setdefault((min(rows, columns), max(rows, columns), arithmetic, source.device), []).append(i)
    for (n, m, arithmetic, device), members in groups.items():
        room = max(1, (CPU_CHUNK if device.type == "cpu" else ACCELERATOR_CHUNK) // max(1, n * m))
        chunk: list[int] = []
        held = 0
        for i in members:
            if chunk and held + sources[i].shape[0] > room:
                yield from _solve_chunk(sources, chunk, arithmetic, room, options)
                chunk, held = [], 0
            chunk.append(i)
            held += sources[i].shape[0]
        yield from _solve_chunk(sources, chunk, arithmetic, room, options)


def _solve_chunk(
    sources: Sequence[Source], members: list[int], arithmetic: torch.dtype, room: int, options: Options
) -> Iterator[tuple[int, Tensor, Certificate | None]]:
    """Solve sources of one shape: together if they fit into `room` matrices, else (one alone) slice by slice."""
    wides = [_wide(sources[i].read().detach()) for i in members]
    seeds = _seeds(options.seed, members, sources)
    whole = wides[0] if len(wides) == 1 else torch.cat(wides)
    del wides
    if len(seeds) <= room:
        q, checked = _solve_group(whole.to(arithmetic), seeds, options)
    else:
        q = torch.empty(whole.shape, dtype=arithmetic, device=whole.device)
        several: list[Certificate] = []
        for top in range(0, len(seeds), room):
            part = slice(top, top + room)
            q[part], checked = _solve_group(whole[part].to(arithmetic), seeds[part], options)
            several += [checked] if checked else []
        joined = ([getattr(each, field.name) for each in several] for field in fields(Certificate))
        checked = Certificate(*map(torch.cat, joined)) if several else None
    del whole
    if checked is not None and options.on_host:
        checked = checked.to_host()
    top = 0
    for i in members:
        count, rows, columns = sources[i].shape
        part = slice(top, top + count)
        top += count
        alone = len(members) == 1
        own = checked if checked is None or alone else checked[part]
        yield i, q[part] if rows <= columns else q[part].mT, own


@full_precision()
@torch.no_grad()
def _solve_group(w: Tensor, seeds: Tensor, options: Options) -> tuple[Tensor, Certificate | None]:
    """The polar factors of a chunk (batch, n, m), n ≤ m, and what is known of them."""
    w, unit = w.contiguous(), w.new_ones(w.shape[0])
    if not w.numel():
        zero = w.new_zeros(w.shape[0])
        known, gram2, solved = Start(w, zero, zero), zero, Solved.new(w.clone(), 0)
        solved.residual = solved.size2 = zero
    else:
        # Small matrices go by polynomials, which have their own bound of σ_max, and are never repaired one by one.
        plain = options.solver == "auto" and _small(w) and not options.certificate
        start = arithmetic.norms if plain and _in_bulk(w, options) else partial(arithmetic.start, estimate=not plain)
        known = start(w)
        if not bool(((known.norm2 > TAME[0]) & (known.norm2 < TAME[1])).all()):  # a NaN is in no range
            w, unit = _in_range(w)
            known = start(w)
        gram2 = norm2(known.a) if options.certificate else known.norm2
        solved = _by_route(w, known, seeds, options)
    if not options.certificate:
        return solved.x, None
    sigma2 = torch.where(known.norm2 > 0, known.sigma2, 0.0)  # routes divide by it: there it is 1 for a zero matrix
    nuclear = torch.linalg.vecdot(solved.x.flatten(1), w.flatten(1))
    values = [unit, known.norm2, gram2, sigma2, nuclear, solved.size2, solved.residual, solved.steps, solved.null]
    if not has_float64(w.device):
        values = to_host(values)
    *floats, residual, steps, null = values
    # Fourth powers of 1e30 are out of float32's range.
    scale, square, gram2, sigma2, nuclear, size2 = (value.double() for value in floats)
    return solved.x, Certificate(
        residual=residual,
        steps=steps,
        completed=null if options.complete else torch.zeros_like(null),
        converged=residual <= _reach(options.tol, w.dtype),
        norm=square.sqrt() * scale,
        gram_norm=gram2.sqrt() * scale.square(),
        spectral_norm=(sigma2 / arithmetic.HEADROOM).sqrt() * scale,
        nuclear=nuclear * scale,
        factor_norm=size2.sqrt(),
    )


def _by_route(w: Tensor, known: Start, seeds: Tensor, options: Options) -> Solved:
    """The one place that chooses: cheapest route first, float64 for what it marks as hard, SVD if all else fails.

    On a device without float64 the host solves what needs it.
    """
    _, n, m = w.shape
    device_only = has_float64(w.device)
    row = tuning()
    chooses = options.solver in ("auto", "fast")
    # "fast" repairs nothing of what `by_bulk` would mark as hard, so that it takes the whole spectrum along.
    pays = _small(w) and (options.solver != "fast" or n < row.gram_from)
    on_accelerator = w.device.type != "cpu" and w.dtype == torch.float32
    if options.solver == "paper":
        solved = Solved.new(routes.by_recipe(w, options.steps), options.steps)
    elif options.solver == "svd" or (options.solver in ("auto", "fast") and n <= row.svd_up_to):
        return routes.by_svd(w, complete=options.complete, seeds=seeds) if device_only else _on_host(w, seeds, options)
    elif options.solver == "products" or (chooses and (pays or on_accelerator)):
        solved = by_bulk(w, known, options.tol) if _in_bulk(w, options) else routes.by_products(w, known)
    elif options.solver == "gram" or (chooses and m >= WIDE * n):
        solved = routes.by_gram(w, known)
    elif options.solver == "fast" and n >= ONE_STEP_FROM and not bool((known.norm2 > FLAT * n * known.sigma2).any()):
        solved = routes.by_one_step(w, known)
    else:
        solved = routes.by_halley(w, known, routes.FLOOR[w.dtype])
    if options.solver not in CONVERGING:
        if options.certificate:
            arithmetic.measure(solved)
        return solved

    settings: dict[str, Any] = {"tol": options.tol, "complete": options.complete, "exact": options.certificate}
    settings["resolve_up_to"] = row.resolve_up_to if device_only else n
    if options.certificate or options.tol < arithmetic.CLOSE or bool(solved.residual.isnan().any()):
        arithmetic.settle(w, solved, known, seeds=seeds, last=False, **settings)
    if not device_only:
        left = (solved.hard | (solved.residual > _reach(options.tol, w.dtype))).nonzero().flatten()
        if len(left):
            solved.put(left, _on_host(w[left], seeds[left.cpu()], options))
        return solved
    hard = solved.hard.nonzero().flatten()
    if len(hard):
        some, start = w[hard], Start(known.a, known.sigma2[hard], known.norm2[hard])
        if m >= 2 * n:
            again = routes.by_eigh(some)
        else:
            lifted = routes.lift(some, start.sigma2).to(w.dtype)
            if _small(w):
                again = routes.by_products(lifted, arithmetic.start(lifted, estimate=False))
            else:
                again = routes.by_halley(lifted, arithmetic.start(lifted), routes.LIFTED)
                again.hard[:] = False
        arithmetic.settle(some, again, start, seeds=seeds[hard.cpu()], last=True, **settings)
        solved.put(hard, again)
    missed = (solved.residual > _reach(options.tol, w.dtype)).nonzero().flatten()
    if len(missed):
        solved.put(missed, routes.by_svd(w[missed], complete=options.complete, seeds=seeds[missed.cpu()]))
    return solved


def _on_host(w: Tensor, seeds: Tensor, options: Options) -> Solved:
    """The same matrices solved by the CPU, back on the device of `w`."""
    here = w.cpu()
    solved = _by_route(here, arithmetic.start(here), seeds, options)
    return Solved(*(getattr(solved, field.name).to(w.device) for field in fields(solved)))


def _small(w: Tensor) -> bool:
    """Whether polynomials pay; not in float64, where Halley steps go on to a spread of 1e8 and polynomials to 1000."""
    row, (_, n, m) = tuning(), w.shape
    side = m >= WIDE * n and n >= row.gram_from
    return n <= row.products_up_to and not side and w.dtype == torch.float32


def _in_bulk(w: Tensor, options: Options) -> bool:
    """Whether the polynomials are those of `by_bulk`."""
    return w.device.type == "cpu" and w.shape[1] <= MOST and w.dtype == torch.float32 and options.solver != "fast"


def _reach(tol: float, dtype: torch.dtype) -> float:
    """The residual that counts as converged: the tolerance, or what rounding allows if that is more."""
    return max(tol, routes.ROUNDING[dtype])


def _in_range(w: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices of extreme scale brought near 1 by a power of two, since fourth powers are to fit into float32."""
    top = w.abs().amax((1, 2))
    if not bool(torch.isfinite(top).all()):
        raise NotFinite("a matrix is not finite: it has a NaN or an infinity in it")
    extreme = (top > 0) & ((top < 1e-7) | (top > 1e7))
    if not bool(extreme.any()):
        return w, torch.ones_like(top)
    exponent = torch.where(extreme, torch.frexp(top).exponent, 0)
    half = exponent // 2  # in two factors, because 2^149 cannot be had as one float32
    scaled = torch.ldexp(torch.ldexp(w, -half[:, None, None]), (half - exponent)[:, None, None])
    return scaled, torch.ldexp(to_float64(torch.ones_like(top)), exponent if has_float64(w.device) else exponent.cpu())


def _wide(w: Tensor) -> Tensor:
    """(count, out, in) with the smaller side first."""
    return w if w.shape[1] <= w.shape[2] else w.mT


def _seeds(seed: int, members: list[int], sources: Sequence[Source]) -> Tensor:
    """A different seed for every matrix, so that two dead experts do not become identical.

    Thousands of small matrices in one tensor are numbered at once: one by one would cost as much as four products.
    """
    first, alone = _seed(seed, members[0], 0), sources[members[0]]
    if len(members) == 1 and alone.numbers is None and first + 127 * alone.shape[0] < 2**63 - 1:
        return torch.arange(alone.shape[0], dtype=torch.int64).mul_(127).add_(first)
    numbers = [sources[i].numbers or [(i, j) for j in range(sources[i].shape[0])] for i in members]
    return torch.tensor([_seed(seed, *number) for each in numbers for number in each], dtype=torch.int64)


def _seed(seed: int, source: int, matrix: int) -> int:
    return (seed * 1_000_003 + source * 8_191 + matrix * 127 + 1) % (2**63 - 1)


def checked_options(
    solver: str, tol: float, steps: int | None, complete: bool, seed: int, certificate: bool
) -> Options:
    """The keywords of `polar`, or an error that says what is wrong with one."""
    if solver not in get_args(Solver):
        raise ValueError(f"{argument('solver', solver)} is not one of {', '.join(map(repr, get_args(Solver)))}")
    if not 0 <= tol < 1:
        raise ValueError(f"tol={tol!r} must be at least 0 and below 1 (it bounds DfI/k; 0 asks for the rounding floor)")
    if steps is not None and solver != "paper":
        raise ValueError(f'steps={steps!r} belongs to solver="paper"; solver={solver!r} takes as many as it needs')
    if steps is not None and steps < 0:
        raise ValueError(f"steps={steps!r} must not be negative")
    return Options(cast(Solver, solver), tol, 10 if steps is None else steps, complete, seed, certificate)


class NotFinite(ValueError):
    """A matrix has a NaN or an infinity in it."""
