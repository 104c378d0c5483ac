"""The learning rate as a remedy: another one from now on, or raised at a boundary and decayed back.

Along a long run weight norms grow, and with a normalization behind them the effective rate lr/‖W‖² falls. Raising the
rate answers that without touching a weight, so it is the first rival of every method here (arXiv 2507.20057).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from rekindle.methods.call import Call
from rekindle.methods.remedy import Moment, Remedy
from rekindle.optimizers import unwrap
from rekindle.projection.receipt import Receipt


class LearningRate(Remedy):
    """Multiply the rate of every parameter group by `factor`, now and for good.

    The rate that a scheduler started from (`initial_lr`) is multiplied too. A scheduler keeps its own copy of it in
    `base_lrs`: give the `scheduler`, or make a new one afterwards.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> print(LearningRate(3.0)(model, optimizer).notes[0])
    learning rate 0.1 → 0.3

    Args:
        factor: what every rate is multiplied by.
        scheduler: the scheduler whose stored rates are multiplied too.
    """

    name = "learning-rate"

    def __init__(self, factor: float = 3.0, *, scheduler: Any = None) -> None:
        super().__init__()
        if not factor > 0:
            raise ValueError(f"factor={factor} must be positive")
        self.factor = factor
        self._scheduler = scheduler

    def check(self, call: Call) -> None:
        """Raise without an optimizer that has a rate."""
        _groups(call.optimizer, type(self).__name__)

    def apply(self, call: Call) -> Receipt:
        """Multiply, and say what the rates were."""
        groups = _groups(call.optimizer, type(self).__name__)
        rates = [float(group["lr"]) for group in groups]
        for group in groups:
            for name in ("lr", "initial_lr"):
                if name in group:
                    _set(group, name, group[name] * self.factor)
        if self._scheduler is not None:
            self._scheduler.base_lrs = [rate * self.factor for rate in self._scheduler.base_lrs]
        changes = dict.fromkeys(f"{rate:g} → {rate * self.factor:g}" for rate in rates)
        notes = [f"learning rate {', '.join(changes)}"]
        if self._scheduler is None and any("initial_lr" in group for group in groups):
            notes.append("a scheduler may set its own rate again: give LearningRate(…, scheduler=scheduler)")
        return Receipt(self.name, notes=tuple(notes))


class Rewarm(Remedy):
    """Raise the rate by `factor` at an event, and let it fall back linearly over the next `steps` optimizer steps.

    The raised rate is set between the backward pass and the optimizer's step and taken back right after it, so that
    any scheduler goes on as if nothing had happened.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer, method = torch.optim.SGD(model.parameters(), lr=0.1), Rewarm(3.0, steps=2)
    >>> _ = method.at("event")(model, optimizer)
    >>> for _ in range(3):
    ...     _ = method.at("backward")(model, optimizer)
    ...     print(round(optimizer.param_groups[0]["lr"], 3), end=" ")
    ...     _ = method.at("step")(model, optimizer)
    0.3 0.2 0.1

    Args:
        factor: how much the rate is raised.
        steps: of the optimizer, over which it falls back.
    """

    name = "rewarm"

    def __init__(self, factor: float = 3.0, *, steps: int = 100) -> None:
        super().__init__()
        if not factor > 0 or steps < 1:
            raise ValueError(f"factor={factor} and steps={steps} must be positive")
        self.factor, self.steps = factor, steps
        self._left = 0
        self._own_rates: list[Any] = []
        self._parts: dict[Moment, Remedy] = {"backward": _Raise(self), "step": _Lower(self)}

    def at(self, moment: Moment) -> Remedy | None:
        """The event starts it, the rate is raised before each step and lowered after it."""
        return self if moment == "event" else self._parts.get(moment)

    def check(self, call: Call) -> None:
        """Raise without an optimizer that has a rate."""
        _groups(call.optimizer, type(self).__name__)

    def apply(self, call: Call) -> Receipt:
        """Start: the next `steps` steps are taken at a higher rate."""
        self.check(call)
        self._left = self.steps
        return Receipt(self.name, notes=(f"learning rate × {self.factor:g}, back to × 1 over {self.steps} steps",))

    def gathered(self) -> dict[str, Any]:
        """How many steps are left."""
        return {"left": self._left}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where it was."""
        self._left = state["left"]

    def raise_rates(self, optimizer: object) -> None:
        """Set the rates of the coming step."""
        self.lower_rates(optimizer)  # the last step did not happen
        if self._left:
            groups = _groups(optimizer, type(self).__name__)
            self._own_rates = [float(group["lr"]) for group in groups]
            factor = 1 + (self.factor - 1) * self._left / self.steps
            for group, rate in zip(groups, self._own_rates, strict=True):
                _set(group, "lr", rate * factor)

    def lower_rates(self, optimizer: object, *, stepped: bool = False) -> None:
        """Set the optimizer's own rates again."""
        if self._own_rates:
            for group, rate in zip(_groups(optimizer, type(self).__name__), self._own_rates, strict=True):
                _set(group, "lr", rate)
            self._own_rates = []
            self._left -= stepped


class _Raise(Remedy):
    """Before an optimizer's step."""

    name = "rewarm"
    moment: Moment = "backward"

    def __init__(self, whole: Rewarm) -> None:
        super().__init__()
        self._whole = whole

    def transaction(self, call: Call) -> AbstractContextManager[object]:
        """None: it writes no tensor of the model, and it is called at every step."""
        return nullcontext()

    def apply(self, call: Call) -> Receipt:
        self._whole.raise_rates(call.optimizer)
        return Receipt(self.name)


class _Lower(_Raise):
    """After it."""

    moment = "step"

    def apply(self, call: Call) -> Receipt:
        self._whole.lower_rates(call.optimizer, stepped=True)
        return Receipt(self.name)


def _groups(optimizer: object, method: str) -> list[dict[str, Any]]:
    groups = [group for one in unwrap(optimizer) for group in one.param_groups if "lr" in group]
    if not groups:
        raise ValueError(f"{method} changes the learning rate of an optimizer: give one that has lr")
    return groups


def _set(group: dict[str, Any], name: str, rate: float | Tensor) -> None:
    """In place where the rate is a tensor (capturable optimizers read it on the device)."""
    if isinstance(group[name], Tensor):
        group[name].copy_(rate if isinstance(rate, Tensor) else group[name].new_tensor(rate))
    else:
        group[name] = float(rate)
