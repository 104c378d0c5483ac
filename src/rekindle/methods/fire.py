"""FIRE, the verb, as a method."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rekindle.methods.remedy import Remedy
from rekindle.projection.firing import fire
from rekindle.projection.receipt import Batch, Loss, Receipt


class FIRE(Remedy):
    """Frobenius-Isometry Reinitialization (Han et al., 2026): every targeted matrix becomes its nearest isometry.

    Takes the options of `rekindle.fire` (targets, scale, strength, solver, …). It draws nothing: the generator
    is not used. `recalibrate=True` re-estimates BatchNorm on the batches of the call.

    >>> model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> FIRE(scale="nearest")(model).changed
    ('0.weight',)
    """

    name = "fire"

    def __init__(self, *, recalibrate: bool = False, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed)
        self.recalibrate = recalibrate
        self._options = options

    def settings(self) -> dict[str, Any]:
        """The options that differ from the verb's defaults."""
        return {"recalibrate": self.recalibrate, **self._options}

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Apply `rekindle.fire`."""
        if self.recalibrate and batches is None:
            raise ValueError("recalibrate=True needs batches= to estimate the BatchNorm statistics on")
        return fire(model, optimizer, recalibrate=batches if self.recalibrate else None, **self._options)
