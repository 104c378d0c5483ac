"""L2 init: decay towards the initial weights instead of zero."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rekindle.methods.parameters import chosen
from rekindle.methods.regulariser import Regulariser, trainable
from rekindle.methods.remedy import FromStart, PerModel
from rekindle.projection.targets import Targets


class L2Init(Regulariser, FromStart):
    """Regenerative regularisation (Kumar, Marklund & Van Roy, 2023): coefficient·‖θ − θ₀‖².

    θ₀ is the stored start: `remember(model)` while the model is new, or `initial=`.

    >>> model = nn.Linear(2, 2)
    >>> method = L2Init(0.1)
    >>> method.remember(model)
    >>> method.loss_term(model).item()
    0.0
    """

    name = "l2-init"

    def __init__(
        self,
        coefficient: float = 1e-3,
        *,
        decoupled: bool = False,
        targets: Targets = "trainable",
        initial: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        Regulariser.__init__(self, coefficient, decoupled=decoupled, seed=seed)
        self._initial = dict(initial) if initial is not None else None
        self._fresh = None
        self.targets = targets
        self._pairs: PerModel[list[tuple[Tensor, Tensor]]] = PerModel()

    def remember(self, model: nn.Module) -> None:
        """Store the model's present parameters as θ₀."""
        super().remember(model)
        self._pairs.clear()

    def penalty(self, model: nn.Module) -> Tensor:
        """‖θ − θ₀‖² over the targets."""
        if model not in self._pairs:
            now = trainable(chosen(model, self.targets))
            start = self.stored(model, now)
            self._pairs[model] = [(parameter, start[name]) for name, parameter in now.items()]
        return torch.stack([(now - start).square().sum() for now, start in self._pairs[model]]).sum()
