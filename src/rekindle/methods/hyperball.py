"""Hyperball: weights and their updates have fixed norms."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rekindle.methods.call import Call
from rekindle.methods.normalize_and_project import KeptNorms, norms_of
from rekindle.methods.remedy import taken_off
from rekindle.methods.selection import Share
from rekindle.methods.upgd import decoupled_decay
from rekindle.optimizers import StateReset
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.receipt import BlockRecord, Receipt
from rekindle.projection.targets import Targets


class Hyperball(KeptNorms):
    """W ← R·norm(W − η·R·norm(u)), norm(x) = x/‖x‖_F, R = ‖W₀‖_F (Wen et al., 2026, arXiv:2606.16899).

    u is the update of the optimizer (with Adam it is their AdamH), η its learning rate, or `rate`: the angle by which
    a step turns the weight. Decoupled weight decay has no effect on these weights. It acts when the optimizer has
    stepped; call it between backward and step. R is the norm that `remember(model)` saw, else that at the first call.
    The paper treats the projection matrices of transformers and leaves embeddings and vectors to Adam; whether it
    treats an output layer of its own was not found, here it is left out ("auto").

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> adam, method = torch.optim.Adam(model.parameters(), lr=0.1), Hyperball()
    >>> norm = model[0].weight.norm().item()
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> _ = method(model, adam)
    >>> adam.step()
    >>> abs(model[0].weight.norm().item() - norm) < 1e-5
    True

    Args:
        rate: the angle of a step, instead of the optimizer's learning rate.
        targets: which parameters, as for `rekindle.plan`.
        norms: the norms R by name, instead of those that `remember` saw.
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "hyperball"
    moment = "backward"

    def __init__(
        self,
        rate: float | None = None,
        *,
        targets: Targets = "auto",
        norms: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        if rate is not None and rate <= 0:
            raise ValueError(f"rate={rate} must be positive")
        super().__init__(targets=targets, norms=norms, seed=seed)
        self.rate = rate
        self._waiting: list[RemovableHandle] = []

    def transaction(self, call: Call) -> AbstractContextManager[object]:
        """Nothing is written before the optimizer's step."""
        return taken_off(lambda: self._waiting)

    def apply(self, call: Call) -> Receipt:
        """Note the weights before the step, and treat them when it has been taken."""
        for hook in self._waiting:  # a step that was never taken
            hook.remove()
        self._waiting = []
        opened = optimizers.unwrap(call.optimizer)
        if not opened or not all(hasattr(each, "register_step_post_hook") for each in opened):
            raise ValueError("Hyperball changes the step of a torch optimizer: pass the one that trains the model")
        shares, skipped = self.weights(call.model)
        if self._norms is None:
            self._norms = dict(zip([share.name for share in shares], norms_of(shares), strict=True))
        kept = zip(shares, self.first(shares), strict=True)
        steps = {id(share.parameter): (share, share.parameter.detach().clone(), radius) for share, radius in kept}
        for each in opened:
            self._waiting.append(each.register_step_post_hook(partial(_project, steps, self.rate)))
        records = tuple(BlockRecord(share.name, norm_after=radius) for share, _, radius in steps.values())
        return Receipt(self.name, records, skipped, optimizer=StateReset("none"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_waiting": []}


@torch.no_grad()
def _project(
    steps: dict[int, tuple[Share, Tensor, float]], rate: float | None, optimizer: Optimizer, *_: object
) -> None:
    """Replace the step that the optimizer took by one of length η·R, and go back to norm R; once."""
    for group in optimizer.param_groups:
        eta, decay = float(group["lr"]) if rate is None else rate, decoupled_decay(optimizer, group)
        for parameter in group["params"]:
            if id(parameter) not in steps:
                continue
            share, before, radius = steps.pop(id(parameter))
            start = share.of(before)
            update = share.of(parameter) - (1 - decay) * start
            length = update.norm()
            moved = start + torch.where(length > 0, update * (eta * radius / length), update)
            new = moved * (radius / moved.norm())
            if share.mask is None:
                parameter.copy_(new)
            else:
                parameter.masked_scatter_(share.mask, new)
