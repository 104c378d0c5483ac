"""The norm of scale-invariant weights: a remedy that leaves the function as it is, and the control for all others.

Behind a normalization W and 10·W compute the same, and only learn at another speed: a step of Adam turns the direction
of W by about lr/‖W‖ (of plain gradient descent by lr/‖W‖²). A remedy that leaves smaller weights has a larger effective
learning rate, whatever else it does. With the field `norm` of a setting of the laboratory every arm has the same at
each boundary; docs/evidence/norms.md says what is left of the others then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from rekindle.initial import tensors_of
from rekindle.methods.call import Call
from rekindle.methods.remedy import FromStart
from rekindle.methods.writing import overwrite
from rekindle.projection.receipt import Receipt
from rekindle.recording.invariance import norms_behind, per_output

_FELT = 0.01  # share of ε in a denominator from which a note is written


class StartNorm(FromStart):
    """W ← W·(factor·‖W₀‖/‖W‖) for each weight that a normalization follows, W₀ being its start.

    With a factor of 1 the weights learn as fast as at their start, with 0.1 about ten times as fast (with Adam): good
    where more data arrive, harmful on most other streams (docs/evidence/norms.md). Try it with `rekindle.advise`.
    per: "weight", or "channel": the weights of each output channel by themselves, where a BatchNorm or InstanceNorm
    follows, which takes out the norm of each; other weights as a whole.

    The running statistics of a BatchNorm behind it are changed along, so that the function stays the same in training
    and in evaluation, but for the ε in the denominator: with 1e-5, outputs of a ResNet-18 with 20 such weights moved
    by .5, 5 and 42 % at factors of .3, .1 and .03. Where ε counts, a note of the receipt says so. Without a stored
    start, one is drawn by the layer's scheme.

    >>> model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    >>> method = StartNorm(0.5)
    >>> method.remember(model)
    >>> start = model[0].weight.norm().item()
    >>> _ = model[0].weight.data.mul_(7.0)
    >>> method(model).changed, round(model[0].weight.norm().item() / start, 4)
    (('0.weight',), 0.5)

    Args:
        factor: the norm, as a share of the first one.
        per: "weight", or "channel".
        optimizer_state: what becomes of the state of changed parameters: "fresh", "moments", "step" or "none".
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "start-norm"

    def __init__(
        self,
        factor: float = 0.1,
        *,
        per: Literal["weight", "channel"] = "weight",
        optimizer_state: str = "fresh",
        seed: int = 0,
    ) -> None:
        if factor <= 0:
            raise ValueError(f"factor={factor} must be positive")
        if per not in ("weight", "channel"):
            raise ValueError(f'per={per!r} is neither "weight" nor "channel"')
        super().__init__(seed=seed)
        self.factor, self.per, self.optimizer_state = factor, per, optimizer_state

    def check(self, call: Call) -> None:
        """Raise if there is nothing to rescale."""
        if not scale_invariant(call.inner):
            raise ValueError("no weight here is followed by a normalization, so that no norm is free")

    def apply(self, call: Call) -> Receipt:
        """Rescale; a weight that is zero, now or at the start, stays."""
        self.check(call)
        behind = scale_invariant(call.inner)
        names = [f"{layer}.weight" for layer in behind]
        start = self.drawn(call, names) if self._initial is None else self.stored(call.inner, names)
        own, modules = tensors_of(call.inner), dict(call.inner.named_modules())
        new: dict[str, Tensor] = {}
        for layer, norm in behind.items():
            weight = f"{layer}.weight"
            before = own[weight].detach()
            single = self.per == "channel" and _by_output(modules[layer]) and per_output(modules[layer], modules[norm])
            now, then = (each.flatten(1).norm(dim=1) if single else each.norm() for each in (before, start[weight]))
            free = (now > 0) & (then > 0)
            if bool(free.any()):
                ratio = torch.where(free, self.factor * then / now.clamp_min(1e-30), 1.0)
                new[weight] = before * (ratio.reshape(-1, *[1] * (before.ndim - 1)) if single else ratio)
                new |= _statistics(own, norm, own.get(f"{layer}.bias"), ratio)
        receipt = overwrite(self.name, call, new, policy=self.optimizer_state)
        return replace(receipt, notes=(*receipt.notes, *_felt(call.inner, behind.values(), new)))


def scale_invariant(model: nn.Module) -> dict[str, str]:
    """The layers whose weight may have any norm, each with a normalization of its own behind it.

    A weight that something else uses too is none of them, nor is one that is frozen or computed (parametrized).

    >>> scale_invariant(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    {}
    """
    found = norms_behind(model)
    times = Counter(found.values())
    named = dict(model.named_parameters(remove_duplicate=False))
    places = Counter(map(id, named.values()))
    weights = {layer: named.get(f"{layer}.weight") for layer in found}
    free = {layer for layer, w in weights.items() if w is not None and w.requires_grad and places[id(w)] == 1}
    return {layer: norm for layer, norm in found.items() if layer in free and times[norm] == 1}


def _by_output(layer: nn.Module) -> bool:
    """Whether the first axis of the weight is the output's."""
    return isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))


def _felt(model: nn.Module, norms: Iterable[str], new: Mapping[str, Tensor]) -> list[str]:
    """A note where the variance in front of a normalization is now so small that its ε counts."""
    modules = dict(model.named_modules())
    shares = {
        norm: float(eps / (variance.median() + eps))
        for norm in norms
        if (variance := new.get(f"{norm}.running_var")) is not None and (eps := getattr(modules[norm], "eps", 0.0))
    }
    worst = max(shares, key=lambda norm: shares[norm], default="")
    if not worst or shares[worst] < _FELT:
        return []
    said = f"{modules[worst].eps:g} in {worst} is now {shares[worst]:.0%} of its denominator"
    return [f"the function has changed a little: ε = {said}; a larger factor changes it less"]


def _statistics(own: Mapping[str, Tensor], norm: str, bias: Tensor | None, ratio: Tensor) -> dict[str, Tensor]:
    """The running mean and variance of what a layer with a rescaled weight gives; its bias stays."""
    mean, variance = own.get(f"{norm}.running_mean"), own.get(f"{norm}.running_var")
    if mean is None or variance is None:
        return {}
    shift = 0.0 if bias is None else bias.detach()
    return {
        f"{norm}.running_mean": (mean - shift) * ratio + shift,
        f"{norm}.running_var": variance * ratio.square(),
    }
