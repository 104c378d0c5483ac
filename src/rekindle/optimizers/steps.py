"""Steps of an optimizer as its hooks see them, each once: torch calls the hooks again for a base class's `step()`."""

from __future__ import annotations

import inspect
import sys
from types import FrameType

from torch.optim import Optimizer


class Steps:
    """Which steps are running. Hooks call `begins` and `ends`, which are false for a step inside a step.

    An interrupted step has no second hook, so the frame of its call shows whether it still runs.

    >>> import torch
    >>> class Logged(torch.optim.SGD):
    ...     def step(self, closure=None):
    ...         return super().step(closure)
    >>> weight, steps, seen = torch.nn.Parameter(torch.ones(1)), Steps(), []
    >>> _, optimizer = torch.optim.SGD([weight]), Logged([weight])
    >>> _ = optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(steps.begins(optimizer)))
    >>> _ = optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(steps.ends(optimizer)))
    >>> optimizer.step(); seen
    [True, False, False, True]
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[FrameType, int]] = {}

    def begins(self, optimizer: object) -> bool:
        """Called by a hook before the step."""
        frame, depth = self._open.get(id(optimizer), (None, 0))
        if frame is not None and _runs(frame):
            self._open[id(optimizer)] = frame, depth + 1
            return False
        self._open[id(optimizer)] = sys._getframe(2), 1
        return True

    def ends(self, optimizer: object) -> bool:
        """Called by a hook after the step."""
        frame, depth = self._open.pop(id(optimizer), (None, 1))
        if frame is None or depth == 1:
            return True
        self._open[id(optimizer)] = frame, depth - 1
        return False

    def running(self, optimizer: object) -> bool:
        """Whether the caller is inside `optimizer.step()`, as a closure is."""
        return id(optimizer) in self._open and _runs(self._open[id(optimizer)][0])


def _runs(frame: FrameType) -> bool:
    current: FrameType | None = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def nests(optimizer: object) -> bool:
    """Whether `step()` may call that of a base class, for which torch calls the hooks again.

    >>> import torch
    >>> nests(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    False
    """
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not Optimizer and "step" in vars(kind)]
    return len({inspect.unwrap(vars(kind)["step"]) for kind in kinds}) > 1
