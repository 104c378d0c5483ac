"""Singular value clipping: a spectrum between two bounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.blocks.finding import Block
from rekindle.methods.matrices import isometry_scale, rewrite
from rekindle.methods.remedy import Remedy
from rekindle.projection.receipt import Batch, Loss, Receipt
from rekindle.projection.scales import Scale
from rekindle.projection.targets import Targets


class SingularClip(Remedy):
    """W = UΣVᵀ ← U·clip(Σ, low·s, high·s)·Vᵀ, s the value of the scale rule.

    With low = 0 and s = 1 this is the clipping of Saito, Matsumoto & Saito (2017), but tap by tap where they flatten
    a convolution, and without their bound on BatchNorm's scales. A positive `low` also lifts directions that have died
    out, and low = high = 1 is FIRE. The singular vectors stay. The optimizer's state is kept, since weights inside the
    bounds do not move.

    >>> model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 1))
    >>> _ = model[0].weight.data.copy_(torch.diag(torch.tensor([3.0, 1.0, 0.1])))
    >>> _ = SingularClip(low=0.5, high=2.0, scale=1.0)(model)
    >>> [round(v, 4) for v in torch.linalg.svdvals(model[0].weight).tolist()]
    [2.0, 1.0, 0.5]
    """

    name = "singular-clip"

    def __init__(
        self,
        low: float = 0.0,
        high: float = 1.0,
        scale: str | float = 1.0,
        *,
        targets: Targets = "auto",
        optimizer_state: str = "none",
        seed: int = 0,
    ) -> None:
        if not 0 <= low <= high:
            raise ValueError(f"low={low} and high={high}: need 0 ≤ low ≤ high")
        super().__init__(seed=seed)
        self._scale = Scale.parse(scale)
        self.low, self.high, self.scale = low, high, str(scale)
        self.targets, self.optimizer_state = targets, optimizer_state

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Clip the spectrum of every targeted matrix."""

        def change(name: str, block: Block, old: Tensor) -> Tensor:
            u, values, v = torch.linalg.svd(old, full_matrices=False)
            s = isometry_scale(self._scale, block, old)[:, :, 0]
            clipped = values.clamp(self.low * s, self.high * s)
            # A matrix inside the bounds keeps its bits.
            inside = (clipped == values).all(-1)[:, None, None]
            return torch.where(inside, old, (u * clipped[:, None, :]) @ v)

        return rewrite(
            self.name,
            model,
            change,
            optimizer,
            targets=self.targets,
            policy=self.optimizer_state,
            settings=self.settings(),
        )
