"""Remedies in your own training loop, with or without accelerate.

>>> import torch, rekindle
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
>>> optimizer = torch.optim.Adam(model.parameters())
>>> with rekindle.attach(model, optimizer, method="fire", every=3) as remedy:
...     for _ in range(9):
...         loss = model(torch.ones(2, 4)).square().mean()
...         loss.backward()
...         optimizer.step()
...         optimizer.zero_grad()
...         _ = remedy.step(loss=loss)
>>> [firing.step for firing in remedy.firings]
[3, 6]
"""

from __future__ import annotations

import atexit
import difflib
import inspect
import warnings
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from rekindle.integrations.application import Application, Log
from rekindle.integrations.clock import clock_among
from rekindle.integrations.passes import Passes
from rekindle.monitoring.schedules import Schedule
from rekindle.optimizers import unwrap
from rekindle.projection.method import Method
from rekindle.projection.receipt import Receipt


class Attachment(Application):
    """An `Application` on one model and optimizer; `step()` is called after each optimizer step.

    What is due then is done when the next step begins: at the first forward pass from a place in the code whose passes
    are trained on. So a run that ends simply ends, and its model is not one that was just changed.
    """

    def __init__(
        self, model: nn.Module, optimizer: object, method: Any, *, log: Log | None = None, **options: Any
    ) -> None:
        super().__init__(method, **options)
        if 0 in self.when.at:
            raise ValueError("at=0 is before the loop: call the method there, rekindle.fire(model, optimizer)")
        self._calls = 0
        self._passes = Passes(model, self.start)
        self._next_closure: list[RemovableHandle] = []
        self._done: Receipt | None = None
        self.bind(model, optimizer, log=log)
        self.when.considered, self.when.epoch = 0, 0
        self._order = _Order(clock_among(unwrap(optimizer), options.get("clock")))
        _OPEN.add(self)
        if "event" in self.what.parts:
            self._passes.listen()

    @property
    def steps(self) -> int:
        """Steps so far: updates of the clock optimizer, else (no torch optimizer) the calls of `step`."""
        assert self.clock is not None, "the attachment is closed"
        return self.clock.count if self.clock.watched else self._calls

    def step(
        self, metrics: Mapping[str, Any] | None = None, /, *, epoch: int | None = None, **more: object
    ) -> Receipt | None:
        """After `optimizer.step()`: decide whether the method acts before the next step.

        Returns the receipt of what was done since the last call. Metrics for the trigger come as a mapping, as
        keywords, or both. While gradients are accumulated it may be called after each batch: only steps that the
        optimizer took count.
        """
        assert self.clock is not None, "the attachment is closed"
        if self._order.watching:
            self._order.called()
            self._passes.called(1)
        if self.pending is not None and self.steps > self.pending.step:
            self.start()  # its forward pass could not be seen: in a compiled function, or at a place of its own
        self.clock.close()
        self._calls += 1
        self.note({**(metrics or {}), **more})
        self.decide(self.steps, epoch)
        self._wait()
        done, self._done = self._done, None
        return done

    def start(self) -> Receipt | None:
        """The next step begins here: act now if anything is due.

        For loops whose first forward pass comes without gradients, as the rollout of PPO does.
        """
        return self.act()

    def change(self) -> Receipt:
        """Apply the method, for the next `step()` to return."""
        self._done = super().change()
        return self._done

    def boundary(self, reason: str = "task boundary") -> Receipt | None:
        """A task or data set ends here: the method acts now (or the trigger is evaluated now)."""
        due = self.start()
        super().boundary(reason)
        if due is not None and self.when.trigger is None:
            self.when.boundary = None  # it has just acted
            return due
        self.decide(self.steps, self.when.epoch, again=True)  # what else is due at this step is not done twice
        return self.act()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; what was due and not done yet is done when the next step begins."""
        super().load_state_dict(state)
        self._wait()

    def finish(self) -> None:
        """Training is over: hooks are removed, and what was due after the last step is not done."""
        self._stop_waiting()
        super().finish()

    def report_silence(self) -> None:
        """Warn of what was asked for and never came; of a loop without `step()` too."""
        _OPEN.discard(self)
        steps = self._ended["count"] if self._ended is not None else self.clock.count if self.clock is not None else 0
        if self.when.timed and "event" in self.what.parts and steps and not self._calls:
            warnings.warn(f"{self.name}: remedy.step() was never called in {steps} optimizer steps", stacklevel=3)
            return
        super().report_silence()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._order.remove()
        self.finish()

    def _wait(self) -> None:
        """See the next pass of training if anything is due, or if the first updates are still to come."""
        if self.pending is None:
            if not self._order.watching:
                self._stop_waiting()
            return
        self._passes.wait()
        assert self.clock is not None
        for optimizer in self.clock.optimizers if not self._next_closure else ():
            if hasattr(optimizer, "register_step_pre_hook"):
                self._next_closure.append(optimizer.register_step_pre_hook(self._before_closure))

    def _before_closure(self, optimizer: object, args: Sequence[Any], kwargs: Any) -> None:
        """A closure runs its forward pass inside of the step, where it is too late to reset the optimizer."""
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            self.start()

    def _stop_waiting(self) -> None:
        self._passes.stop()
        for handle in self._next_closure:
            handle.remove()
        self._next_closure.clear()


_OPEN: weakref.WeakSet[Attachment] = weakref.WeakSet()


@atexit.register
def _report_open() -> None:
    """What a loop without a `with` block would not hear."""
    for remedy in list(_OPEN):
        remedy.report_silence()


class _Order:
    """Notices `remedy.step()` between the backward pass and `optimizer.step()`, in the first updates."""

    def __init__(self, optimizer: Any) -> None:
        self._events: list[str] = []
        self._warned = False
        self._handles: list[Any] = []
        leaves = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.is_leaf]
        if hasattr(optimizer, "register_step_post_hook") and leaves:
            self._handles = [
                leaves[-1].register_post_accumulate_grad_hook(lambda _: self._events.append("backward")),
                optimizer.register_step_post_hook(self._updated),
            ]

    @property
    def watching(self) -> bool:
        """Whether the first updates are still to come."""
        return bool(self._handles)

    def called(self) -> None:
        """`remedy.step()` was called."""
        self._events.append("call")
        if self._events.count("update") >= 3:  # here: a hook cannot remove itself
            self.remove()

    def remove(self) -> None:
        """Stop watching."""
        self._events.clear()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _updated(self, *_: object) -> None:
        if self._events[-2:] == ["backward", "call"] and not self._warned:
            self._warned = True
            warnings.warn(
                "remedy.step() is called between backward() and optimizer.step(): call it after optimizer.step(), "
                "else it is one step late",
                stacklevel=4,
            )
        self._events.append("update")


def attach(model: nn.Module, optimizer: object, method: Method | Schedule | str = "fire", **options: Any) -> Attachment:
    """Apply a method inside your own training loop; use it in a `with` block and call `.step()` in the loop.

    Args:
        model: the model that trains, or an `nn.ModuleDict` of several.
        optimizer: one, a list, or accelerate's wrapper.
        method: a method, a `Schedule`, or a name such as "fire".
        options: those of every integration: at, every, when, clock, monitor, guard, mirrors, mirrors_copy, rewarm,
            batches, loss, run, name (see `rekindle.integrations.Application`), and `log`, a function of (step, flat
            dict of numbers) that receives health and receipts.
    """
    if not isinstance(model, nn.Module):
        swapped = hasattr(model, "param_groups")
        raise TypeError(
            f"model is a torch module, got {type(model).__name__}"
            + (": the order is (model, optimizer, method)" if swapped else "")
        )
    if optimizer is None or isinstance(optimizer, str) or not callable(getattr(unwrap(optimizer)[0], "step", None)):
        raise TypeError("attach counts the steps of an optimizer: attach(model, optimizer, method)")
    unknown = options.keys() - inspect.signature(Application.__init__).parameters.keys() - {"log"}
    if unknown:
        names = inspect.signature(Application.__init__).parameters
        close = difflib.get_close_matches(min(unknown), names, 1)
        raise TypeError(f"attach() has no {min(unknown)}=" + (f": did you mean {close[0]}=?" if close else ""))
    return Attachment(model, optimizer, method, **options)
