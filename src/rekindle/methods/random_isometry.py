"""A control for FIRE: an isometry that knows nothing of the old weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.blocks.finding import Block
from rekindle.methods.diversity import orthogonal_
from rekindle.methods.matrices import isometry_scale, rewrite
from rekindle.methods.remedy import Remedy
from rekindle.projection.receipt import Batch, Loss, Receipt
from rekindle.projection.scales import Scale
from rekindle.projection.targets import Targets


class RandomIsometry(Remedy):
    """W ← s·Q with Q drawn uniformly from the isometries, at the scale that FIRE would use.

    FIRE minus this control is what *nearness* to the old weights is worth. It has FIRE's targets and scales;
    matrices that are wholly zero are left so, as FIRE leaves them.

    >>> model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> _ = RandomIsometry()(model)
    >>> w = model[0].weight
    >>> torch.allclose(w @ w.T, 4 / 6 * torch.eye(4), atol=1e-5)
    True
    """

    name = "random-isometry"

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
        """Draw an isometry for every targeted matrix."""
        draws = self.draws(generator)

        def change(name: str, block: Block, old: Tensor) -> Tensor:
            new = orthogonal_(torch.empty_like(old), generator=draws) * isometry_scale(self._scale, block, old)
            return torch.where(old.any(-1).any(-1)[:, None, None], new, old)

        return rewrite(
            self.name,
            model,
            change,
            optimizer,
            targets=self.targets,
            policy=self.optimizer_state,
            settings=self.settings(),
        )
