"""Only the optimizer starts again: the control for every remedy that comes with a new optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from rekindle.methods.parameters import chosen
from rekindle.methods.remedy import Remedy
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.receipt import Batch, Loss, Meter, Receipt
from rekindle.projection.targets import Targets


class OptimizerReset(Remedy):
    """All weights stay, all optimizer state of the targets is dropped, as if the optimizer were new.

    What a remedy gains beyond this is its own.

    >>> model = nn.Linear(2, 1)
    >>> adam = torch.optim.Adam(model.parameters())
    >>> model(torch.ones(1, 2)).sum().backward(); adam.step()
    >>> OptimizerReset()(model, adam).optimizer.parameters, adam.state[model.weight]["exp_avg"].abs().max().item()
    (2, 0.0)
    """

    name = "optimizer-reset"
    policy: ClassVar[str] = "fresh"

    def __init__(self, *, targets: Targets = "trainable", seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.targets = targets

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Reset the state that `policy` names."""
        meter = Meter()
        if optimizer is None:
            raise ValueError(f"{type(self).__name__} changes the optimizer and nothing else: pass the optimizer")
        done = optimizers.reset(optimizer, chosen(model, self.targets), policy=self.policy)
        return Receipt(self.name, (), {}, self.settings(), done, seconds=meter.seconds, memory=meter.memory)
