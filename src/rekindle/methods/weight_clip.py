"""Weight clipping: no weight leaves a multiple of its initial range."""

from __future__ import annotations

import torch
from torch import nn

from rekindle.methods.caching import PerModel
from rekindle.methods.call import Call
from rekindle.methods.remedy import Remedy
from rekindle.methods.selection import Share, chosen_biases, chosen_weights, mask_of
from rekindle.optimizers import StateReset
from rekindle.projection.receipt import BlockRecord, Receipt
from rekindle.projection.targets import Targets


class WeightClip(Remedy):
    """θ ← clip(θ, −κ·b, κ·b) after every step (Elsayed, Lan, Lyle & Mahmood, 2024).

    b = 1/√fan_in is the bound of torch's own uniform start, for a layer's weight and its bias alike (1/√hidden for
    recurrent layers). The optimizer's state is kept. The paper searches κ in 1 to 5.

    >>> model = nn.Linear(4, 1)
    >>> _ = nn.init.constant_(model.weight, 9.0)
    >>> WeightClip(kappa=2, targets="weight")(model).totals()["counts"], model.weight[0, 0].item()
    ({'clipped': 4}, 1.0)

    Args:
        kappa: the bound, in units of the standard deviation that a weight starts with.
        targets: which parameters, as for `rekindle.plan`.
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "weight-clip"
    moment = "step"

    def __init__(self, kappa: float = 2.0, *, targets: Targets = "layers", seed: int = 0) -> None:
        if kappa <= 0:
            raise ValueError(f"kappa={kappa} must be positive")
        super().__init__(seed=seed)
        self.kappa, self.targets = kappa, targets
        self._bounds: PerModel[list[tuple[Share, float]]] = PerModel()

    def apply(self, call: Call) -> Receipt:
        """Clip and count."""
        records = []
        with torch.no_grad():
            for share, bound in self._bounds.get(call.model, lambda: _bounds(call.model, self.targets)):
                parameter, limit = share.parameter, self.kappa * bound
                clipped = int((share.of(parameter).abs() > limit).sum())
                if clipped:
                    parameter.copy_(share.merged(parameter.clamp(-limit, limit)))
                    records.append(BlockRecord(share.name, scale=limit, counts={"clipped": clipped}))
        return Receipt(self.name, tuple(records), optimizer=StateReset("none"))


def _bounds(model: nn.Module, targets: Targets) -> list[tuple[Share, float]]:
    found: list[tuple[Share, float]] = []
    for each in chosen_weights(model, targets)[0]:
        if each.computed:
            raise ValueError(f"{each.name!r} is parametrized: clipping its originals would not clip it")
        owner, block = each.owner, each.blocks[0]
        recurrent = isinstance(owner, (nn.RNNBase, nn.RNNCellBase))
        fan_in = int(owner.hidden_size) if recurrent else block.fans[1] * block.taps  # type: ignore[arg-type]
        parameter = each.parameters()[each.name]
        shares = [Share(each.name, parameter, None if each.whole else mask_of(each))]
        found += [(share, fan_in**-0.5) for share in (*shares, *chosen_biases(model, [each]).values())]
    return found
