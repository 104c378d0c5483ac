"""FIRE: every planned weight matrix is replaced by its nearest isometry, scaled.

`fire` is the verb for a live model: plan, check everything, solve and write, tidy the optimizer, say what happened.
`execute` is its middle, and all that a store other than a live model needs: it reads, solves and writes block after
block, so that no more than a chunk of solutions is ever in memory.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from rekindle.blocks.finding import Block, Found
from rekindle.engine.arithmetic import callers_device, full_precision, to_host
from rekindle.engine.isometry import by_svd_again
from rekindle.engine.solving import CONVERGING, Certificate, Solver, Solving, Source, solve
from rekindle.isolation import outputs, relative_change
from rekindle.optimizers import resetting as optimizers
from rekindle.optimizers.snapshots import snapshot
from rekindle.projection.measuring import measured, observed
from rekindle.projection.method import MethodError
from rekindle.projection.planning import Plan
from rekindle.projection.planning import plan as make_plan
from rekindle.projection.recalibration import recalibrated, training_layers
from rekindle.projection.receipt import Measuring, Meter, PendingRecord, Receipt, records
from rekindle.projection.sharded import Numbers, ShardedFire, refuse_partitioned
from rekindle.projection.stores import LiveStore, Store
from rekindle.sharding.passes import passes
from rekindle.sharding.team import SOLO, distributed, opened, partitioned, settle
from rekindle.sharding.zero import shown

__all__ = ["LiveStore", "Store", "check_finite", "execute", "fire"]

Verb = TypeVar("Verb", bound=Callable[..., Receipt])


def _on_partitions(verb: Verb) -> Verb:
    """Wraps a verb: it is called while the parameters of DeepSpeed ZeRO look like shards."""

    @wraps(verb)
    def call(model: Any, optimizer: Any = None, **options: Any) -> Receipt:
        if not (isinstance(model, nn.Module) and partitioned(model)):
            return verb(model, optimizer, **options)
        refuse_partitioned(options)
        with shown(model, optimizer) as inside:
            return verb(model, inside, **options)

    return cast(Verb, call)


@_on_partitions
@full_precision()
def fire(
    model: nn.Module,
    optimizer: Any = None,
    *,
    targets: Any = "auto",
    scale: str | float = "paper",
    strength: float = 1.0,
    solver: Solver = "auto",
    tol: float = 1e-6,
    steps: int | None = None,
    complete: bool = True,
    seed: int = 0,
    optimizer_state: str = "fresh",
    mirrors: nn.Module | Iterable[nn.Module] = (),
    biases: Literal["keep", "zero"] = "keep",
    measure: Measuring = "cheap",
    atomic: bool = False,
    recalibrate: Iterable[Any] | None = None,
    batches: Iterable[Any] | None = None,
    plan: Plan | None = None,
    guard: Any = None,
    **planning: Any,
) -> Receipt:
    """Replace the targeted weight matrices W of `model` by s·Q, Q the nearest isometry, in place.

    optimizer: one, a list, or accelerate's or lightning's wrapper; the state of changed parameters is treated as
        `optimizer_state` says: "fresh", "moments", "step" or "none" (`rekindle.optimizers.reset`).
    targets, scale and further keywords (include, exclude, heads, split_heads, …) make the plan, see
        `rekindle.plan`; or pass one with `plan=` and it is executed exactly. A `Health` as targets means the layers
        that it names.
    strength: t in (0, 1]: W ← (1 − t)·W + t·s·Q.
    solver, tol, steps, complete, seed: see `rekindle.polar`. A matrix that misses `tol` is solved again by float64
        SVD, unless the number of steps was asked for.
    mirrors: target or EMA networks that get the same weights, matched by name.
    biases: "zero" also zeroes the biases of the projected layers (a ReLU that is dead by its bias survives FIRE).
    measure: "cheap" takes the receipt's numbers from the solver's own products, "full" adds spectra and ranks.
    atomic: keep a copy of everything that changes and put it back if anything fails.
    recalibrate: batches for new BatchNorm statistics, see `rekindle.projection.recalibration`.
    batches: the receipt then says how far the model's outputs on them moved.
    guard: a `rekindle.Guard`, which takes everything back if the loss on its batches rises too much.

    Everything that can be checked is checked before the first write. A failure after it raises `MethodError`, whose
    `receipt` says what had been changed; with `guard=` or `atomic=True` everything is put back first.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> receipt = fire(model, torch.optim.Adam(model.parameters()))
    >>> receipt.changed
    ('0.weight', '2.weight')
    >>> w = model[0].weight
    >>> torch.allclose(w.T @ w, 16 / 8 * torch.eye(8), atol=1e-3)
    True
    """
    meter = Meter()
    check_model(model)
    team, spreads = opened(model)
    # With copies (DDP) planning needs no communication; a plan of shards does.
    apart = SOLO if distributed(model, copies=False)[1] else team
    with team.together():
        check_call(planning)
        check_options(strength, measure)
        if plan is not None and (planning or targets != "auto" or scale != "paper"):
            raise ValueError("plan= already holds targets, scale and the like: pass either the plan or those")
    if plan is None:
        with apart.together():
            plan = make_plan(model, targets=targets, scale=scale, measure=False, trial=False, **planning)
    solving: Solving = {"solver": solver, "tol": tol, "steps": steps, "complete": complete, "seed": seed}
    with team.together():
        store = LiveStore(model, plan.selected, mirrors=mirrors, biases=biases)
        plan, solved = _without_refused(plan, store, strength, solving)
        changing = store.parameters([entry.name for entry in plan.selected])
        checked = optimizers.check(optimizer, changing, optimizer_state)
    states = None if optimizer is None else checked
    carry_out: Callable[..., Receipt] = partial(execute, plan, store, meter=meter)
    if spreads:
        sharded = ShardedFire(team, plan, store.spreads(spreads), store.tensors(), plan.reasons())
        call = {**solving, "strength": strength, "biases": biases, "measure": measure, "batches": batches is not None}
        sharded.check(check_finite, store, {**call, "optimizer_state": optimizer_state})
        carry_out = partial(sharded.execute, execute, store)
    before = None
    if batches is not None:
        with passes(model, team):
            batches = list(batches)
            before = _answers(model, batches)
    watch = guard.watch(model, optimizer, also=store.mirrors) if guard is not None else None
    if before is not None or watch is not None:
        settle(model)  # a forward pass leaves modules of FSDP2 unsharded
    restore = watch.restore if watch is not None else None  # a guard has copied everything
    if restore is None and atomic:
        restore = _snapshot(model, optimizer, store, recalibrate is not None)
    try:
        try:
            receipt = carry_out(strength=strength, measure=measure, solved=solved, **solving)
        except MethodError as error:
            error.receipt = _finish(error.receipt, plan, store, states, optimizer_state)
            raise
        receipt = _finish(receipt, plan, store, states, optimizer_state)
        if recalibrate is not None:
            receipt = recalibrated(model, recalibrate, receipt, team)
        if before is not None:
            with passes(model, team):
                receipt = replace(receipt, outputs_moved=relative_change(before, _answers(model, batches or ())))
        settings = {**receipt.settings, "optimizer_state": optimizer_state, "biases": biases, "atomic": atomic}
        receipt = replace(receipt, settings=settings, **meter.cost())
        return receipt if watch is None else watch.settle(receipt)
    except BaseException as error:
        if restore is not None:
            restore()
            if isinstance(error, MethodError):
                raise MethodError(f"{error}; everything was put back", Receipt("fire")) from error
        raise


# A block that was solved in advance: its factors, their certificate, how many the SVD had to solve.
Solved = tuple[Tensor, Certificate, int]


@full_precision()
def execute(
    plan: Plan,
    store: Store,
    *,
    strength: float = 1.0,
    solver: Solver = "auto",
    tol: float = 1e-6,
    steps: int | None = None,
    complete: bool = True,
    seed: int = 0,
    measure: Measuring = "cheap",
    solved: Mapping[tuple[str, Block], Solved] | None = None,
    numbers: Mapping[tuple[str, Block], Numbers] | None = None,
    meter: Meter | None = None,
) -> Receipt:
    """Carry out a plan on a store; the parameters are those of `fire`. `solved` holds blocks that are solved already.

    numbers: (key, block) → (block, matrix) of the whole job for each matrix, where this plan is a part of a larger one.
    meter: what time and memory are counted from, if that is not now.

    >>> from rekindle.projection.planning import plan
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    >>> dry = plan(model)
    >>> execute(dry, LiveStore(model, dry.selected)).changed
    ('0.weight',)
    """
    meter = meter or Meter()
    check_options(strength, measure)
    solving: Solving = {"solver": solver, "tol": tol, "steps": steps, "complete": complete, "seed": seed}
    work = [(entry, block) for entry in plan.selected for block in entry.blocks]
    known = solved or {}
    written: dict[int, PendingRecord] = {}
    notes: list[str] = []

    def receipt() -> Receipt:
        return Receipt(
            "fire",
            records([written[index] for index in sorted(written)], strength, measure),
            plan.reasons(),
            {"targets": plan.targets, "scale": str(plan.scale), "strength": strength, **solving},
            notes=tuple(dict.fromkeys(notes)),
            **meter.cost(),
        )

    open_ = [index for index, (entry, block) in enumerate(work) if (entry.name, block) not in known]
    solutions = _solutions(store, [work[index] for index in open_], solving, numbers)  # reads and checks every weight
    try:
        for index, (entry, block) in enumerate(work):
            if (entry.name, block) in known:
                written[index] = _write(plan, store, entry, block, known[entry.name, block], strength, measure, notes)
        for place, found in solutions:
            entry, block = work[open_[place]]
            written[open_[place]] = _write(plan, store, entry, block, found, strength, measure, notes)
            del found  # or it would stay in memory while the next one is solved
    except Exception as error:
        if not written:
            raise
        raise MethodError(f"stopped after {len(written)} of {len(work)} blocks: {error}", receipt()) from error
    return receipt()


def _solutions(
    store: Store,
    work: Sequence[tuple[Found, Block]],
    solving: Solving,
    numbers: Mapping[tuple[str, Block], Numbers] | None = None,
) -> Iterator[tuple[int, Solved]]:
    """The polar factors of these blocks as they come, all weights checked before the first of them."""
    exact = solving["solver"] in CONVERGING  # the other solvers guarantee no tolerance
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

    def found() -> Iterator[tuple[int, Solved]]:
        for index, factors, certificate in solve(sources, **solving):
            fallback = 0
            factors = factors.mT if turned[index] else factors
            if exact and not bool(certificate.converged.all()):
                entry, block = work[index]
                fallback = int((~certificate.converged).sum())
                matrices = block.read(store.read(entry))
                factors, certificate = by_svd_again(entry.name, matrices, factors, certificate, solving["tol"])
            yield index, (factors, certificate, fallback)

    return found()


def _write(
    plan: Plan,
    store: Store,
    entry: Found,
    block: Block,
    solved: Solved,
    strength: float,
    measuring: Measuring,
    notes: list[str],
) -> PendingRecord:
    factors, certificate, fallback = solved
    scale = plan.scale_values(entry, block, norm=certificate.norm, nuclear=certificate.nuclear).to(factors.dtype)
    there = scale.to(factors.device)
    kept = certificate.norm < plan.min_norm
    some = bool(kept.any())
    blends = strength != 1 or some
    old = factors.new_empty(0)  # reading the matrices of a convolution copies them: only where they are needed
    if measuring == "full" or blends:
        old = block.read(store.read(entry)).clone()
    largest = float(scale.max())
    if largest > torch.finfo(entry.dtype).max:
        raise ValueError(f"{entry.name!r} is {entry.dtype} and cannot hold a scale of {largest:.3g}")
    matrices = _blended(factors, there, old, strength)
    if some:
        mask = kept.to(factors.device)
        matrices[mask] = old[mask].to(matrices.dtype)
        notes.append(f"{int(kept.sum())} matrices of {entry.name} are zero and were not changed (min_norm)")
    written = store.write(entry, block, matrices)
    stored = store.read(entry) if written is None else written
    exact = stored.dtype == factors.dtype and not blends and not entry.parametrized
    converged = bool(certificate.converged.all())
    now = matrices if exact and measuring != "full" else block.read(stored)
    # What is stored exactly is s·Q up to the rounding of one float32 product: the certificate is enough.
    asked = measuring != "none" and not (exact and converged)
    seen = observed(now, there, converged) if asked else None
    full = measured(old, now, there) if measuring == "full" else None
    return PendingRecord(entry.name, block, certificate, scale, kept, seen, full, fallback)


def _blended(factors: Tensor, scale: Tensor, old: Tensor, strength: float) -> Tensor:
    """(1 − t)·W + t·s·Q, written over Q."""
    matrices = factors.mul_(strength * scale[:, None, None])
    return matrices if strength == 1 else matrices.add_(old.to(matrices.dtype), alpha=1 - strength)


def _reader(store: Store, entry: Found, block: Block, turned: bool) -> Callable[[], Tensor]:
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


def _without_refused(
    plan: Plan, store: LiveStore, strength: float, solving: Solving
) -> tuple[Plan, dict[tuple[str, Block], Solved]]:
    """Leave out parametrised weights that cannot hold their isometry (tested on a copy), and duplicates.

    The second value has the solutions of those that can, so that each is solved once.
    """
    reasons = {name: f"shares its memory with {owner}, treated there" for name, owner in store.twice().items()}
    work = [(e, block) for e in plan.selected if e.parametrized and e.name not in reasons for block in e.blocks]
    solved = {(work[i][0].name, work[i][1]): found for i, found in _solutions(store, work, solving)} if work else {}
    for entry in dict.fromkeys(entry for entry, _ in work):
        value = store.read(entry).clone()
        for block in entry.blocks:
            factors, certificate, _ = solved[entry.name, block]
            scale = plan.scale_values(entry, block, norm=certificate.norm, nuclear=certificate.nuclear).to(factors)
            block.write(value, _blended(factors.clone(), scale, block.read(value), strength))
        reason = store.trial(entry, value)
        if reason is not None:
            reasons[entry.name] = reason
    if reasons and len(reasons) == len(plan.selected):
        raise ValueError("nothing is left to project. " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))
    if not reasons:
        return plan, solved
    entries = tuple(replace(e, refusal=reasons[e.name]) if e.name in reasons else e for e in plan.entries)
    return replace(plan, entries=entries), solved


def check_model(model: Any) -> None:
    """Raise unless this is a model whose weights can be changed."""
    if not isinstance(model, nn.Module):
        what = "a state dict" if isinstance(model, Mapping) else type(model).__name__
        raise TypeError(
            f"fire() changes an nn.Module in place, got {what}: load it into its model first "
            "(model.load_state_dict), or project a file with rekindle.checkpoint.fire_file(path, new_path)"
        )
    if any(True for _ in model.parameters()) and all(p.is_meta for p in model.parameters()):
        raise ValueError(f"{type(model).__name__} is on the meta device: load the weights first")


def check_call(planning: Mapping[str, Any]) -> None:
    """Raise for a keyword that neither `fire` nor `plan` has."""
    known = inspect.signature(make_plan).parameters.keys() if planning else ()
    for name in planning:
        if name not in known:
            mine = {*known, *inspect.signature(fire).parameters} - {"planning", "model"}
            close = difflib.get_close_matches(name, mine, 1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"fire() got an unexpected keyword argument {name!r}{hint}")


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


def _finish(
    receipt: Receipt, plan: Plan, store: LiveStore, states: Sequence[optimizers.Checked] | None, policy: str
) -> Receipt:
    """Make a written model whole: the optimizer slots and stale gradients of what was really changed."""
    changed, zeroed, cleared = store.tidy(receipt.changed)
    state = None if states is None else optimizers.start_over(states, changed, policy)
    keys = {entry.name: entry.key for entry in plan.entries}
    return replace(
        receipt,
        skipped={name: why for name, why in receipt.skipped.items() if keys.get(name) not in zeroed},
        optimizer=state,
        gradients_cleared=cleared,
        biases_zeroed=store.biases_zeroed,
        mirrors=len(store.mirrors),
    )


def _snapshot(model: nn.Module, optimizer: Any, store: LiveStore, statistics: bool) -> Callable[[], None]:
    layers: Sequence[nn.Module] = list(training_layers(model).values()) if statistics else []
    weights = store.snapshot(buffer for layer in layers for buffer in layer.buffers())
    state = snapshot(optimizer, store.parameters())

    def restore() -> None:
        weights()
        state()

    return restore


def _answers(model: nn.Module, batches: Iterable[Any]) -> list[Tensor]:
    with callers_device():
        return outputs(model, batches)
