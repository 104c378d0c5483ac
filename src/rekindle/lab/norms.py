"""The norm of scale-invariant weights, as the laboratory sets it: a control that separates a remedy from its norm.

Behind a normalisation W and 10·W compute the same, and only learn at another speed: a step of Adam turns the direction
of W by about lr/‖W‖ (of plain gradient descent by lr/‖W‖²). A remedy that leaves smaller weights has a larger effective
learning rate, whatever else it does. With the field `norm` of a setting every arm has the same at each boundary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor, nn

from rekindle.consumers.invariance import norms_behind
from rekindle.initial import tensors_of
from rekindle.methods.call import Call
from rekindle.methods.remedy import FromStart
from rekindle.methods.writing import overwrite
from rekindle.projection.receipt import Receipt


class StartNorm(FromStart):
    """W ← W·(factor·‖W₀‖/‖W‖) for each weight that a normalisation follows, W₀ being its start.

    The running statistics of a BatchNorm behind it are changed along, so that the function stays the same in training
    and in evaluation (but for the ε in the denominator). Without a stored start, one is drawn by the layer's scheme.

    >>> model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    >>> method = StartNorm(0.5)
    >>> method.remember(model)
    >>> start = model[0].weight.norm().item()
    >>> _ = model[0].weight.data.mul_(7.0)
    >>> method(model).changed, round(model[0].weight.norm().item() / start, 4)
    (('0.weight',), 0.5)
    """

    name = "start-norm"

    def __init__(self, factor: float = 1.0, *, optimizer_state: str = "fresh", seed: int = 0) -> None:
        if factor <= 0:
            raise ValueError(f"factor={factor} must be positive")
        super().__init__(seed=seed)
        self.factor, self.optimizer_state = factor, optimizer_state

    def apply(self, call: Call) -> Receipt:
        """Rescale; a weight that is zero, now or at the start, stays."""
        behind = scale_invariant(call.inner)
        if not behind:
            raise ValueError("no weight here has a normalisation right behind it, so that no norm is free")
        names = [f"{layer}.weight" for layer in behind]
        start = self.drawn(call, names) if self._initial is None else self.stored(call.inner, names)
        own = tensors_of(call.inner)
        new: dict[str, Tensor] = {}
        for layer, norm in behind.items():
            weight = f"{layer}.weight"
            now, then = own[weight].detach().norm(), start[weight].norm()
            if now > 0 and then > 0:
                ratio = self.factor * then / now
                new[weight] = own[weight].detach() * ratio
                new |= _statistics(own, norm, own.get(f"{layer}.bias"), ratio)
        return overwrite(self.name, call, new, policy=self.optimizer_state)


def scale_invariant(model: nn.Module) -> dict[str, str]:
    """The layers whose weight may have any norm, each with a normalisation of its own behind it.

    >>> scale_invariant(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    {}
    """
    found = norms_behind(model)
    times = Counter(found.values())
    return {layer: norm for layer, norm in found.items() if times[norm] == 1}


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
