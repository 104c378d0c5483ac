"""When a method acts: the one object that decides, from steps, epochs, boundaries and a trigger's metrics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from rekindle.integrations import arguments
from rekindle.monitoring.triggers import HEALTH, Trigger, name_in
from rekindle.sharding.replicas import everyone


class When:
    """The times at which a method acts. `decide` is called once per step and returns the reason to act, or None.

    at, every, trigger: as in `Application`. A step that was considered is not considered again, so that a resumed run
    does nothing twice.

    >>> when = When(at=[2], every=5)
    >>> [when.decide(step) for step in (1, 2, 2, 5)]
    [None, 'at step 2', None, 'every 5 steps']
    """

    def __init__(
        self, at: int | Iterable[int] | None = None, every: object = None, trigger: Trigger | None = None
    ) -> None:
        self.at, self.every, self.trigger = arguments.steps(at), arguments.period(every), trigger
        self.considered: int | None = None
        self.epoch: int | None = None
        self.boundary: str | None = None
        self.metrics: dict[str, float] = {}
        self.bounded = False  # whether boundary() was ever called
        self.every_step = False  # an unknown optimizer wants every step
        self._names: set[str] = set()  # metrics that came
        self._due = 0.0  # before this step nothing can be due

    @property
    def timed(self) -> bool:
        """Whether anything but `boundary()` makes the method act."""
        return bool(self.at) or self.every is not None or self.trigger is not None

    def start(self, fresh: bool) -> None:
        """Training starts; fresh: a new run, maybe after another one."""
        self._due = 0.0
        if fresh:
            self.considered = self.epoch = None

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Metrics for the trigger, under the trainer's names; what is not a number is ignored."""
        if self.trigger is None:
            return
        for key, value in metrics.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, Real):
                self._names.add(key)
                self.metrics[key] = float(value)

    def wake(self) -> None:
        """There is something new: this step is considered, whatever was due."""
        self._due = 0.0

    def mark(self, reason: str) -> None:
        """A task ends here."""
        self.boundary, self.bounded = reason, True
        self.wake()

    def idle(self, step: int, epoch: int | None = None) -> bool:
        """Whether nothing can be due at this step: it was considered, or the next time is later."""
        if step == self.considered:
            return True
        if step >= self._due:
            return False
        self.considered, self.epoch = step, epoch if epoch is not None else self.epoch
        return True

    def decide(self, step: int, epoch: int | None = None, *, again: bool = False) -> str | None:
        """The reason to act when `step` steps are done, or None; again: a boundary, though the step was considered."""
        if not again and self.idle(step, epoch):
            return None
        if self.considered is None:
            self.considered = step - 1
        reason = self._reason(step, epoch)
        self.considered = step
        self.epoch = epoch if epoch is not None else self.epoch
        self.boundary = None
        self.metrics.clear()
        self._due = self._next(step)
        return reason

    def applied(self) -> None:
        """The reason was followed: only now, since a method that refused was not applied."""
        if self.trigger is not None:
            self.trigger.fire()

    def check(self, monitored: bool) -> None:
        """Warn of a trigger that reads health where nothing measures it."""
        for names in () if self.trigger is None or monitored else self.trigger.reads():
            if all(name.removeprefix("health/") in HEALTH for name in names):
                warnings.warn(
                    f"{type(self.trigger).__name__} reads {' or '.join(map(repr, names))}, a measure of health, and "
                    "there is no monitor=: it fires only where your loop passes that number to step()",
                    stacklevel=3,
                )

    def finish(self, name: str, fired: bool) -> None:
        """Warn of what was asked for and never came."""
        late = [step for step in self.at if self.considered is not None and step > self.considered]
        if late:
            text = ", ".join(map(str, late))
            warnings.warn(f"{name} at step {text} was not applied: training ended before", stacklevel=3)
        if self.trigger is None or self.considered is None:
            return
        seen = dict.fromkeys((*self._names, *(["boundary"] if self.bounded else [])), 0.0)
        for names in self.trigger.reads():
            if not fired and all(name_in(seen, metric) is None for metric in names):
                there = ", ".join(sorted(metric for metric in self._names if metric.count("/") < 2)) or "none"
                wanted = " or ".join(map(repr, names))
                warnings.warn(f"{name}: its trigger reads {wanted}; the metrics were {there}", stacklevel=3)

    def state_dict(self) -> dict[str, Any]:
        """Position, boundary and metrics; the trigger's state is apart."""
        names = ("considered", "epoch", "boundary", "bounded")
        return {**{name: getattr(self, name) for name in names}, "metrics": dict(self.metrics)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.considered, self.epoch, self.boundary = state["considered"], state["epoch"], state["boundary"]
        self.bounded, self.metrics, self._due = state["bounded"], dict(state["metrics"]), 0.0

    def _next(self, step: int) -> float:
        """The next step at which anything can be due, so that all steps before it cost one comparison."""
        if self.every_step or self.trigger is not None or self.every == "epoch":
            return step + 1
        multiple = math.inf if self.every is None else (step // self.every + 1) * self.every
        return min([multiple, *(wanted for wanted in self.at if wanted > step)])

    def _reason(self, step: int, epoch: int | None) -> str | None:
        done = -1 if self.considered is None else self.considered
        asked = self._triggered(step, epoch)  # in any case: a trigger counts the steps at which it is evaluated
        if any(done < wanted <= step for wanted in self.at):
            return f"at step {step}"
        if isinstance(self.every, int) and step // self.every > max(done, 0) // self.every:
            return f"every {self.every} steps"
        if self.every == "epoch" and epoch is not None and self.epoch is not None and epoch > self.epoch:
            return f"epoch {epoch}"
        return asked

    def _triggered(self, step: int, epoch: int | None) -> str | None:
        """The trigger's reason, or that of a boundary without one. Before the first step there is nothing to judge."""
        if self.trigger is None:
            return self.boundary
        if step == 0 and self.boundary is None:
            return None
        given: dict[str, Any] = {"step": step, **({} if epoch is None else {"epoch": epoch}), **self.metrics}
        if self.boundary is not None:
            given["boundary"] = True
        reason: str | None = everyone().first(self.trigger.consider(given))  # metrics may differ between processes
        return reason
