"""Remedies in your own training loop, with or without accelerate.

>>> import torch, rekindle
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
>>> optimizer = torch.optim.Adam(model.parameters())
>>> with rekindle.attach(model, optimizer, method="fire", every=3) as remedy:
...     for _ in range(7):
...         loss = model(torch.ones(2, 4)).square().mean()
...         loss.backward()
...         optimizer.step()
...         optimizer.zero_grad()
...         _ = remedy.step(loss=loss)
>>> [firing.step for firing in remedy.firings]
[3, 6]
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import nn

from rekindle.integrations.application import Application, Log
from rekindle.monitoring.schedules import Schedule
from rekindle.projection.method import Method
from rekindle.projection.receipt import Receipt


class Attachment(Application):
    """An `Application` on one model and optimizer; `step()` is called after each optimizer step."""

    def __init__(
        self, model: nn.Module, optimizer: Any, method: Any, *, log: Log | None = None, **options: Any
    ) -> None:
        super().__init__(method, **options)
        if 0 in self._at:
            raise ValueError("at=0 is before the loop: call the method there, rekindle.fire(model, optimizer)")
        self._calls = 0
        self.bind(model, optimizer, log=log)
        self._considered, self._epoch = 0, 0

    @property
    def steps(self) -> int:
        """Optimizer steps so far: as the optimizers took them, else (no torch optimizer) the calls of `step`."""
        assert self._rounds is not None, "the attachment is closed"
        return self._rounds.count if self._rounds.watched else self._calls

    def step(
        self, metrics: Mapping[str, Any] | None = None, /, *, epoch: int | None = None, **more: Any
    ) -> Receipt | None:
        """After `optimizer.step()`: act if it is due, and return the receipt.

        Metrics for the trigger come as a mapping, as keywords, or both. While gradients are accumulated it may be
        called after each batch: only steps that the optimizer took count.
        """
        assert self._rounds is not None, "the attachment is closed"
        self._rounds.close()
        self._calls += 1
        self.note({**(metrics or {}), **more})
        return self.begin(self.steps, epoch)

    def boundary(self, reason: str = "task boundary") -> Receipt | None:  # type: ignore[override]
        """A task or data set ends here: the method acts now (or the trigger is evaluated now)."""
        super().boundary(reason)
        return self._decide(self.steps, self._epoch)  # what else is due at this step is not done twice

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()


def attach(model: nn.Module, optimizer: Any, method: Method | Schedule | str = "fire", **options: Any) -> Attachment:
    """Apply a method inside your own training loop; use it in a `with` block and call `.step()` in the loop.

    optimizer: one, a list, or accelerate's wrapper. Options are those of every integration: at, every, when, monitor,
    guard, mirrors, rewarm, batches, loss, name (see `rekindle.integrations.Application`), and `log`, a function of
    (step, flat dict of numbers) that receives health and receipts.
    """
    return Attachment(model, optimizer, method, **options)
