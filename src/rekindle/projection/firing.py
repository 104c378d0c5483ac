"""FIRE: every planned weight matrix is replaced by its nearest isometry, scaled.

`fire` is the verb for a live model: plan, check everything, solve and write (`execution`), reset what the optimizer
keeps of the old weights, and say what happened, all inside one transaction.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, TypeVar, Unpack, cast

from torch import Tensor, nn

from rekindle.blocks.finding import Block
from rekindle.blocks.names import unwrapped
from rekindle.engine.devices import callers_device, full_precision
from rekindle.engine.solving import Solver, Solving
from rekindle.isolation import outputs, relative_change
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.execution import PlanExecution, Solved, blended, check_options, solved_blocks
from rekindle.projection.keywords import Planning
from rekindle.projection.planning import Plan, draft
from rekindle.projection.recalibration import recalibrated, training_layers
from rekindle.projection.receipt import Measuring, Meter, Receipt
from rekindle.projection.sharded import ShardedExecution, refuse_partitioned
from rekindle.projection.snapshots import Restore, snapshot_of
from rekindle.projection.stores import LiveStore
from rekindle.projection.transaction import Transaction
from rekindle.recording.invariance import norms_behind
from rekindle.sharding.passes import passes
from rekindle.sharding.team import Team, distributed, opened, partitioned, settle
from rekindle.sharding.zero import shown

Verb = TypeVar("Verb", bound=Callable[..., Receipt])


def _on_partitions(verb: Verb) -> Verb:
    """Wraps a verb: it is called while the parameters of DeepSpeed ZeRO look like shards."""

    @wraps(verb)
    def call(model: object, optimizer: object = None, **options: object) -> Receipt:
        if not (isinstance(model, nn.Module) and partitioned(model)):
            return verb(model, optimizer, **options)
        refuse_partitioned(options)
        with shown(model, optimizer) as inside:
            return verb(model, inside, **options)

    return cast(Verb, call)


@_on_partitions
def fire(
    model: nn.Module,
    optimizer: object = None,
    *,
    plan: Plan | None = None,
    strength: float = 1.0,
    solver: Solver | Solving = "auto",
    optimizer_state: str = "fresh",
    mirrors: nn.Module | Iterable[nn.Module] = (),
    biases: Literal["keep", "zero"] = "keep",
    measure: Measuring = "cheap",
    atomic: bool = False,
    recalibrate: Iterable[Any] | None = None,
    drift: Iterable[Any] | None = None,
    guard: Any = None,
    **planning: Unpack[Planning],
) -> Receipt:
    """Replace the targeted weight matrices W of `model` by s·Q, Q the nearest isometry, in place.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> receipt = fire(model, torch.optim.Adam(model.parameters()))
    >>> receipt.changed
    ('0.weight', '2.weight', '4.weight')
    >>> w = model[0].weight  # nothing is normalized: variance 2/8, as of a He start
    >>> torch.allclose(w.T @ w, 16 * 2 / 8 * torch.eye(8), atol=1e-3)
    True

    Everything that can be checked is checked before the first write. A failure or Ctrl-C after it raises `MethodError`,
    whose `receipt` names what had been changed; with `guard=` or `atomic=True` everything is put back first.

    The defaults are the best single choice of the factorial (docs/evidence/fitting.md): the output layer included, at
    He's norm, and at the paper's scale in a model that normalizes its activations. `targets="auto"` leaves the output
    layer as it is, `scale="paper"` is the paper's. The function that the network computes changes either way.

    Args:
        model: any module; its parameters keep their objects and their memory.
        optimizer: one, a list, or accelerate's or lightning's wrapper.
        plan: a plan to execute exactly, instead of the keywords of `rekindle.plan` (targets, scale, include, exclude,
            heads, …), which make one. A `Health` as `targets` means the layers that it names.
        strength: t in (0, 1]: W ← (1 − t)·W + t·s·Q.
        solver: its name, or a dict with the options of `rekindle.polar` (solver, tol, steps, complete, seed). A matrix
            that misses `tol` is solved again by float64 SVD, unless the number of steps was asked for.
        optimizer_state: what happens to the state of changed parameters: "fresh", "moments", "step" or "none", see
            `rekindle.optimizers.reset`.
        mirrors: target or EMA networks that get the same weights, matched by name.
        biases: "zero" also zeroes the biases of the projected layers (a ReLU that is dead by its bias survives FIRE).
        measure: "cheap" takes the receipt's numbers from the solver's own products, "full" adds spectra and ranks,
            "none" leaves them out.
        atomic: keep a copy of everything that changes and put it back if anything fails.
        recalibrate: batches for new BatchNorm statistics, see `rekindle.projection.recalibration`.
        drift: batches on which the receipt says how far the model's outputs moved.
        guard: a `rekindle.Guard`, which takes everything back if the loss on its batches rises too much.
        planning: the keywords of `rekindle.plan`.
    """
    meter = Meter()
    with full_precision():
        check_model(model, optimizer)
        team, spreads = opened(model)
        # With copies (DDP) planning needs no communication; a plan of shards does.
        sharded = bool(spreads) and bool(distributed(model, copies=False)[1])
        with team.together():
            check_planning(planning)
            check_options(strength, measure)
            if plan is not None and planning:
                raise ValueError("plan= already holds targets, scale and the like: pass either the plan or those")
            if plan is None and not sharded:
                plan = draft(model, sharded=False, **planning)
        plan = draft(model, **planning) if plan is None else plan
        solving: Solving = {"solver": solver} if isinstance(solver, str) else solver
        with team.together():
            store = LiveStore(model, plan.selected, mirrors=mirrors, biases=biases)
            plan, solved = _without_refused(plan, store, strength, solving)
            changing = store.parameters([entry.name for entry in plan.selected])
            checked = optimizers.check(optimizer, changing, optimizer_state)
        options: dict[str, Any] = {
            "strength": strength,
            "measure": measure,
            "solved": solved,
            "meter": meter,
            **solving,
        }
        execution: PlanExecution | ShardedExecution
        if spreads:
            execution = ShardedExecution(team, plan, store, store.spreads(spreads), **options)
            execution.check({"biases": biases, "drift": drift is not None, "optimizer_state": optimizer_state})
        else:
            execution = PlanExecution(plan, store, **options)
        answers = None if drift is None else _Drift(model, drift, team)
        watch: Transaction | None = None if guard is None else guard.watch(model, optimizer, also=store.mirrors)
        if answers is not None or watch is not None:
            settle(model)  # a forward pass leaves modules of FSDP2 unsharded

        def so_far(error: BaseException) -> Receipt | None:
            done = execution.so_far(error)
            return None if done is None else _finished(done, plan, store, checked, optimizer, optimizer_state)

        if watch is None:
            restore = _copied(model, optimizer, store, recalibrate is not None) if atomic else None
            watch = Transaction("fire", (model, *store.mirrors), optimizer, restore=restore, so_far=so_far)
    with watch, full_precision():
        receipt = execution.run()
        receipt = _finished(receipt, plan, store, checked, optimizer, optimizer_state)
        sizes = _changed_sizes(model, receipt, plan)
        if recalibrate is not None:
            receipt = recalibrated(model, recalibrate, receipt, team)
        moved = None if answers is None else answers.moved()
        settings = {**receipt.settings, "optimizer_state": optimizer_state, "biases": biases, "atomic": atomic}
        told: dict[str, Any] = {"settings": settings, "notes": (*receipt.notes, *sizes), "outputs_moved": moved}
        return watch.settle(replace(receipt, **told, **meter.cost()))


def _changed_sizes(model: nn.Module, receipt: Receipt, plan: Plan) -> list[str]:
    """A warning where weights became more than twice or less than half as large and no normalization follows them.

    A CNN without normalization learns no better than with no remedy then (docs/evidence/fitting.md).
    """
    norms: dict[str, tuple[float, float]] = {}
    for record in receipt.records:
        if record.norm_before and record.norm_after:
            before, after = norms.get(record.name, (0.0, 0.0))
            norms[record.name] = (math.hypot(before, record.norm_before), math.hypot(after, record.norm_after))
    ratios = {name: after / before for name, (before, after) in norms.items()}
    far = {name: ratio for name, ratio in ratios.items() if not 0.5 <= ratio <= 2.0}
    behind = norms_behind(unwrapped(model)) if far else {}
    far = {name: ratio for name, ratio in far.items() if name.removesuffix(".weight") not in behind}
    if not far:
        return []
    name = max(far, key=lambda each: abs(math.log(far[each])))
    others = f", and {len(far) - 1} more weights changed by more than a factor of 2" if len(far) > 1 else ""
    start = "these are" if str(plan.scale) == "init:kaiming" else 'scale="init:kaiming" gives'
    return [
        f"the norm of {name} became {far[name]:.2g} times what it was{others}: no normalization follows, so signals "
        f'change as much. {start} the norms of a He start, scale="norm" keeps those that were there'
    ]


def _without_refused(
    plan: Plan, store: LiveStore, strength: float, solving: Solving
) -> tuple[Plan, dict[tuple[str, Block], Solved]]:
    """Leave out parametrized weights that cannot hold their isometry (tested on a copy), and duplicates.

    The second value has the solutions of those that can, so that each is solved once.
    """
    reasons = {name: f"shares its memory with {owner}, treated there" for name, owner in store.twice().items()}
    work = [(e, block) for e in plan.selected if e.parametrized and e.name not in reasons for block in e.blocks]
    solved = {(work[i][0].name, work[i][1]): one for i, one in solved_blocks(store, work, solving)} if work else {}
    for entry in dict.fromkeys(entry for entry, _ in work):
        value = store.read(entry).clone()
        for block in entry.blocks:
            factors, certificate, _ = solved[entry.name, block]
            scale = plan.scale_values(entry, block, norm=certificate.norm, nuclear=certificate.nuclear).to(factors)
            block.write(value, blended(factors.clone(), scale, block.read(value), strength))
        reason = store.trial(entry, value)
        if reason is not None:
            reasons[entry.name] = reason
    if reasons and len(reasons) == len(plan.selected):
        raise ValueError("nothing is left to project. " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))
    if not reasons:
        return plan, solved
    entries = tuple(replace(e, refusal=reasons[e.name]) if e.name in reasons else e for e in plan.entries)
    return replace(plan, entries=entries), solved


def check_model(model: object, optimizer: object = None) -> None:
    """Raise unless this is a model whose weights can be changed."""
    if not isinstance(model, nn.Module):
        if isinstance(optimizer, nn.Module):
            raise TypeError("the order is (model, optimizer): rekindle.fire(model, optimizer)")
        if inspect.isgenerator(model):
            raise TypeError(
                "fire() takes the model, got a generator (its parameters?): the order is (model, optimizer)"
            )
        what = "a state dict" if isinstance(model, Mapping) else type(model).__name__
        raise TypeError(
            f"fire() changes an nn.Module in place, got {what}; the order is (model, optimizer). Load a state dict "
            "into its model first (load_state_dict), or project a file: rekindle.checkpoint.fire_file(path, new_path)"
        )
    if any(True for _ in model.parameters()) and all(p.is_meta for p in model.parameters()):
        raise ValueError(f"{type(model).__name__} is on the meta device: load the weights first")


def check_planning(planning: Mapping[str, Any]) -> None:
    """Raise for a keyword that `fire` does not have."""
    for name in planning.keys() - Planning.__annotations__.keys():
        close = difflib.get_close_matches(name, {*Planning.__annotations__, *fire.__annotations__} - {"return"}, 1)
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"fire() got an unexpected keyword argument {name!r}{hint}")


def _finished(
    receipt: Receipt,
    plan: Plan,
    store: LiveStore,
    states: Sequence[optimizers.Checked],
    optimizer: object,
    policy: str,
) -> Receipt:
    """Reset the optimizer slots and drop the gradients of what was really changed."""
    changed, zeroed, cleared = store.tidy(receipt.changed)
    keys = {entry.name: entry.key for entry in plan.entries}
    notes = receipt.notes
    if optimizer is None:
        notes = (*notes, "no optimizer was given: what one keeps for the changed weights, if there is any, is stale")
    return replace(
        receipt,
        skipped={name: why for name, why in receipt.skipped.items() if keys.get(name) not in zeroed},
        optimizer=None if optimizer is None else optimizers.start_over(states, changed, policy),
        gradients_cleared=cleared,
        biases_zeroed=store.biases_zeroed,
        mirrors=len(store.mirrors),
        notes=notes,
    )


def _copied(model: nn.Module, optimizer: object, store: LiveStore, statistics: bool) -> Restore:
    """A copy of everything that `fire` may change."""
    layers: Sequence[nn.Module] = list(training_layers(model).values()) if statistics else []
    return snapshot_of((*store.written(), *(buffer for layer in layers for buffer in layer.buffers())), optimizer)


class _Drift:
    """How far a model's outputs on some batches move."""

    def __init__(self, model: nn.Module, batches: Iterable[Any], team: Team) -> None:
        self._model, self._team = model, team
        with passes(model, team):  # reading may fail on one process
            self._batches = list(batches)
        self._before = self._answers()

    def moved(self) -> float:
        return relative_change(self._before, self._answers())

    def _answers(self) -> list[Tensor]:
        with passes(self._model, self._team), callers_device():
            return outputs(self._model, self._batches)
