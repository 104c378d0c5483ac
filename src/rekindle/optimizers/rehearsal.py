"""Trying a reset before it is made: does an optimizer of this class step like a new one afterwards?

Slots are recognized by their names (`slots`), which is a guess for a class of another package. So the guess is tried
once per class and settings: small parameters take a few steps, one group is reset, and its next steps are compared with
those of a new optimizer, those of the other group with an optimizer that was not touched.
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
Group = Mapping[str, Any]
_SHAPES: tuple[tuple[int, ...], ...] = ((), (4,), (6, 4), (4, 3, 2), (4, 3, 2, 2), (4, 3, 2, 2, 2))
_STEPS = 3
_LATER = 1000  # steps that are only counted: what hangs on a count may differ by then
_RATE = 1e-2  # the present one may be zero, at the beginning of a schedule
_outcomes: dict[object, str | None] = {}


def refusal(optimizer: Optimizer, group: Group, reset: Reset) -> str | None:
    """Why `reset` does not make the next step of such an optimizer that of a new one; None if it does.

    group: whose settings are tried.

    >>> from rekindle.optimizers import resetting
    >>> class Counting(torch.optim.SGD):
    ...     '''Learns less with every step, and keeps the count to itself.'''
    ...     steps = 0
    ...     def step(self, closure=None):
    ...         self.steps += 1
    ...         self.param_groups[0]["lr"] = 0.1 / self.steps
    ...         super().step(closure)
    >>> counting = Counting([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> refusal(counting, counting.param_groups[0], resetting.reset)
    "its attribute 'steps' changes with every step"
    """
    wrapped = next((name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)), None)
    if wrapped is not None:
        inner = type(vars(optimizer)[wrapped]).__name__
        return f"it wraps another optimizer ({inner}, in .{wrapped}), and keeps more than that one does"
    shared = next((key for key in optimizer.state if not isinstance(key, Tensor)), None)
    if shared is not None:
        return f"it keeps {shared!r} for all its parameters together"
    settings = {**_plain(vars(optimizer)), **_plain(group)}
    key = type(optimizer), repr(sorted(settings.items())), frozenset(map(_kind, group["params"]))
    if key not in _outcomes:
        with torch.random.fork_rng(devices=()):
            _outcomes[key] = _rehearsed(optimizer, group, reset)
    return _outcomes[key]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings: what is no tensor, and does not change as training goes on."""
    counts = ("lr", "initial_lr", "step", "k", "params")
    plain = {name: value for name, value in values.items() if isinstance(value, bool | int | float | str | tuple)}
    return {name: value for name, value in plain.items() if name not in counts and not name.startswith("_")}


def _kind(parameter: Tensor) -> tuple[int, torch.dtype, torch.device]:
    return parameter.ndim, parameter.dtype, parameter.device


def _rehearsed(optimizer: Optimizer, group: Group, reset: Reset) -> str | None:
    for first in (True, False):  # some classes take what holds for all groups from the first
        try:
            reason = _compared(optimizer, group, reset, first)
        except Exception as error:  # a constructor or a step of another package may raise anything
            return f"a trial failed with {type(error).__name__}: {error}"
        if reason is not None:
            return reason
    return None


def _compared(optimizer: Optimizer, group: Group, reset: Reset, first: bool) -> str | None:
    label = type(optimizer).__name__
    treated, untouched = (_Rehearsal(optimizer, group, first) for _ in range(2))
    before = _numbers(treated.optimizer)
    for number in range(_STEPS):
        treated.step(number)
        untouched.step(number)
    for each in (treated, untouched):
        each.renew()
        each.count()
    new = _Rehearsal(optimizer, group, first, like=treated)
    reset(treated.optimizer, {f"changed {i}": p for i, p in enumerate(treated.changed)})
    for number in range(_STEPS, 2 * _STEPS):
        for each in (treated, untouched, new):
            each.step(number)
    counted = [name for name, value in _numbers(treated.optimizer).items() if before.get(name) != value]
    if counted:
        return f"its attribute {counted[0]!r} changes with every step"
    if not all(map(_close, treated.kept, untouched.kept)):
        return f"a reset of some parameters changes the steps of others in {label}"
    if not all(map(_close, treated.changed, new.changed)):
        return f"the next step of what is reset is not that of a new {label}"
    return None


def _close(one: Tensor, other: Tensor) -> bool:
    # Steps are of the size of _RATE; what LAPACK does depends on where its arguments lie in memory.
    return torch.allclose(one, other, rtol=2 * torch.finfo(one.dtype).eps, atol=1e-4 * _RATE)


def _numbers(optimizer: Optimizer) -> dict[str, int | float]:
    """What an optimizer counts outside its state and its groups, but for torch's own count of steps."""
    numbers = {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}
    return {name: value for name, value in numbers.items() if name not in ("_step_count", "_opt_called")}


class _Rehearsal:
    """A small optimizer of the same class and settings: a group that will be reset, and one that will not."""

    def __init__(self, optimizer: Optimizer, group: Group, first: bool, like: _Rehearsal | None = None) -> None:
        draws = torch.Generator().manual_seed(0)
        kinds = 2 * sorted(set(map(_kind, group["params"])), key=str)  # some classes take parameters in pairs
        self.changed, self.kept = (
            [Parameter(torch.randn(_SHAPES[axes], generator=draws).to(device, dtype)) for axes, dtype, device in kinds]
            for _ in range(2)
        )
        if like is not None:
            for mine, its in zip(self.changed, like.changed, strict=True):
                mine.data.copy_(its.data)
        members = [self.changed, self.kept] if first else [self.kept, self.changed]
        self.optimizer = _made_like(optimizer, group, members)

    def renew(self) -> None:
        """Give what will be reset other values."""
        draws = torch.Generator().manual_seed(1)
        for parameter in self.changed:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draws))

    def count(self) -> None:
        """Count many more steps wherever the steps so far were counted."""
        for table in (*self.optimizer.param_groups, *self.optimizer.state.values()):
            for name, value in table.items():
                if name == "step" and (value == _STEPS if isinstance(value, int | float) else value.numel() == 1):
                    table[name] = value + _LATER

    def step(self, number: int) -> None:
        """One step with the gradients of this number."""
        draws = torch.Generator().manual_seed(2 + number)
        parameters = [*self.changed, *self.kept]
        gradients = [torch.randn(parameter.shape, generator=draws).to(parameter) for parameter in parameters]

        def closure() -> Tensor:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            return torch.tensor(1.0)

        closure()
        torch.manual_seed(number)
        try:
            self.optimizer.step()
        except Exception as error:
            if "closure" not in str(error):
                raise
            self.optimizer.step(closure)  # type: ignore[arg-type]


def _made_like(optimizer: Optimizer, group: Group, members: list[list[Parameter]]) -> Optimizer:
    """A new optimizer of the same class, with the settings of this group and of the constructor.

    Where the constructor's arguments cannot be told from what it keeps, a copy without state.
    """
    parameters = inspect.signature(type(optimizer).__init__).parameters
    held = {**vars(optimizer), **optimizer.defaults}
    options = {name: held[name] for name in list(parameters)[2:] if name in held}
    given = {name: group[name] for name in group if name in parameters or name in optimizer.defaults}
    # What the constructor does not take a step may have written, but for words and flags (use_muon=True).
    fresh = {name: value for name, value in optimizer.defaults.items() if name not in parameters}
    if given.get("lr") is not None:
        given["lr"] = options["lr"] = _RATE
    own = {name: value for name, value in group.items() if isinstance(value, bool | str)}
    groups = [{**given, **fresh, **own, "params": each} for each in members]
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
