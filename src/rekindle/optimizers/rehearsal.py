"""Trying a reset before it is made: does an optimizer of this class step like a new one afterwards?

Slots are recognized by their names (`slots`), which is a guess for a class of another package. So the guess is tried
once per class and settings: small parameters take a few steps, one is reset, and its next steps are compared with those
of a new optimizer, those of the other parameter with an optimizer that was not touched.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

Reset = Callable[[Optimizer, Mapping[str, Parameter]], object]
_SHAPES: dict[int, tuple[int, ...]] = {1: (4,), 2: (6, 4), 3: (4, 3, 2), 4: (4, 3, 2, 2), 5: (4, 3, 2, 2, 2)}
_STEPS = 3
_outcomes: dict[tuple[type[Any], str], str | None] = {}


def refusal(optimizer: Optimizer, reset: Reset) -> str | None:
    """Why `reset` does not make the next step of such an optimizer that of a new one; None if it does.

    >>> from rekindle.optimizers import resetting
    >>> class Counting(torch.optim.SGD):
    ...     '''Learns less with every step, and keeps the count to itself.'''
    ...     steps = 0
    ...     def step(self, closure=None):
    ...         self.steps += 1
    ...         self.param_groups[0]["lr"] = 0.1 / self.steps
    ...         super().step(closure)
    >>> refusal(Counting([torch.nn.Parameter(torch.ones(1))], lr=0.1), resetting.reset)
    "its attribute 'steps' changes with every step"
    """
    wrapped = next((name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)), None)
    if wrapped is not None:
        inner = type(vars(optimizer)[wrapped]).__name__
        return f"it wraps another optimizer ({inner}, in .{wrapped}), and keeps more than that one does"
    strange = next((key for key in optimizer.state if not isinstance(key, Tensor)), None)
    if strange is not None:
        return f"it keeps {strange!r} for all its parameters together"
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    key = type(optimizer), repr(sorted((name, value) for name, value in options.items() if not _counts(value, name)))
    if key not in _outcomes:
        with torch.random.fork_rng(devices=()):
            _outcomes[key] = _rehearsed(optimizer, reset)
    return _outcomes[key]


def _counts(value: Any, name: str) -> bool:
    """Whether a value of a group changes as training goes on: the outcome does not hang on it."""
    return name in ("lr", "initial_lr", "step", "k") or isinstance(value, Tensor)


def _rehearsed(optimizer: Optimizer, reset: Reset) -> str | None:
    label = type(optimizer).__name__
    try:
        treated, untouched = _Rehearsal(optimizer), _Rehearsal(optimizer)
        before = _numbers(treated.optimizer)
        for number in range(_STEPS):
            treated.step(number)
            untouched.step(number)
        for each in (treated, untouched):
            each.renew()
        new = _Rehearsal(optimizer, like=treated)
        reset(treated.optimizer, {f"changed {i}": p for i, p in enumerate(treated.changed)})
        for number in range(_STEPS, 2 * _STEPS):
            for each in (treated, untouched, new):
                each.step(number)
    except Exception as error:  # a constructor or a step of another package may raise anything
        return f"a trial failed with {type(error).__name__}: {error}"
    counted = [name for name, value in _numbers(treated.optimizer).items() if before.get(name) != value]
    if counted:
        return f"its attribute {counted[0]!r} changes with every step"
    if not all(map(torch.equal, treated.kept, untouched.kept)):
        return f"a reset of some parameters changes the steps of others in {label}"
    if not all(map(torch.equal, treated.changed, new.changed)):
        return f"the next step of what is reset is not that of a new {label}"
    return None


def _numbers(optimizer: Optimizer) -> dict[str, int | float]:
    """What an optimizer counts outside its state and its groups, but for torch's own count of steps."""
    numbers = {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}
    return {name: value for name, value in numbers.items() if name not in ("_step_count", "_opt_called")}


class _Rehearsal:
    """A small optimizer of the same class and settings: a group that will be reset, and one that will not."""

    def __init__(self, optimizer: Optimizer, like: _Rehearsal | None = None) -> None:
        draws = torch.Generator().manual_seed(0)
        shapes = [_SHAPES[axes] for axes in sorted({p.ndim for g in optimizer.param_groups for p in g["params"]})]
        self.changed = [Parameter(torch.randn(shape, generator=draws)) for shape in shapes]
        self.kept = [Parameter(torch.randn(shape, generator=draws)) for shape in shapes]
        if like is not None:
            for mine, its in zip(self.changed, like.changed, strict=True):
                mine.data.copy_(its.data)
        self.optimizer = _made_like(optimizer, [self.changed, self.kept])

    def renew(self) -> None:
        """Give what will be reset other values."""
        draws = torch.Generator().manual_seed(1)
        for parameter in self.changed:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draws))

    def step(self, number: int) -> None:
        """One step with the gradients of this number."""
        draws = torch.Generator().manual_seed(2 + number)
        parameters = [*self.changed, *self.kept]
        gradients = [torch.randn(parameter.shape, generator=draws) for parameter in parameters]

        def closure() -> float:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            return 1.0

        closure()
        torch.manual_seed(number)
        try:
            self.optimizer.step()
        except TypeError:  # its step takes a closure
            self.optimizer.step(closure)


def _made_like(optimizer: Optimizer, members: list[list[Parameter]]) -> Optimizer:
    """A new optimizer of the same class, with the settings of the first group and of the constructor.

    Where the constructor's arguments cannot be told from what it keeps, a copy without state.
    """
    parameters = inspect.signature(type(optimizer).__init__).parameters
    held = {**vars(optimizer), **optimizer.defaults}
    options = {name: held[name] for name in list(parameters)[2:] if name in held}
    group = optimizer.param_groups[0]
    given = {name: group[name] for name in group if name in parameters or name in optimizer.defaults}
    # What a group has beyond the defaults was put there by the user (use_muon=True), unless a step writes it.
    fresh = {name: value for name, value in optimizer.defaults.items() if name not in parameters}
    groups = [{**_own(optimizer), **given, **fresh, "params": each} for each in members]
    try:
        made: Optimizer = type(optimizer)(groups, **options)
    except Exception:  # of another package: it may raise anything
        made = object.__new__(type(optimizer))
        vars(made).update(vars(optimizer))
        made.state = defaultdict(dict)
        made.param_groups = [{**optimizer.defaults, **group} for group in groups]
    if callable(getattr(made, "train", None)):  # schedule-free optimizers want to be told
        made.train()  # type: ignore[attr-defined]
    return made


def _own(optimizer: Optimizer) -> dict[str, Any]:
    """What the user gave the first group and the class does not know by itself."""
    group = optimizer.param_groups[0]
    plain = {name: value for name, value in group.items() if isinstance(value, bool | str)}
    return {name: value for name, value in plain.items() if name not in optimizer.defaults}
