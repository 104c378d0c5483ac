"""Hare and tortoise: go back to a slow average of oneself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.blocks.names import named_parameters
from rekindle.initial import tensors_of
from rekindle.methods.neurons import Observation
from rekindle.methods.parameters import overwrite
from rekindle.methods.remedy import PerModel, Remedy
from rekindle.projection.receipt import Batch, Loss, Meter, Receipt


class HareTortoise(Remedy):
    """The fast network (hare) is reset to its exponential average (tortoise) (Lee et al., 2024).

    tortoise ← momentum·tortoise + (1 − momentum)·hare after every step: by `update(model)`, or by `observe(model)`,
    which does it before every training forward pass. Calling the method copies the tortoise into the model;
    floating-point buffers are averaged along, so that BatchNorm statistics fit the weights. The authors do so every
    ten epochs and leave the optimizer's state alone. The tortoise itself (`tortoise()`) is the network to evaluate.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> method = HareTortoise(momentum=0.5)
    >>> for value in (1.0, 3.0):
    ...     _ = nn.init.constant_(model.weight, value)
    ...     method.update(model)
    >>> _ = method(model)
    >>> model.weight.item()
    2.0
    """

    name = "hare-tortoise"

    def __init__(self, momentum: float = 0.999, *, optimizer_state: str = "none", seed: int = 0) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} must be at least 0 and below 1")
        super().__init__(seed=seed)
        self.momentum, self.optimizer_state = momentum, optimizer_state
        self._average: dict[str, Tensor] = {}
        self._hares: PerModel[dict[str, Tensor]] = PerModel()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Let the tortoise take one step; the first time it stands where the hare is."""
        if model not in self._hares:
            self._hares[model] = {n: t for n, t in tensors_of(model).items() if t.is_floating_point()}
        hare = self._hares[model]
        if not self._average:
            self._average = {name: tensor.detach().clone() for name, tensor in hare.items()}
            return
        torch._foreach_lerp_([self._average[name] for name in hare], list(hare.values()), 1 - self.momentum)

    def observe(self, model: nn.Module, batches: Iterable[Batch] | None = None) -> Observation:
        """Update before every forward pass in training mode until the result is removed."""

        def before(module: nn.Module, _: Any) -> None:
            if module.training and torch.is_grad_enabled():
                self.update(module)

        return Observation([model.register_forward_pre_hook(before)])

    def tortoise(self) -> dict[str, Tensor]:
        """The average of every parameter and floating-point buffer so far."""
        if not self._average:
            raise ValueError("the tortoise has not started: call update(model) after steps, or train in observe(model)")
        return dict(self._average)

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Copy the tortoise into the model."""
        meter = Meter()
        average = self.tortoise()
        parameters = {name for name, _ in named_parameters(model)}
        return overwrite(
            self.name,
            model,
            {name: value for name, value in average.items() if name in parameters},
            optimizer,
            policy=self.optimizer_state,
            buffers={name: value for name, value in average.items() if name not in parameters},
            settings=self.settings(),
            meter=meter,
        )

    def gathered(self) -> dict[str, Any]:
        """The tortoise."""
        return {"average": dict(self._average)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._average = {name: tensor.clone() for name, tensor in state["average"].items()}
