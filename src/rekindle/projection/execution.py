"""Carrying out a plan on a store: every block is read, solved and written, so that one chunk of solutions is in memory.

A live model, the assembled shards of a distributed one and a checkpoint file are stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Unpack, get_args

import torch
from torch import Tensor

from rekindle.blocks.finding import Block
from rekindle.engine.devices import full_precision, to_host
from rekindle.engine.isometry import by_svd_again
from rekindle.engine.solving import CONVERGING, Certificate, Solving, Source, solve
from rekindle.projection.entries import PlanEntry
from rekindle.projection.measuring import measured, observed
from rekindle.projection.planning import Plan
from rekindle.projection.receipt import Measuring, Meter, PendingRecord, Receipt, records
from rekindle.projection.stores import Store

# A block that is solved: its factors, their certificate, how many the SVD had to solve.
Solved = tuple[Tensor, Certificate, int]
# (block, matrix) of the whole job for each matrix of a block: what the seeds of completed directions come from.
Numbers = Sequence[tuple[int, int]]


@full_precision()
def execute(plan: Plan, store: Store, **options: Unpack[ExecutionOptions]) -> Receipt:
    """Carry out a plan on a store.

    >>> from torch import nn
    >>> from rekindle.projection.planning import plan
    >>> from rekindle.projection.stores import LiveStore
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    >>> dry = plan(model, exclude="1")
    >>> execute(dry, LiveStore(model, dry.selected)).changed
    ('0.weight',)
    """
    return PlanExecution(plan, store, **options).run()


class ExecutionOptions(Solving, total=False):
    """What `PlanExecution` takes: how to solve, and its own options."""

    strength: float
    measure: Measuring
    solved: Mapping[tuple[str, Block], Solved] | None
    numbers: Mapping[tuple[str, Block], Numbers] | None
    meter: Meter | None


class PlanExecution:
    """A plan being carried out; `receipt()` is that of the blocks written so far.

    strength, and how to solve: as in `rekindle.fire`.
    solved: blocks that are solved already, by the entry's name and the block.
    numbers: the numbers of matrices, by the entry's key and the block, where this plan is a part of a larger one.
    meter: what time and memory are counted from, if that is not now.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        *,
        strength: float = 1.0,
        measure: Measuring = "cheap",
        solved: Mapping[tuple[str, Block], Solved] | None = None,
        numbers: Mapping[tuple[str, Block], Numbers] | None = None,
        meter: Meter | None = None,
        **solving: Unpack[Solving],
    ) -> None:
        check_options(strength, measure)
        self.plan, self.store, self.strength, self.measure = plan, store, strength, measure
        self._solved, self._numbers, self._meter = solved or {}, numbers, meter or Meter()
        self._solving = solving
        self._work = [(entry, block) for entry in plan.selected for block in entry.blocks]
        self._written: dict[int, PendingRecord] = {}
        self._skipped: dict[str, str] = {}
        self._notes: dict[str, None] = {}

    def run(self) -> Receipt:
        """Solve and write; the receipt."""
        ahead = [index for index, (entry, block) in enumerate(self._work) if (entry.name, block) in self._solved]
        rest = [index for index in range(len(self._work)) if index not in set(ahead)]
        # Reads and checks every weight before the first write.
        solutions = solved_blocks(self.store, [self._work[index] for index in rest], self._solving, self._numbers)
        for index in ahead:
            entry, block = self._work[index]
            self._write(index, self._solved[entry.name, block])
        for place, solved in solutions:
            self._write(rest[place], solved)
            del solved  # or it would stay in memory while the next one is solved
        return self.receipt()

    @property
    def places(self) -> list[int]:
        """Which blocks of the plan the records of the receipt are of."""
        return sorted(self._written)

    def so_far(self, error: BaseException) -> Receipt | None:
        """The receipt of what was written before this error, None if nothing was."""
        return self.receipt() if self._written else None

    def receipt(self) -> Receipt:
        """What has been written."""
        written = [self._written[place] for place in self.places]
        return Receipt(
            "fire",
            records(written, self.strength, self.measure),
            {**self.plan.reasons(), **self._skipped},
            {
                "targets": self.plan.targets,
                "scale": str(self.plan.scale),
                "strength": self.strength,
                **DEFAULTS,
                **self._solving,
            },
            notes=tuple(self._notes),
            **self._meter.cost(),
        )

    def _write(self, index: int, solved: Solved) -> None:
        plan, store, (entry, block) = self.plan, self.store, self._work[index]
        factors, certificate, fallback = solved
        scale = plan.scale_values(entry, block, norm=certificate.norm, nuclear=certificate.nuclear).to(factors.dtype)
        there = scale.to(factors.device)
        kept = certificate.norm < plan.min_norm
        if bool(kept.all()):
            self._skipped[label(entry, block)] = too_small(plan)
            store.write(entry, block, block.read(store.read(entry)))  # a file is not whole without it
            return
        some = bool(kept.any())
        blends = self.strength != 1 or some
        old = factors.new_empty(0)  # reading the matrices of a convolution copies them: only where they are needed
        if self.measure == "full" or blends:
            old = block.read(store.read(entry)).clone()
        largest = float(scale.max())
        if largest > torch.finfo(entry.dtype).max:
            raise ValueError(f"{entry.name!r} is {entry.dtype} and cannot hold a scale of {largest:.3g}")
        matrices = blended(factors, there, old, self.strength)
        if some:
            mask = kept.to(factors.device)
            matrices[mask] = old[mask].to(matrices.dtype)
            self._notes[f"{int(kept.sum())} matrices of {entry.name} are zero and were not changed (min_norm)"] = None
        written = store.write(entry, block, matrices)
        stored = store.read(entry) if written is None else written
        exact = stored.dtype == factors.dtype and not blends and not entry.parametrized
        converged = bool(certificate.converged.all())
        now = matrices if exact and self.measure != "full" else block.read(stored)
        # What is stored exactly is s·Q up to the rounding of one float32 product: the certificate is enough.
        asked = self.measure != "none" and not (exact and converged)
        seen = observed(now, there, converged) if asked else None
        full = measured(old, now, there) if self.measure == "full" else None
        self._written[index] = PendingRecord(
            entry.name, block, certificate, scale, kept if some else None, seen, full, fallback
        )


