"""A control for FIRE: a fresh draw that keeps the old norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.blocks.finding import Block
from rekindle.methods.matrices import chosen_matrices, rewrite
from rekindle.methods.remedy import FromStart
from rekindle.projection.receipt import Batch, Loss, Receipt
from rekindle.projection.targets import Targets


class FreshAtNorm(FromStart):
    """W ← D·(‖W‖_F/‖D‖_F) for each matrix, D drawn anew by the layer's own scheme.

    Its difference to a full reset is what the *norm* that training gave the weights is worth.

    >>> model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> before = model[0].weight.detach().clone()
    >>> _ = FreshAtNorm()(model)
    >>> torch.allclose(before, model[0].weight), torch.allclose(before.norm(), model[0].weight.norm())
    (False, True)
    """

    name = "fresh-at-norm"

    def __init__(
        self,
        *,
        targets: Targets = "auto",
        fresh: Callable[[], nn.Module] | None = None,
        optimizer_state: str = "fresh",
        seed: int = 0,
    ) -> None:
        super().__init__(fresh=fresh, seed=seed)
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
        """Draw every targeted matrix anew at its old norm."""
        picked, _ = chosen_matrices(model, self.targets)
        if computed := [c.found.name for c in picked if c.weight.computed]:
            raise ValueError(f"{computed[0]!r} is parametrised: leave it out with targets=")
        drawn = self.drawn(model, [c.found.name for c in picked], self.draws(generator))

        def change(name: str, block: Block, old: Tensor) -> Tensor:
            new = block.read(drawn[name]).to(old)
            ratio: Tensor = torch.linalg.matrix_norm(old) / torch.linalg.matrix_norm(new)
            return new * ratio.nan_to_num(0.0, 0.0, 0.0)[:, None, None]

        return rewrite(
            self.name,
            model,
            change,
            optimizer,
            targets=self.targets,
            policy=self.optimizer_state,
            settings=self.settings(),
        )
