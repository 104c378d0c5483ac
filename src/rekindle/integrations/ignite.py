"""Remedies in Ignite: `RekindleHandler("fire", every="epoch").attach(trainer, model, optimizer)`.

It acts before the first iteration of each optimizer step. Metrics of triggers are the engine's output ("loss" if it is
a number, else the entries of a dict), its `state.metrics`, and those of an evaluator if one is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rekindle.extras import require
from rekindle.integrations.application import Application, Log

_events = require("ignite.engine", "ignite", "RekindleHandler").Events


class RekindleHandler(Application):
    """A method in an Ignite engine. The arguments are those of `rekindle.integrations.Application`.

    >>> from ignite.engine import Engine
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def update(engine, batch):
    ...     optimizer.zero_grad()
    ...     loss = model(batch).mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss.item()
    >>> trainer = Engine(update)
    >>> handler = RekindleHandler("fire", at=3).attach(trainer, model, optimizer)
    >>> _ = trainer.run([torch.ones(2, 4)] * 5)
    >>> handler.firings
    [Firing(step=3, reason='at step 3')]
    """

    def attach(
        self, engine: Any, model: nn.Module, optimizer: object, *, evaluator: Any = None, log: Log | None = None
    ) -> RekindleHandler:
        """Listen to a trainer engine; `log(step, numbers)` receives health and receipts.

        For a checkpoint give the handler to Ignite's `Checkpoint` with the others: `{"rekindle": handler, …}`.
        """

        def start(engine: object) -> None:
            before = self.steps_before  # a trainer that continues keeps its count
            self.bind(model, optimizer, step=before, log=log)
            if before:
                self.continue_clock()

        def iteration(engine: Any) -> None:
            assert self.clock is not None
            self.clock.close()
            self.begin(self.clock.count, engine.state.epoch)

        def outcome(engine: Any) -> None:
            output = engine.state.output
            self.note(output if isinstance(output, Mapping) else {"loss": output})

        def metrics(engine: Any) -> None:
            self.note(engine.state.metrics)

        engine.add_event_handler(_events.STARTED, start)
        engine.add_event_handler(_events.ITERATION_STARTED, iteration)
        if self.when.trigger is not None:
            engine.add_event_handler(_events.ITERATION_COMPLETED, outcome)
            engine.add_event_handler(_events.EPOCH_COMPLETED, metrics)
        engine.add_event_handler(_events.COMPLETED, lambda engine: self.finish())
        engine.add_event_handler(_events.EXCEPTION_RAISED, self._stop)
        if evaluator is not None:
            evaluator.add_event_handler(_events.COMPLETED, metrics)
        return self

    def _stop(self, engine: object, error: BaseException) -> None:
        self.finish()
        raise error
