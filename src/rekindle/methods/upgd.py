"""UPGD: protect useful weights, perturb the others."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rekindle.methods.caching import PerModel
from rekindle.methods.call import Call
from rekindle.methods.remedy import Remedy, taken_off
from rekindle.methods.selection import Share, chosen_parameters
from rekindle.optimizers import StateReset
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.receipt import BlockRecord, Receipt
from rekindle.projection.targets import Targets


class UPGD(Remedy):
    """Utility-based perturbed gradient descent (Elsayed & Mahmood, 2024), between backward and optimizer step.

    u ← β·u + (1 − β)·(−g·w), û = u/(1 − β^t), s = sigmoid(û / max û over all weights); then
    w ← w − lr·(g + σ·ξ)(1 − s) with ξ ~ N(0, 1): first-order, global UPGD. With SGD (or no optimizer) the gradient is
    gated in place and SGD's own weight decay is not. Any other optimizer would normalize the gate away, so there, as in
    the authors' adaptive form, its moments see the plain gradient, and the change that its step makes is gated and
    perturbed when the step has been taken; decoupled weight decay is not gated. (The authors' code divides û by the
    largest u instead of the largest û, which differs for the first 1/(1 − β) steps.)

    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> before = model.weight.grad.clone()
    >>> _ = UPGD(sigma=0.0)(model)
    >>> bool((model.weight.grad.abs() < before.abs()).all())
    True

    Args:
        sigma: standard deviation of the noise.
        beta_utility: β of the running average of utilities.
        targets: which weights, as in `rekindle.fire`.
        seed: of the method's own random numbers.
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
        self._rows: list[_Row] = []
        self._records: tuple[BlockRecord, ...] = ()
        self._laid_out: tuple[Any, ...] = ()  # the parameters and optimizers that the rows are of

    def transaction(self, call: Call) -> AbstractContextManager[object]:
        """Around the gating of gradients alone: before an adaptive optimizer's step nothing is written."""
        return taken_off(lambda: self._waiting)

    def admit(self, model: nn.Module) -> None:
        """Done where the parameters are chosen."""

    @torch.no_grad()
    def apply(self, call: Call) -> Receipt:
        """Update the utilities, and gate the gradients in place or the step to come."""
        chosen, skipped = self._chosen.get(call.model, lambda: self._choose(call.model))
        shares = [share for share in chosen.values() if share.parameter.grad is not None]
        if not shares:
            raise ValueError("no gradient to gate: call UPGD between backward() and optimizer.step()")
        for hook in self._waiting:  # a step that was never taken
            hook.remove()
        self._waiting = []
        # An optimizer that is not torch's has no step hook, and gets the gated gradient.
        opened = [each for each in optimizers.unwrap(call.optimizer) if hasattr(each, "register_step_post_hook")]
        adaptive = [each for each in opened if not isinstance(each, torch.optim.SGD)]
        rows = self._rows_of(shares, adaptive)
        if not math.isfinite(sum(row.read() for row in rows)) and (bad := _not_finite(shares)):
            # A gradient scaler skips this step; in an average of utilities NaN would stay forever.
            note = f"{len(bad)} gradients hold NaN or Inf ({bad[0]}, …): utilities and gradients stay as they were"
            return Receipt(self.name, (), skipped, optimizer=StateReset("none"), notes=(note,))
        # The largest of all, uncorrected: the correction cancels in the ratio.
        highest = max(row.renew(self.beta_utility) for row in rows) or 1.0
        for row in rows:
            row.draw(highest, self.sigma, call.generator)
        now = [row for row in rows if row.optimizer is None]
        if now:
            with super().transaction(call):
                for row in now:
                    row.gate_gradients()
        for optimizer in adaptive:
            mine = [row for row in rows if row.optimizer is optimizer]
            self._waiting.append(optimizer.register_step_post_hook(partial(_gate_step, mine)))
        return Receipt(self.name, self._records, skipped, optimizer=StateReset("none"))

    def _choose(self, model: nn.Module) -> tuple[dict[str, Share], dict[str, str]]:
        self.refuse(model)
        return chosen_parameters(model, self.targets)

    def _rows_of(self, shares: Sequence[Share], adaptive: Sequence[Any]) -> list[_Row]:
        """The shares side by side, kept from step to step: one row per group of an adaptive optimizer and kind.

        A handful of operations on one long row take a third of the time of the same on each small parameter.
        """
        laid_out = (*adaptive, *(share.parameter for share in shares))
        if len(laid_out) == len(self._laid_out) and all(a is b for a, b in zip(laid_out, self._laid_out, strict=True)):
            return self._rows
        places = {
            id(parameter): (optimizer, number)
            for optimizer in adaptive
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        members: dict[tuple[Any, ...], list[Share]] = {}
        for share in shares:
            optimizer, number = places.get(id(share.parameter), (None, 0))
            key = (optimizer, number, share.parameter.dtype, share.parameter.device)
            members.setdefault(key, []).append(share)
        self._rows = [_Row(inside, key[0], key[1]) for key, inside in members.items()]
        self._laid_out = laid_out
        self._records = tuple(
            BlockRecord(share.name, counts={"gated weights": share.of(share.parameter).numel()}) for share in shares
        )
        for row in self._rows:
            for share, place in zip(row.shares, row.pieces(row.utility), strict=True):
                name, owner = share.name, self._owners.get(share.name)
                if name in self._utility and (owner is None or owner() is share.parameter):
                    place.copy_(self._utility[name])
                self._utility[name], self._owners[name] = place, weakref.ref(share.parameter)
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        # Neither references nor hooks can be copied, and rows are laid out again.
        return {**self.__dict__, "_owners": {}, "_waiting": [], "_rows": [], "_laid_out": ()}

    def gathered(self) -> dict[str, Any]:
        """The utilities."""
        return {"utility": {name: value.clone() for name, value in self._utility.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._utility = {name: value.clone() for name, value in state["utility"].items()}
        self._owners, self._rows, self._laid_out = {}, [], ()


class _Row:
    """Parameters of one kind side by side: utilities, gradients and the weights before a step, one number each."""

    def __init__(self, shares: Sequence[Share], optimizer: object, group: int) -> None:
        self.shares, self.optimizer, self.group = shares, optimizer, group
        self.parameters: list[Tensor] = [share.parameter for share in shares]
        like = self.parameters[0]
        self.utility, self.gradient, self.before, self.gate, self.noise = like.new_zeros(
            5, sum(p.numel() for p in self.parameters)
        )
        self._gradients, self._befores = self.pieces(self.gradient), self.pieces(self.before)
        self.free: Tensor | None = None  # what is not targeted, where parameters are targeted in part
        if any(share.mask is not None for share in shares):
            self.free = torch.zeros_like(self.utility, dtype=torch.bool)
            for share, place in zip(shares, self.pieces(self.free), strict=True):
                if share.mask is not None:
                    place.copy_(~share.mask)

    def pieces(self, row: Tensor) -> list[Tensor]:
        """Each parameter's part of a row, in its shape."""
        parts = torch.split(row, [parameter.numel() for parameter in self.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]

    def read(self) -> float:
        """Take the weights and gradients of now; the sum of the gradients, not finite if one of them is not."""
        torch._foreach_copy_(self._befores, self.parameters)
        gradients: list[Any] = [parameter.grad for parameter in self.parameters]
        torch._foreach_copy_(self._gradients, gradients)
        return float(self.gradient.sum(dtype=torch.promote_types(self.gradient.dtype, torch.float32)))

    def renew(self, beta: float) -> float:
        """Renew the utilities; the largest of them."""
        self.utility.mul_(beta).addcmul_(self.gradient, self.before, value=beta - 1)
        own = self.utility if self.free is None else self.utility.masked_fill(self.free, -torch.inf)
        return float(own.max())

    def draw(self, highest: float, sigma: float, generator: torch.Generator) -> None:
        """The gates 1 − sigmoid(u / highest), and the noise."""
        torch.div(self.utility, -highest, out=self.gate).sigmoid_()  # 1 − sigmoid(x) = sigmoid(−x)
        if sigma and generator.device == self.noise.device and self.noise.dtype == torch.float32:
            self.noise.normal_(0, sigma, generator=generator)
        elif sigma:
            self.noise.copy_(torch.randn(self.noise.shape, generator=generator, device=generator.device)).mul_(sigma)
        if self.free is not None:
            self.gate.masked_fill_(self.free, 1)
            self.noise.masked_fill_(self.free, 0)

    def gate_gradients(self) -> None:
        """g ← (g + σ·ξ)(1 − s)."""
        self.gradient.add_(self.noise).mul_(self.gate)
        torch._foreach_copy_([_gradient(share) for share in self.shares], self._gradients)

    def gate_step(self, rate: float, decay: float) -> None:
        """w ← w₀ + (w − w₀)·(1 − s) − lr·σ·ξ·(1 − s), where w₀ is the weight before the step, decayed."""
        if decay:
            self.before.mul_(1 - decay)
        torch._foreach_copy_(self._gradients, self.parameters)
        change = self.gradient.sub_(self.before).add_(self.noise, alpha=-rate)
        self.before.addcmul_(change, self.gate)
        torch._foreach_copy_(self.parameters, self._befores)


@torch.no_grad()
def _gate_step(rows: list[_Row], optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Gate the change that a step has made, once."""
    for row in rows:
        group = optimizer.param_groups[row.group]
        row.gate_step(float(group["lr"]), decoupled_decay(optimizer, group))
    rows.clear()


def decoupled_decay(optimizer: object, group: Mapping[str, Any]) -> float:
    """The share of a weight that one step removes beside its update; 0 where decay is a part of the gradient."""
    decoupled = type(optimizer).__name__ in ("AdamW", "Adafactor", "Muon") or group.get("decoupled_weight_decay")
    return float(group["lr"]) * float(group["weight_decay"]) if decoupled else 0.0


def _not_finite(shares: Sequence[Share]) -> list[str]:
    """The names of gradients with NaN or Inf."""
    return [share.name for share in shares if not bool(_gradient(share).isfinite().all())]


def _gradient(share: Share) -> Tensor:
    assert share.parameter.grad is not None
    return share.parameter.grad
