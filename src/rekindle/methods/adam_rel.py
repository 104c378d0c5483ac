"""Adam-Rel: only the optimizer's clock starts again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rekindle import optimizers
from rekindle.cost import Meter
from rekindle.methods.parameters import chosen
from rekindle.methods.remedy import Remedy
from rekindle.receipt import Batch, Loss, Receipt
from rekindle.targets import Targets


class AdamRel(Remedy):
    """Adam with relative timesteps (Ellis et al., 2024): the step count becomes 0, moments and weights stay.

    When the objective changes, gradients jump; bias correction by a small step count then bounds the update, which
    an old count would let grow far beyond the learning rate. No weight is touched.

    >>> model = nn.Linear(2, 1)
    >>> adam = torch.optim.Adam(model.parameters())
    >>> model(torch.ones(1, 2)).sum().backward(); adam.step()
    >>> AdamRel()(model, adam).optimizer.reset, adam.state[model.weight]["step"].item()
    (2, 0.0)
    """

    name = "adam-rel"

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
        """Reset the step counts."""
        meter = Meter()
        if optimizer is None:
            raise ValueError("AdamRel changes the optimizer and nothing else: pass the optimizer")
        done = optimizers.reset(optimizer, chosen(model, self.targets), policy="step")
        return Receipt(self.name, (), {}, self.settings(), done, seconds=meter.seconds, memory=meter.memory)
