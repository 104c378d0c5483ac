"""UPGD: protect useful weights, perturb the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rekindle.cost import Meter
from rekindle.methods.parameters import chosen
from rekindle.methods.remedy import PerModel, Remedy
from rekindle.receipt import Batch, BlockRecord, Loss, Receipt, StateReset
from rekindle.targets import Targets


class UPGD(Remedy):
    """Utility-based perturbed gradient descent (Elsayed & Mahmood, 2024), between backward and optimizer step.

    u ← β·u + (1 − β)·(−g·w), û = u/(1 − β^t), s = sigmoid(û / max û over all weights); then
    g ← (g + σ·ξ)·(1 − s) with ξ ~ N(0, 1). With plain SGD the step is the paper's first-order global UPGD
    w ← w − lr·(g + σ·ξ)(1 − s), weight decay being SGD's own; another optimizer gets the same gated gradient.

    >>> model = nn.Linear(2, 1)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> before = model.weight.grad.clone()
    >>> _ = UPGD(sigma=0.0)(model)
    >>> bool((model.weight.grad.abs() < before.abs()).all())
    True
    """

    name = "upgd"
    moment = "backward"

    def __init__(
        self, sigma: float = 0.001, beta_utility: float = 0.999, *, targets: Targets = "trainable", seed: int = 0
    ) -> None:
        if not 0 <= beta_utility < 1:
            raise ValueError(f"beta_utility={beta_utility} must be at least 0 and below 1")
        if sigma < 0:
            raise ValueError(f"sigma={sigma} must not be negative")
        super().__init__(seed=seed)
        self.sigma, self.beta_utility, self.targets = sigma, beta_utility, targets
        self._utility: dict[str, Tensor] = {}
        self._chosen: PerModel[dict[str, Parameter]] = PerModel()

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Update the utilities and gate the gradients in place."""
        meter = Meter()
        if model not in self._chosen:
            self._chosen[model] = chosen(model, self.targets)
        weights = {n: p for n, p in self._chosen[model].items() if p.grad is not None}
        if not weights:
            raise ValueError("no gradient to gate: call UPGD between backward() and optimizer.step()")
        draws = self.draws(generator)
        with torch.no_grad():
            highest = self._update(weights)
            for name, parameter in weights.items():
                assert parameter.grad is not None
                gate = torch.sigmoid(self._utility[name] / highest).neg_().add_(1)
                if self.sigma:
                    parameter.grad.add_(_normal(parameter, draws), alpha=self.sigma)
                parameter.grad.mul_(gate)
        records = tuple(BlockRecord(name, counts={"gated weights": p.numel()}) for name, p in weights.items())
        return Receipt(
            self.name, records, {}, self.settings(), StateReset("none"), seconds=meter.seconds, memory=meter.memory
        )

    def _update(self, weights: Mapping[str, Parameter]) -> Tensor:
        """Renew the utilities; the largest of all, uncorrected: the correction cancels in the ratio."""
        highest = []
        for name, parameter in weights.items():
            assert parameter.grad is not None
            utility = self._utility.setdefault(name, torch.zeros_like(parameter))
            utility.mul_(self.beta_utility).addcmul_(parameter.grad, parameter, value=self.beta_utility - 1)
            highest.append(utility.max())
        top = torch.stack(highest).max()
        return torch.where(top == 0, torch.ones_like(top), top)

    def gathered(self) -> dict[str, Any]:
        """The utilities."""
        return {"utility": dict(self._utility)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._utility = {name: value.clone() for name, value in state["utility"].items()}


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(like.shape, generator=generator, device=generator.device, dtype=torch.float32)
    return noise.to(like)
