"""The deviation from isometry as a continuous penalty."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rekindle.methods.matrices import Chosen, chosen_matrices, isometry_scale, with_gradient
from rekindle.methods.regulariser import Regulariser
from rekindle.methods.remedy import PerModel
from rekindle.projection.scales import Scale
from rekindle.projection.targets import Targets


class IsometryLoss(Regulariser):
    """coefficient·Σ DfI(W, s)/k over all matrices: what FIRE brings to zero at once, wanted a little at each step.

    DfI is ‖(W/s)(W/s)ᵀ − I‖²_F on the smaller side, s the scale rule's value (measured ones are taken from the
    present weights and get no gradient); `conv` looks at each tap or at the flattened kernel. Divided by k, the smaller
    side, one coefficient suits layers of every width; `per_dimension=False` leaves that out.

    `IsometryLoss(coefficient, 1.0, per_dimension=False)` is the penalty of Rosseau, Müller & Nowé (2026,
    arXiv:2606.09762), and with `decoupled=True` beside Adam it is their AdamO: the moments see the gradient of the
    task alone, the penalty's gradient is subtracted by itself, times the learning rate (here after Adam's step and at
    the point that it reached; theirs is taken before it, which differs by the square of the learning rate).

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
        per_dimension: bool = True,
        decoupled: bool = False,
        targets: Targets = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(coefficient, decoupled=decoupled, seed=seed)
        self._scale = Scale.parse(scale)
        self.scale, self.conv, self.targets = str(scale), conv, targets
        self.per_dimension = per_dimension
        self._chosen: PerModel[list[Chosen]] = PerModel()

    def penalty(self, model: nn.Module) -> Tensor:
        """The sum of DfI, per dimension or plain, over all targeted matrices."""
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
                terms.append((gram - eye).square().sum() / (block.smaller if self.per_dimension else 1))
        return torch.stack(terms).sum()
