"""UPGD: protect useful weights, perturb the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from rekindle.methods.parameters import chosen
from rekindle.methods.remedy import PerModel, Remedy
from rekindle.optimizers import StateReset
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.receipt import Batch, BlockRecord, Loss, Meter, Receipt
from rekindle.projection.targets import Targets


class UPGD(Remedy):
    """Utility-based perturbed gradient descent (Elsayed & Mahmood, 2024), between backward and optimizer step.

    u ← β·u + (1 − β)·(−g·w), û = u/(1 − β^t), s = sigmoid(û / max û over all weights); then
    w ← w − lr·(g + σ·ξ)(1 − s) with ξ ~ N(0, 1): first-order, global UPGD. With SGD (or no optimizer) the gradient is
    gated in place and SGD's own weight decay is not. Any other optimizer would divide the gate away again, so there,
    as in the authors' adaptive form, its moments see the plain gradient, and the change that its step makes is gated
    and perturbed when the step has been taken; decoupled weight decay is not gated.
    (The authors' code divides û by the largest u instead of the largest û, which differs for the first 1/(1 − β)
    steps.)

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
        self._waiting: list[RemovableHandle] = []
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
        """Update the utilities, and gate the gradients in place or the step to come."""
        meter = Meter()
        if model not in self._chosen:
            self._chosen[model] = chosen(model, self.targets)
        weights = {n: p for n, p in self._chosen[model].items() if p.grad is not None}
        if not weights:
            raise ValueError("no gradient to gate: call UPGD between backward() and optimizer.step()")
        draws = self.draws(generator)
        for hook in self._waiting:  # a step that was never taken
            hook.remove()
        self._waiting = []
        # What is no torch optimizer has no hook to wait for, and gets the gated gradient.
        opened = [each for each in optimizers.unwrap(optimizer) if hasattr(each, "register_step_post_hook")]
        adaptive = [each for each in opened if not isinstance(each, torch.optim.SGD)]
        later = {id(parameter) for each in adaptive for group in each.param_groups for parameter in group["params"]}
        gates: dict[int, tuple[Tensor, Tensor | None, Tensor]] = {}
        with torch.no_grad():
            highest = self._update(weights)
            for name, parameter in weights.items():
                assert parameter.grad is not None
                gate = torch.sigmoid(self._utility[name] / highest).neg_().add_(1)
                noise = _normal(parameter, draws).mul_(self.sigma) if self.sigma else None
                if id(parameter) in later:
                    gates[id(parameter)] = gate, noise, parameter.detach().clone()
                    continue
                if noise is not None:
                    parameter.grad.add_(noise)
                parameter.grad.mul_(gate)
        self._waiting = [each.register_step_post_hook(partial(_gate_step, gates)) for each in adaptive]
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


@torch.no_grad()
def _gate_step(gates: dict[int, tuple[Tensor, Tensor | None, Tensor]], optimizer: Any, *_: Any) -> None:
    """w ← w₀ + (w − w₀)·(1 − s) − lr·σ·ξ·(1 − s), once, where w₀ is the weight before the step, decayed."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in gates:
                continue
            gate, noise, before = gates.pop(id(parameter))
            if isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay"):
                before.mul_(1 - group["lr"] * group["weight_decay"])
            change = parameter - before
            if noise is not None:
                change.sub_(noise * group["lr"])
            parameter.copy_(before.addcmul_(change, gate))


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(like.shape, generator=generator, device=generator.device, dtype=torch.float32)
    return noise.to(like)
