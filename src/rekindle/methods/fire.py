"""FIRE, the verb, as a method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from rekindle.methods.call import Call
from rekindle.methods.remedy import Remedy
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.execution import check_options
from rekindle.projection.firing import check_model, check_planning, fire
from rekindle.projection.method import Batch
from rekindle.projection.planning import Plan, draft
from rekindle.projection.receipt import Receipt
from rekindle.projection.stores import LiveStore

_OWN = fire.__annotations__.keys() - {"planning"}  # keywords of the verb that do not make a plan


class FIRE(Remedy):
    """Frobenius-Isometry Reinitialization (Han et al., 2026): every targeted matrix becomes its nearest isometry.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> FIRE(scale="nearest")(model).changed
    ('0.weight', '2.weight')

    Args:
        recalibrate: True estimates the BatchNorm statistics again, on the batches of the call.
        seed: of the completion of matrices of deficient rank.
        options: those of `rekindle.fire`: targets, scale, strength, solver, ….
    """

    name = "fire"
    sharded = True

    def __init__(self, *, recalibrate: bool = False, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed)
        self.recalibrate = recalibrate
        self.batches = "any" if recalibrate else "none"
        solver = options.get("solver", "auto")
        if seed:
            options["solver"] = {"seed": seed, **({"solver": solver} if isinstance(solver, str) else solver)}
        self._options = options

    def settings(self) -> dict[str, Any]:
        """The options that differ from the verb's defaults."""
        return {"recalibrate": self.recalibrate, **self._options}

    def check(self, call: Call) -> None:
        """Targets, scale, options and optimizer, unless weights are frozen: they may be trained later."""
        self._recalibration(call)
        if all(parameter.requires_grad for parameter in call.inner.parameters()):
            _check(call.model, call.optimizer, self._options)

    def apply(self, call: Call) -> Receipt:
        """Apply `rekindle.fire`."""
        return fire(call.model, call.optimizer, recalibrate=self._recalibration(call), **self._options)

    def _recalibration(self, call: Call) -> Iterable[Batch] | None:
        if self.recalibrate and call.batches is None:
            raise ValueError("recalibrate=True needs batches= to estimate the BatchNorm statistics on")
        return call.batches if self.recalibrate else None


def _check(model: nn.Module, optimizer: object, options: Mapping[str, Any]) -> None:
    """Raise what `fire` with these options would raise whatever values the weights have; reads none of them."""
    planning = {name: value for name, value in options.items() if name not in _OWN}
    check_model(model, optimizer)
    check_planning(planning)
    check_options(options.get("strength", 1.0), options.get("measure", "none"))
    plan: Plan | None = options.get("plan")
    if plan is None:  # a weight that is zero now may be none later
        plan = draft(model, **{**planning, "min_norm": 0.0})
    parameters = LiveStore(model, plan.selected).parameters()
    optimizers.check(optimizer, parameters, options.get("optimizer_state", "fresh"))
