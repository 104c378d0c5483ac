"""FIRE, the verb, as a method."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn

from rekindle.methods.call import Call
from rekindle.methods.remedy import Remedy
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.firing import check_call, check_model, check_options, fire
from rekindle.projection.method import Batch
from rekindle.projection.planning import Plan
from rekindle.projection.planning import plan as make_plan
from rekindle.projection.receipt import Measuring, Receipt
from rekindle.projection.stores import LiveStore


class FIRE(Remedy):
    """Frobenius-Isometry Reinitialization (Han et al., 2026): every targeted matrix becomes its nearest isometry.

    Takes the options of `rekindle.fire` (targets, scale, strength, solver, …). It needs no generator: `seed` is that of
    `rekindle.fire`, which completes matrices of deficient rank. `recalibrate=True` re-estimates BatchNorm on the
    batches of the call.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> FIRE(scale="nearest")(model).changed
    ('0.weight',)
    """

    name = "fire"
    sharded = True

    def __init__(self, *, recalibrate: bool = False, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed)
        self.recalibrate = recalibrate
        self.batches = "any" if recalibrate else "none"
        self._options = options if seed == 0 else {**options, "seed": seed}

    def settings(self) -> dict[str, Any]:
        """The options that differ from the verb's defaults."""
        return {"recalibrate": self.recalibrate, **self._options}

    def check(self, call: Call) -> None:
        """Targets, scale, options and optimizer, unless weights are frozen: they may be trained later."""
        self._recalibration(call)
        if all(parameter.requires_grad for parameter in call.inner.parameters()):
            check(call.model, call.optimizer, **self._options)

    def apply(self, call: Call) -> Receipt:
        """Apply `rekindle.fire`."""
        return fire(call.model, call.optimizer, recalibrate=self._recalibration(call), **self._options)

    def _recalibration(self, call: Call) -> Iterable[Batch] | None:
        if self.recalibrate and call.batches is None:
            raise ValueError("recalibrate=True needs batches= to estimate the BatchNorm statistics on")
        return call.batches if self.recalibrate else None


def check(
    model: nn.Module,
    optimizer: Any = None,
    *,
    targets: Any = "auto",
    scale: str | float = "paper",
    strength: float = 1.0,
    measure: Measuring = "cheap",
    optimizer_state: str = "fresh",
    plan: Plan | None = None,
    **more: Any,
) -> None:
    """Raise what `fire` with these arguments would raise whatever values the weights have; reads none of them.

    >>> check(nn.Linear(2, 2), targets="no.such.layer")
    Traceback (most recent call last):
    ValueError: targets='no.such.layer' matches no weight with matrices...
    """
    own = inspect.signature(fire).parameters
    planning = {name: value for name, value in more.items() if name not in own}
    check_model(model)
    check_call(planning)
    check_options(strength, measure)
    if plan is None:  # a weight that is zero now may be none later
        plan = make_plan(
            model, targets=targets, scale=scale, measure=False, trial=False, **{**planning, "min_norm": 0.0}
        )
    store = LiveStore(model, plan.selected)
    optimizers.check(optimizer, store.parameters([entry.name for entry in plan.selected]), optimizer_state)
