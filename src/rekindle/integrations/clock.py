"""Optimizer steps as a method sees them: hooks before and after, one clock for several optimizers, and re-warming.

A step is one update of the clock optimizer: the first one, unless another is named. The hooks are torch's own on the
bare optimizers. They run inside every wrapper (accelerate, lightning) and inside `GradScaler.step`, so gradients are
unscaled there and a skipped step does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rekindle.optimizers import unwrap
from rekindle.optimizers.steps import Steps, nests


class Clock:
    """Counts steps: the updates of one of the optimizers. Critic, critic, actor, actor are two steps of the critic.

    `before(optimizer, first)` is called before each update of each optimizer, after the backward pass; first: none was
    updated since the step began. `after` is called once per step: when all optimizers were updated, or when the clock
    optimizer is about to be updated again. After `rewarm()` the learning rate of the next n steps is lr·1/(n+1),
    lr·2/(n+1), …; it is changed only between gradients and step, so that closures, schedulers, loggers and checkpoints
    always see their own value.

    clock: the optimizer whose updates count, or its position; the first by default.
    counting=False: the trainer counts steps itself. Without anything to do at a step there is then no hook at all.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> sgd = torch.optim.SGD([weight], lr=1.0)
    >>> clock = Clock([sgd], rewarm=1)
    >>> clock.rewarm()
    >>> for _ in range(2):
    ...     weight.grad = torch.ones(1)
    ...     sgd.step()
    >>> weight.item(), sgd.param_groups[0]["lr"], clock.count
    (-1.5, 1.0, 2)
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        clock: object = None,
        *,
        before: Callable[[Any, bool], None] | None = None,
        after: Callable[[], None] | None = None,
        rewarm: int = 0,
        closures: bool = False,
        counting: bool = True,
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._clock = id(clock_among(self.optimizers, clock))
        self.count = 0
        self._before, self._after, self._closures = before, after, closures
        self._length, self._left = rewarm, 0
        self._stepped: set[int] = set()
        self._ready: set[int] = set()  # their gradients are there
        self._steps = Steps() if closures or any(map(nests, self.optimizers)) else None  # it costs time at every step
        self._rates: dict[int, list[Any]] = {}
        self._handles: list[RemovableHandle] = []
        self._acting = before is not None or after is not None or rewarm > 0
        for optimizer in self.optimizers:
            if hasattr(optimizer, "register_step_pre_hook"):
                self._listen(optimizer, counting)
            elif self._acting:
                kind = type(optimizer).__name__
                raise TypeError(f"{kind} is not a torch optimizer: it has no hooks around its steps")

    @property
    def watched(self) -> bool:
        """Whether the optimizers have hooks, so that steps are counted at all."""
        return bool(self._handles)

    def before_step(self, optimizer: Optimizer) -> None:
        """The backward pass is done and this optimizer is about to step."""
        if self._stepped and id(optimizer) == self._clock:
            self.close()  # it is updated again: the step before is over, whoever was not updated in it
        if not self._acting:
            return
        if self._before is not None:
            self._before(optimizer, not self._stepped)
        self._ready.add(id(optimizer))
        if self._length and self._steps is not None and self._steps.running(optimizer):  # in a closure
            self._slow(optimizer)

    def close(self) -> None:
        """End a step in which the clock optimizer was updated."""
        if self._clock not in self._stepped:
            return
        self._stepped.clear()
        self._left = max(self._left - 1, 0)
        if self._after is not None:
            self._after()

    def rewarm(self) -> None:
        """Start the warm-up of the learning rate again."""
        self._left = self._length

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for optimizer in self.optimizers:
            self._restore(optimizer)

    def state_dict(self) -> dict[str, int]:
        """How many steps there were, and how many are left to warm up."""
        return {"count": self.count, "left": self._left}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self.count, self._left = state["count"], state["left"]

    def _listen(self, optimizer: Optimizer, counting: bool) -> None:
        """Register only the hooks that are needed: they cost time at every step."""
        counts = id(optimizer) == self._clock
        if not self._acting:
            if not counting or not counts:
                return
            if not nests(optimizer):
                self._handles.append(optimizer.register_step_post_hook(self._count))
                return
        alone = len(self.optimizers) == 1 and self._before is None and not self._length
        if self._steps is not None or not alone:
            self._handles.append(optimizer.register_step_pre_hook(self._pre))
        self._handles.append(optimizer.register_step_post_hook(self._post))

    def _count(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.count += 1

    def _pre(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._steps is not None and not self._steps.begins(optimizer):
            return
        if not self._closures:
            if self._before is not None and (len(args) > 1 or kwargs or hasattr(optimizer, "grad_scale")):
                _check_gradients(optimizer, args, kwargs)
            self.before_step(optimizer)
        elif self._stepped and id(optimizer) == self._clock:
            self.close()
        if self._length and id(optimizer) in self._ready:
            self._slow(optimizer)

    def _post(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._steps is not None and not self._steps.ends(optimizer):
            return
        if self._rates:
            self._restore(optimizer)
        if id(optimizer) in self._ready:
            self._ready.discard(id(optimizer))
        elif self._before is not None or self._left:
            raise RuntimeError(
                f"{type(optimizer).__name__} stepped without the trainer's hook before its step, through which this "
                "method acts: step the optimizers that the trainer gives (Lightning: self.optimizers())"
            )
        self._stepped.add(id(optimizer))
        self.count += id(optimizer) == self._clock
        if len(self._stepped) == len(self.optimizers):
            self.close()

    def _slow(self, optimizer: Optimizer) -> None:
        """Lower the learning rate for this step, if it is one of those after a remedy."""
        self._restore(optimizer)
        if self._left:
            factor = (self._length - self._left + 1) / (self._length + 1)
            self._rates[id(optimizer)] = [_scaled(group, factor) for group in optimizer.param_groups]

    def _restore(self, optimizer: Optimizer) -> None:
        """The learning rate as it was; also after an interrupted step, whose second hook was not called."""
        for group, rate in zip(optimizer.param_groups, self._rates.pop(id(optimizer), ()), strict=False):
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate


def clock_among(optimizers: Sequence[Any], clock: object = None) -> object:
    """The optimizer whose updates are the steps: the one that is named, by itself or by its position; else the first.

    >>> clock_among(["critic", "actor"], 1)
    'actor'
    """
    if clock is None:
        return optimizers[0]
    if isinstance(clock, int) and not isinstance(clock, bool) and 0 <= clock < len(optimizers):
        return optimizers[clock]
    inner = None if isinstance(clock, int) else unwrap(clock)[0]
    if not any(optimizer is inner for optimizer in optimizers):
        raise ValueError(
            f"clock={type(clock).__name__ if inner is not None else clock} is none of the {len(optimizers)} "
            "optimizers: name one of those that are given, or its position in the list"
        )
    return inner


def _scaled(group: dict[str, Any], factor: float) -> object:
    """Scale the learning rate of a group; its value before."""
    rate = group["lr"]
    if isinstance(rate, Tensor):
        kept = rate.clone()
        rate.mul_(factor)
        return kept
    group["lr"] = rate * factor
    return rate


def _check_gradients(optimizer: object, args: Any, kwargs: Any) -> None:
    if any(callable(each) for each in (*args[1:], *kwargs.values())):
        raise ValueError(
            "this method changes gradients, and optimizer.step(closure) makes them only inside the step: "
            "call backward() before step() instead"
        )
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ValueError(
            "this method changes gradients, which a fused optimizer gets scaled: call scaler.unscale_(optimizer) "
            "before the step (clipping does), or use fused=False"
        )
