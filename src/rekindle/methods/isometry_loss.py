"""The deviation from isometry as a continuous penalty."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rekindle.methods.matrices import Chosen, chosen_matrices, isometry_scale, with_gradient
from rekindle.methods.regulariser import Regulariser
from rekindle.methods.remedy import PerModel
from rekindle.scales import Scale
from rekindle.targets import Targets


class IsometryLoss(Regulariser):
    """coefficient·Σ DfI(W, s)/k over all matrices: what FIRE brings to zero at once, wanted a little at each step.

    DfI is ‖(W/s)(W/s)ᵀ − I‖²_F on the smaller side, s the scale rule's value (measured ones are taken from the
    present weights and get no gradient); `conv` looks at each tap or at the flattened kernel. Such penalties are
    the continuous alternative to projecting (AIPR; Rosseau, Müller & Nowé, 2026, whose AdamO is the decoupled form).

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> _ = nn.init.eye_(model[0].weight)
    >>> IsometryLoss(1.0).loss_term(model).item()
    0.0
    """

    name = "isometry-loss"

    def __init__(
        self,
        coefficient: float = 1e-3,
        scale: str | float = "paper",
        *,
        conv: str = "taps",
        decoupled: bool = False,
        targets: Targets = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(coefficient, decoupled=decoupled, seed=seed)
        self._scale = Scale.parse(scale)
        self.scale, self.conv, self.targets = str(scale), conv, targets
        self._chosen: PerModel[list[Chosen]] = PerModel()

    def penalty(self, model: nn.Module) -> Tensor:
        """The sum of DfI/k over all targeted matrices."""
        if model not in self._chosen:
            self._chosen[model] = chosen_matrices(model, self.targets, conv=self.conv)[0]
        terms = []
        for each in self._chosen[model]:
            weight = getattr(each.weight.owner, each.weight.tensor)
            for block in each.blocks:
                w = with_gradient(block, weight)
                w = w / isometry_scale(self._scale, block, w.detach())
                gram = w @ w.mT if block.out <= block.in_ else w.mT @ w
                eye = torch.eye(block.smaller, dtype=w.dtype, device=w.device)
                terms.append((gram - eye).square().sum() / block.smaller)
        return torch.stack(terms).sum()
