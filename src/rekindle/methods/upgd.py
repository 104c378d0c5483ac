"""UPGD: protect useful weights, perturb the others."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from rekindle.methods.caching import PerModel
from rekindle.methods.call import Call
from rekindle.methods.remedy import Remedy
from rekindle.methods.selection import Share, chosen_parameters
from rekindle.optimizers import StateReset
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.receipt import BlockRecord, Receipt
from rekindle.projection.targets import Targets


class UPGD(Remedy):
    """Utility-based perturbed gradient descent (Elsayed & Mahmood, 2024), between backward and optimizer step.

    u ← β·u + (1 − β)·(−g·w), û = u/(1 − β^t), s = sigmoid(û / max û over all weights); then
    w ← w − lr·(g + σ·ξ)(1 − s) with ξ ~ N(0, 1): first-order, global UPGD. With SGD (or no optimizer) the gradient is
    gated in place and SGD's own weight decay is not. Any other optimizer would normalise the gate away, so there, as in
    the authors' adaptive form, its moments see the plain gradient, and the change that its step makes is gated and
    perturbed when the step has been taken; decoupled weight decay is not gated. (The authors' code divides û by the
    largest u instead of the largest û, which differs for the first 1/(1 − β) steps.)

    >>> model = torch.nn.Linear(2, 1)
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
        self._owners: dict[str, weakref.ref[Tensor]] = {}  # whose utility it is
        self._waiting: list[RemovableHandle] = []
        self._chosen: PerModel[tuple[dict[str, Share], dict[str, str]]] = PerModel()

    def apply(self, call: Call) -> Receipt:
        """Update the utilities, and gate the gradients in place or the step to come."""
        chosen, skipped = self._chosen.get(call.model, lambda: chosen_parameters(call.model, self.targets))
        shares = {n: share for n, share in chosen.items() if share.parameter.grad is not None}
        if not shares:
            raise ValueError("no gradient to gate: call UPGD between backward() and optimizer.step()")
        for hook in self._waiting:  # a step that was never taken
            hook.remove()
        self._waiting = []
        gradients = {name: _gradient(share) for name, share in shares.items()}
        if bad := _not_finite(gradients):
            # A gradient scaler skips this step; in an average of utilities NaN would stay forever.
            note = f"{len(bad)} gradients hold NaN or Inf ({bad[0]}, …): utilities and gradients stay as they were"
            return Receipt(self.name, (), skipped, optimizer=StateReset("none"), notes=(note,))
        # An optimizer that is not torch's has no step hook, and gets the gated gradient.
        opened = [each for each in optimizers.unwrap(call.optimizer) if hasattr(each, "register_step_post_hook")]
        adaptive = [each for each in opened if not isinstance(each, torch.optim.SGD)]
        later = {id(parameter) for each in adaptive for group in each.param_groups for parameter in group["params"]}
        gates: dict[int, tuple[Tensor, Tensor | None, Tensor]] = {}
        with torch.no_grad():
            highest = self._update(shares)
            for name, share in shares.items():
                parameter, gradient = share.parameter, gradients[name]
                gate = torch.div(self._utility[name], -highest).sigmoid_()  # 1 − sigmoid(x) = sigmoid(−x)
                noise = _normal(parameter, call.generator).mul_(self.sigma) if self.sigma else None
                if share.mask is not None:
                    gate.masked_fill_(~share.mask, 1)
                    noise = None if noise is None else noise.mul_(share.mask)
                if id(parameter) in later:
                    gates[id(parameter)] = gate, noise, parameter.detach().clone()
                    continue
                if noise is not None:
                    gradient.add_(noise)
                gradient.mul_(gate)
        self._waiting = [each.register_step_post_hook(partial(_gate_step, gates)) for each in adaptive]
        records = [BlockRecord(n, counts={"gated weights": s.of(s.parameter).numel()}) for n, s in shares.items()]
        return Receipt(self.name, tuple(records), skipped, optimizer=StateReset("none"))

    def _update(self, shares: Mapping[str, Share]) -> Tensor:
        """Renew the utilities; the largest of all, uncorrected: the correction cancels in the ratio."""
        for name, share in shares.items():
            parameter, owner = share.parameter, self._owners.get(name)
            if name not in self._utility or (owner is not None and owner() is not parameter):
                self._utility[name] = torch.zeros_like(parameter)
            self._owners[name] = weakref.ref(parameter)
            self._utility[name] = self._utility[name].to(parameter)
        utilities = [self._utility[name] for name in shares]
        torch._foreach_mul_(utilities, self.beta_utility)
        gradients = [_gradient(share) for share in shares.values()]
        weights: list[Tensor] = [share.parameter for share in shares.values()]
        torch._foreach_addcmul_(utilities, gradients, weights, value=self.beta_utility - 1)
        highest = [share.of(utility).max() for share, utility in zip(shares.values(), utilities, strict=True)]
        top = torch.stack(highest).max()
        return torch.where(top == 0, torch.ones_like(top), top)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owners": {}, "_waiting": []}  # neither references nor hooks can be copied

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
            change = parameter.sub(before)
            if noise is not None:
                change.add_(noise, alpha=-float(group["lr"]))
            torch.addcmul(before, change, gate, out=parameter)


def _not_finite(gradients: Mapping[str, Tensor]) -> list[str]:
    """The names of gradients with NaN or Inf; the largest of each is asked for first, all at once."""
    largest = torch._foreach_norm(list(gradients.values()), torch.inf)
    if math.isfinite(sum(each.item() for each in largest)):
        return []
    return [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]


def _gradient(share: Share) -> Tensor:
    assert share.parameter.grad is not None
    return share.parameter.grad


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(like.shape, generator=generator, device=generator.device, dtype=torch.float32)
    return noise.to(like)
