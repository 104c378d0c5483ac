"""A control for FIRE: its norm without its directions."""

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


class Rescale(Remedy):
    """W ← W·(s·√k/‖W‖_F): the old weights with the norm that FIRE's result has, k = min(out, in).

    FIRE minus this control is what changing the *directions* is worth.

    >>> model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> _ = Rescale(scale=0.5)(model)
    >>> round(model[0].weight.norm().item(), 4)
    1.0
    """

    name = "rescale"

    def __init__(
        self,
        scale: str | float = "paper",
        *,
        targets: Targets = "auto",
        optimizer_state: str = "fresh",
        seed: int = 0,
    ) -> None:
        super().__init__(seed=seed)
        self._scale = Scale.parse(scale)
        self.scale, self.targets, self.optimizer_state = str(scale), targets, optimizer_state

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Give every targeted matrix FIRE's norm."""

        def change(name: str, block: Block, old: Tensor) -> Tensor:
            norm = torch.linalg.matrix_norm(old)[:, None, None]
            wanted = isometry_scale(self._scale, block, old) * block.smaller**0.5
            return torch.where(norm > 0, old * (wanted / norm.clamp_min(torch.finfo(old.dtype).tiny)), old)

        return rewrite(
            self.name,
            model,
            change,
            optimizer,
            targets=self.targets,
            policy=self.optimizer_state,
            settings=self.settings(),
        )