def label(entry: PlanEntry, block: Block) -> str:
    """What a receipt calls a block that is skipped."""
    return f"{entry.name}[{block.part}]" if block.part else entry.name


def too_small(plan: Plan) -> str:
    """Why a matrix that is nearly zero is skipped."""
    return f"norm below min_norm ({plan.min_norm:g}): a zero weight is taken as intended"


DEFAULTS: Solving = {"solver": "auto", "tol": 1e-6, "steps": None, "complete": True, "seed": 0}


def solved_blocks(
    store: Store,
    work: Sequence[tuple[PlanEntry, Block]],
    solving: Solving,
    numbers: Mapping[tuple[str, Block], Numbers] | None = None,
) -> Iterator[tuple[int, Solved]]:
    """The polar factors of these blocks as they come, all weights checked before the first of them."""
    exact = solving.get("solver", "auto") in CONVERGING  # the other solvers guarantee no tolerance
    sources, turned = [], []
    totals: dict[int, Tensor] = {}
    weight, last = torch.empty(0), None
    for index, (entry, block) in enumerate(work):
        if entry is not last:
            weight, last = store.read(entry), entry
            totals[index] = _total(weight)
        turned.append(_turned(block, weight))
        shape = (block.count, block.out, block.in_)
        drawn = numbers.get((entry.key, block)) if numbers else None
        read = _reader(store, entry, block, turned[-1])
        sources.append(Source(shape, weight.dtype, weight.device, read, drawn))
    del weight
    for index, total in zip(totals, to_host(list(totals.values())), strict=True):  # one wait for all of them
        if not bool(total.isfinite()):
            entry = work[index][0]
            check_finite(entry.name, store.read(entry))

    def solutions() -> Iterator[tuple[int, Solved]]:
        for index, factors, certificate in solve(sources, **solving):
            fallback = 0
            factors = factors.mT if turned[index] else factors
            if exact and not bool(certificate.converged.all()):
                entry, block = work[index]
                fallback = int((~certificate.converged).sum())
                matrices = block.read(store.read(entry))
                tol = solving.get("tol", DEFAULTS["tol"])
                factors, certificate = by_svd_again(entry.name, matrices, factors, certificate, tol)
            yield index, (factors, certificate, fallback)

    return solutions()


def blended(factors: Tensor, scale: Tensor, old: Tensor, strength: float) -> Tensor:
    """(1 − t)·W + t·s·Q, written over Q."""
    matrices = factors.mul_(strength * scale[:, None, None])
    return matrices if strength == 1 else matrices.add_(old.to(matrices.dtype), alpha=1 - strength)


def _reader(store: Store, entry: PlanEntry, block: Block, turned: bool) -> Callable[[], Tensor]:
    """What the solver reads. A square block that lies transposed in memory is solved so: nothing has to be moved."""

    def read() -> Tensor:
        matrices = block.read(store.read(entry))
        if turned:
            return matrices.mT
        if block.count > 1:
            return matrices
        # The solver wants the smaller side first, which may be how the weight lies. If not, one matrix is moved here:
        # torch transposes 2-D tensors twice as fast as batches of one.
        wide = matrices[0] if block.out <= block.in_ else matrices[0].mT
        wide = wide.contiguous()
        return (wide if block.out <= block.in_ else wide.mT)[None]

    return read


def _turned(block: Block, weight: Tensor) -> bool:
    if block.out != block.in_ or block.count > 1:
        return False
    strides = block.read(weight).stride()
    return strides[-2] < strides[-1]


def check_options(strength: float, measure: str) -> None:
    """Raise for a value that these options cannot have."""
    if not 0 < strength <= 1:
        raise ValueError(f"strength={strength} is outside (0, 1]: 1 is the isometry, smaller keeps a share of W")
    if measure not in get_args(Measuring):
        raise ValueError(f"measure={measure!r} is not one of {', '.join(map(repr, get_args(Measuring)))}")


def check_finite(name: str, value: Tensor) -> None:
    """Raise if a weight holds NaN or Inf.

    >>> check_finite("fc.weight", torch.tensor([1.0, float("nan")]))
    Traceback (most recent call last):
    ValueError: 'fc.weight' holds 1 NaN or Inf of 2: nothing was changed
    """
    if not bool(_total(value).isfinite()) and not bool(value.isfinite().all()):
        broken = int((~value.isfinite()).sum())
        raise ValueError(f"{name!r} holds {broken} NaN or Inf of {value.numel()}: nothing was changed")


def _total(value: Tensor) -> Tensor:
    # NaN and Inf survive a sum; the sum of finite values overflows at worst, and then the slow check decides.
    return value.sum(dtype=value.dtype if value.dtype == torch.float64 else torch.float32)
