"""A loss term that pulls matrices towards isometries, a little at each step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rekindle.blocks.finding import Conv
from rekindle.methods.caching import PerModel
from rekindle.methods.regularizers import Regularizer
from rekindle.methods.selection import chosen_weights, matrices_of
from rekindle.methods.writing import isometry_scale
from rekindle.projection.scales import Scale
from rekindle.projection.stores import LiveWeight
from rekindle.projection.targets import Targets


class IsometryLoss(Regularizer):
    """coefficient·Σ DfI(W, s)/k over all matrices: FIRE brings it to zero at once, this loss a little at each step.

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

    Args:
        coefficient: weight of the penalty.
        scale: the scale rule s, as in `rekindle.fire`.
        conv: "taps" or "flat", how a kernel is read as matrices.
        per_dimension: divide each DfI by the smaller side.
        decoupled: subtract the gradient after the optimizer's step, times its learning rate, in place of a loss term.
        targets: which weights, as in `rekindle.fire`.
        seed: of the method's own random numbers.
    """

    name = "isometry-loss"

    def __init__(
        self,
        coefficient: float = 1e-3,
        scale: str | float = "paper",
        *,
        conv: Conv = "taps",
        per_dimension: bool = True,
        decoupled: bool = False,
        targets: Targets = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(coefficient, decoupled=decoupled, seed=seed)
        self._scale = Scale.parse(scale)
        self.scale, self.conv, self.targets = str(scale), conv, targets
        self.per_dimension = per_dimension
        self._chosen: PerModel[list[LiveWeight]] = PerModel()

    def penalty(self, model: nn.Module) -> Tensor:
        """The sum of DfI, per dimension or plain, over all targeted matrices."""
        chosen = self._chosen.get(model, lambda: chosen_weights(model, self.targets, conv=self.conv)[0])
        terms = []
        for block, matrices in (pair for each in chosen for pair in matrices_of(each)):
            w = matrices / isometry_scale(self._scale, block, matrices.detach())
            gram = w @ w.mT if block.out <= block.in_ else w.mT @ w
            eye = torch.eye(block.smaller, dtype=w.dtype, device=w.device)
            terms.append((gram - eye).square().sum() / (block.smaller if self.per_dimension else 1))
        return torch.stack(terms).sum()
