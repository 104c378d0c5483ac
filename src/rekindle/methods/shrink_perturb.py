"""Shrink and perturb: interpolate towards a start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor, nn

from rekindle.methods.call import Call
from rekindle.methods.remedy import FromStart
from rekindle.methods.selection import chosen_parameters
from rekindle.methods.writing import overwrite
from rekindle.projection.receipt import Receipt
from rekindle.projection.targets import Targets


class ShrinkPerturb(FromStart):
    """θ ← (1 − coefficient)·θ + coefficient·start (Ash & Adams, 2020).

    `noise="init"` takes the stored initial weights as the start, which is what released code of several later
    papers does; `noise="fresh"` draws new ones by the model's own scheme, as the original does. `sigma` replaces
    the start's factor, for the original's two-parameter form θ ← λ·θ + σ·draw. The default keeps a fifth of the
    old weights. All trainable parameters are changed; buffers are not.

    >>> import torch
    >>> model = nn.Linear(2, 2)
    >>> before = model.weight.detach().clone()
    >>> method = ShrinkPerturb(coefficient=0.5)
    >>> method.remember(model)
    >>> _ = nn.init.ones_(model.weight)
    >>> _ = method(model)
    >>> torch.allclose(model.weight, 0.5 + 0.5 * before)
    True

    Args:
        coefficient: how much of the way to the start.
        noise: the start: "init", the stored one, or "fresh", a new draw.
        sigma: the factor of the start, instead of `coefficient`.
        targets: which parameters, as for `rekindle.plan`.
        initial: stored first weights by name, instead of those that `remember` saw.
        fresh: a function that returns a new model, where modules' own schemes are not how the model starts.
        optimizer_state: what becomes of the state of changed parameters: "fresh", "moments", "step" or "none".
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "shrink-perturb"

    def __init__(
        self,
        coefficient: float = 0.8,
        noise: Literal["init", "fresh"] = "init",
        *,
        sigma: float | None = None,
        targets: Targets = "trainable",
        initial: Mapping[str, Tensor] | None = None,
        fresh: Callable[[], nn.Module] | None = None,
        optimizer_state: str = "fresh",
        seed: int = 0,
    ) -> None:
        if not 0 <= coefficient <= 1:
            raise ValueError(f"coefficient={coefficient} must lie between 0 (keep all) and 1 (keep nothing)")
        if noise not in ("init", "fresh"):
            raise ValueError(f"noise={noise!r} is neither 'init' nor 'fresh'")
        super().__init__(initial=initial, fresh=fresh, seed=seed)
        self.coefficient, self.noise, self.sigma = coefficient, noise, sigma
        self.targets, self.optimizer_state = targets, optimizer_state

    def apply(self, call: Call) -> Receipt:
        """Mix every targeted parameter with its start."""
        chosen, skipped = chosen_parameters(call.model, self.targets)
        start = self.stored(call.model, chosen) if self.noise == "init" else self.drawn(call, chosen)
        share = self.coefficient if self.sigma is None else self.sigma
        new = {
            name: each.merged((1 - self.coefficient) * each.parameter.detach() + share * start[name])
            for name, each in chosen.items()
        }
        return overwrite(self.name, call, new, policy=self.optimizer_state, skipped=skipped)
