"""Remedies in Lightning's Trainer: `Trainer(callbacks=[RekindleCallback("fire", every="epoch")])`.

Before the first batch of each optimizer step (`on_train_batch_start`) it acts if it is due. Metrics of triggers are
those that the module logs, under its names. Receipts and health go to the Trainer's loggers; the state is in its
checkpoints.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rekindle.extras import require
from rekindle.integrations import arguments
from rekindle.integrations.application import Application

_AVERAGES = ("WeightAveraging", "StochasticWeightAveraging")
_Callback: Any = require("lightning.pytorch", "lightning", "RekindleCallback for Lightning").Callback


class RekindleCallback(Application, _Callback):  # type: ignore[misc]
    """A method in a Lightning Trainer. The arguments are those of `rekindle.integrations.Application`.

    >>> RekindleCallback("fire", at=100).state_key
    "RekindleCallback{'name': 'fire'}"
    """

    @property
    def state_key(self) -> str:
        """Under which name the state is in a checkpoint."""
        return f"{type(self).__qualname__}{ ({'name': self.name})!r}"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Bind to the module and its optimizers."""

        def log(step: int, numbers: dict[str, float]) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=step)

        self._seen: dict[str, Any] = {}
        # FSDP1 wraps the module from outside.
        arguments.refuse_shards_of(trainer.model, trainer.optimizers, self.method)
        self._warn_of_averages(trainer)
        # With several optimizers global_step counts the updates of all of them.
        self._counts = len(trainer.optimizers) > 1
        step = self.steps_before if self._counts else trainer.global_step
        self.bind(pl_module, trainer.optimizers, step=step, log=log, closures=True, counting=self._counts)

    def on_train_batch_start(self, trainer: Any, pl_module: object, batch: object, batch_idx: int) -> None:
        """The place between two optimizer steps; the batches of one accumulation have the same `global_step`."""
        assert self.clock is not None
        if self._counts:
            self.clock.close()
        self.begin(self.clock.count if self._counts else trainer.global_step, trainer.current_epoch)

    def on_before_optimizer_step(self, trainer: object, pl_module: object, optimizer: Optimizer) -> None:
        """Gradients are there and unscaled, and not clipped yet."""
        self.before_step(optimizer)

    def on_train_batch_end(
        self, trainer: object, pl_module: object, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Metrics of training."""
        self._gather(trainer)

    def on_validation_end(self, trainer: object, pl_module: object) -> None:
        """Metrics of a validation."""
        self._gather(trainer)

    def on_train_end(self, trainer: object, pl_module: object) -> None:
        """Remove the hooks."""
        self.finish()

    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None:
        """The same when training is interrupted."""
        self.finish()

    def _warn_of_averages(self, trainer: Any) -> None:
        """An average of the weights that does not follow would bring the old ones back."""
        followed = {id(part) for mirror in self.what.mirrors.modules() for part in (mirror, *mirror.children())}
        for other in trainer.callbacks:
            if not any(kind.__name__ in _AVERAGES for kind in type(other).__mro__):
                continue
            held = [value for value in vars(other).values() if isinstance(value, nn.Module)]
            parts = {id(part) for module in held for part in (module, *module.children())}
            if not followed & parts and self.what.parts.keys() & {"event", "step"}:
                warnings.warn(
                    f"{type(other).__name__} averages the weights and does not follow what {self.name} changes: give "
                    "its model as mirrors= (a function that returns it, since it is made when training starts)",
                    stacklevel=2,
                )

    def _gather(self, trainer: Any) -> None:
        """Only what is new: Lightning keeps the last value of every metric, and each value must count once."""
        if self.when.trigger is None or trainer.sanity_checking:
            return
        metrics = dict(trainer.callback_metrics)
        self.note({key: value for key, value in metrics.items() if self._seen.get(key) is not value})
        self._seen = metrics
