"""Hare and tortoise: reset to a slow average of the network's own weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.engine.devices import to_host
from rekindle.initial import tensors_of
from rekindle.methods.call import Call
from rekindle.methods.remedy import Observation, Remedy
from rekindle.methods.writing import overwrite
from rekindle.projection.method import Batch
from rekindle.projection.receipt import Receipt


class HareTortoise(Remedy):
    """The fast network (hare) is reset to its exponential average (tortoise) (Lee et al., 2024).

    tortoise ← momentum·tortoise + (1 − momentum)·hare after every step: by `update(model)`, or by `observe(model)`,
    which does it before every training forward pass. Calling the method copies the tortoise into the model;
    floating-point buffers are averaged along, so that BatchNorm statistics fit the weights. The authors do so every
    ten epochs and keep the optimizer's state. The tortoise itself (`tortoise()`) is the network to evaluate.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> method = HareTortoise(momentum=0.5)
    >>> for value in (1.0, 3.0):
    ...     _ = nn.init.constant_(model.weight, value)
    ...     method.update(model)
    >>> _ = method(model)
    >>> model.weight.item()
    2.0

    Args:
        momentum: of the average, per step.
        optimizer_state: what becomes of the state of changed parameters: "fresh", "moments", "step" or "none".
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "hare-tortoise"
    watches = True

    def __init__(self, momentum: float = 0.999, *, optimizer_state: str = "none", seed: int = 0) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} must be at least 0 and below 1")
        super().__init__(seed=seed)
        self.momentum, self.optimizer_state = momentum, optimizer_state
        self._average: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """One step of the average; the first call copies the present weights.

        It follows the hare to another dtype or device, and starts anew with a tensor whose shape changed. A tensor with
        NaN or Inf in it (a diverged step) is left out, since an average would keep them forever.
        """
        hare = _without_diverged(
            {name: tensor for name, tensor in tensors_of(model).items() if tensor.is_floating_point()}
        )
        before = self._average
        known = {n: before[n] for n, t in hare.items() if n in before and before[n].shape == t.shape}
        own = {n: t for n, t in tensors_of(model).items() if n in before and before[n].shape == t.shape}
        stays = {n: before[n].to(t) for n, t in own.items() if n not in hare}
        self._average = {n: known[n].to(t) if n in known else t.detach().clone() for n, t in hare.items()} | stays
        if known:
            torch._foreach_lerp_([self._average[n] for n in known], [hare[n] for n in known], 1 - self.momentum)

    def observe(self, model: nn.Module, batches: Iterable[Batch] | None = None) -> Observation:
        """Update before every forward pass in training mode until the result is removed."""

        def before(module: nn.Module, _: object) -> None:
            if module.training and torch.is_grad_enabled():
                self.update(module)

        return Observation([model.register_forward_pre_hook(before)])

    def tortoise(self) -> dict[str, Tensor]:
        """The average of every parameter and floating-point buffer so far."""
        if not self._average:
            raise ValueError("the tortoise has not started: call update(model) after steps, or train in observe(model)")
        return dict(self._average)

    def apply(self, call: Call) -> Receipt:
        """Copy the tortoise into the model."""
        average, own = self.tortoise(), tensors_of(call.model)
        if missing := [name for name, tensor in own.items() if tensor.is_floating_point() and name not in average]:
            raise ValueError(f"the tortoise has no {missing[0]!r}: the model changed since the last update(model)")
        new = {name: average[name].to(own[name]) for name in average if name in own}
        return overwrite(self.name, call, new, policy=self.optimizer_state)

    def gathered(self) -> dict[str, Any]:
        """The tortoise."""
        return {"average": dict(self._average)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._average = {name: tensor.clone() for name, tensor in state["average"].items()}


def _without_diverged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those without NaN or Inf; one answer from each device, not one per tensor."""
    filled = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    largest = torch._foreach_norm([t.detach() for t in filled.values()], float("inf"))
    values = to_host([each.reshape(1) for each in largest])
    return (
        tensors
        if all(map(_is_finite, values))
        else {name: tensor for (name, tensor), value in zip(filled.items(), values, strict=True) if _is_finite(value)}
    )


def _is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())
