"""Weight decay: the arm that every comparison needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rekindle.methods.parameters import chosen
from rekindle.methods.regulariser import Regulariser, trainable
from rekindle.methods.remedy import PerModel
from rekindle.projection.targets import Targets


class WeightDecay(Regulariser):
    """(coefficient/2)·‖θ‖² (Krogh & Hertz, 1991); decoupled it is AdamW's θ ← (1 − lr·coefficient)·θ.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> _ = nn.init.ones_(model.weight)
    >>> _ = WeightDecay(0.1)(model, sgd)
    >>> round(model.weight.item(), 4)
    0.95
    """

    name = "weight-decay"

    def __init__(
        self, coefficient: float = 1e-2, *, decoupled: bool = True, targets: Targets = "trainable", seed: int = 0
    ) -> None:
        super().__init__(coefficient, decoupled=decoupled, seed=seed)
        self.targets = targets
        self._chosen: PerModel[list[Parameter]] = PerModel()

    def penalty(self, model: nn.Module) -> Tensor:
        """½‖θ‖² over the targets."""
        if model not in self._chosen:
            self._chosen[model] = list(trainable(chosen(model, self.targets)).values())
        return 0.5 * torch.stack([parameter.square().sum() for parameter in self._chosen[model]]).sum()
