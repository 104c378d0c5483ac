"""A schedule: a method that is applied to a model where a trigger says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from rekindle.monitoring.guard import Guard, watched
from rekindle.monitoring.monitor import Monitor
from rekindle.monitoring.triggers import AtBoundary, Every, Flat, Metrics, Trigger, flat, name_in

if TYPE_CHECKING:
    from rekindle.projection.method import Batch, Loss, Method
    from rekindle.projection.receipt import Receipt


@dataclass(frozen=True)
class Firing:
    """When a schedule applied its method, and why."""

    step: int
    reason: str


class Schedule:
    """A method, applied where a trigger says so.

    Without a trigger the method's own attributes decide: every `period` steps, else after every step for a
    method whose moment is that, else at task boundaries. `guard` takes a remedy back if the loss rises too much.

    >>> from rekindle.monitoring.triggers import Every
    >>> from rekindle.projection.receipt import Receipt
    >>> schedule = Schedule(lambda model, optimizer=None, **more: Receipt("nothing"), Every(2))
    >>> [schedule.step(nn.Linear(1, 1), None, {}) is not None for _ in range(4)]
    [False, True, False, True]
    >>> schedule.firings[0]
    Firing(step=2, reason='every 2 steps')

    Args:
        method: what is applied.
        trigger: when; without one the method's own attributes decide.
        guard: takes a remedy back if the loss rises too much.
    """

    def __init__(self, method: Method, trigger: Trigger | None = None, *, guard: Guard | None = None) -> None:
        if not callable(method):
            raise TypeError(f"a schedule applies a method such as rekindle.methods.FIRE(), got {method!r}")
        if trigger is not None and not hasattr(trigger, "reads"):
            raise TypeError(f"a trigger such as rekindle.triggers.Every(1000) says when, got {trigger!r}")
        trigger = _own_trigger(method) if trigger is None else trigger
        self.method, self.trigger, self.guard = method, trigger, guard
        self.firings: list[Firing] = []
        self._sample: object = None
        self._missing = dict.fromkeys(trigger.reads(), True)  # metrics not seen yet, and not warned about

    def bind(self, model: nn.Module, optimizer: object) -> None:
        """The model and optimizer that are trained; for schedules that read them. Each `step` updates both."""

    def applied(self, receipt: Receipt) -> None:
        """The method was applied; for schedules that note it."""

    def close(self) -> None:
        """Training is over; for schedules that run something."""

    def step(
        self,
        model: nn.Module,
        optimizer: object,
        metrics: Metrics | Flat | Monitor,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
    ) -> Receipt | None:
        """Evaluate the trigger once; if it fires, apply the method and return its receipt.

        metrics: a dict, a Health, a monitor's sample, or the Monitor itself, each of whose samples is used once.
        """
        self.bind(model, optimizer)
        given = self._given(metrics)
        if given is not None:
            self._warn_of_missing(given)
        reason = self.trigger.consider(given or {})
        if reason is None:
            return None
        with watched(self.guard, type(self).__name__, (model,), optimizer, self.method) as transaction:
            receipt = transaction.settle(self.method(model, optimizer, batches=batches, loss=loss))
            # Only now: a method that refused has not been applied.
            self.trigger.fire()
            self.firings.append(Firing(self.trigger.step, reason))
            self.applied(receipt)
            return receipt

    def _given(self, metrics: Metrics | Flat | Monitor) -> Metrics | None:
        """The present metrics; None where a monitor has taken no new sample."""
        if not isinstance(metrics, Monitor):
            return flat(metrics)
        if metrics.last is None or metrics.last is self._sample:
            return None
        self._sample = metrics.last
        return metrics.last.flat()

    def _warn_of_missing(self, metrics: Metrics) -> None:
        for names in [names for names, open_ in self._missing.items() if open_]:
            self._missing[names] = False
            if all(name_in(metrics, name) is None for name in names):
                there = ", ".join(map(str, list(metrics)[:12])) or "none"
                warnings.warn(
                    f"{type(self.trigger).__name__} reads {' or '.join(map(repr, names))}, which is not among the "
                    f"metrics given ({there}): it can fire only on steps where it is",
                    UserWarning,
                    stacklevel=3,
                )

    def state_dict(self) -> dict[str, Any]:
        """The trigger's state, the firings, and the method's own state if it has one."""
        state: dict[str, Any] = {"trigger": self.trigger.state_dict(), "firings": [asdict(f) for f in self.firings]}
        if hasattr(self.method, "state_dict"):
            state["method"] = self.method.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.trigger.load_state_dict(state["trigger"])
        self.firings = [Firing(**each) for each in state["firings"]]
        if "method" in state and hasattr(self.method, "load_state_dict"):
            self.method.load_state_dict(state["method"])


def _own_trigger(method: Method) -> Trigger:
    moment, period = getattr(method, "moment", "event"), getattr(method, "period", None)
    if moment in ("backward", "loss"):
        raise ValueError(f"{method!r} acts within every step (moment {moment!r}): a schedule has nothing to decide")
    if period is not None:
        return Every(period)
    return Every(1) if moment == "step" else AtBoundary()
