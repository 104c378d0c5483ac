"""Weight clipping: no weight leaves a multiple of its initial range."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from rekindle.blocks.names import named_parameters
from rekindle.methods.matrices import Chosen, chosen_matrices
from rekindle.methods.remedy import PerModel, Remedy
from rekindle.optimizers import StateReset
from rekindle.projection.receipt import Batch, BlockRecord, Loss, Meter, Receipt
from rekindle.projection.targets import Targets


class WeightClip(Remedy):
    """θ ← clip(θ, −κ·b, κ·b) after every step (Elsayed, Lan, Lyle & Mahmood, 2024).

    b = 1/√fan_in is the bound of torch's own uniform start, for a layer's weight and its bias alike (1/√hidden for
    recurrent layers). The optimizer's state is kept. The paper searches κ in 1 to 5.

    >>> model = nn.Linear(4, 1)
    >>> _ = nn.init.constant_(model.weight, 9.0)
    >>> WeightClip(kappa=2, targets="weight")(model).totals()["counts"], model.weight[0, 0].item()
    ({'clipped': 4}, 1.0)
    """

    name = "weight-clip"
    moment = "step"

    def __init__(self, kappa: float = 2.0, *, targets: Targets = "layers", seed: int = 0) -> None:
        if kappa <= 0:
            raise ValueError(f"kappa={kappa} must be positive")
        super().__init__(seed=seed)
        self.kappa, self.targets = kappa, targets
        self._bounds: PerModel[list[tuple[str, Parameter, float]]] = PerModel()

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Clip and count."""
        meter = Meter()
        if model not in self._bounds:
            self._bounds[model] = _bounds(model, chosen_matrices(model, self.targets)[0])
        records = []
        with torch.no_grad():
            for name, parameter, bound in self._bounds[model]:
                limit = self.kappa * bound
                clipped = int((parameter.abs() > limit).sum())
                if clipped:
                    parameter.clamp_(-limit, limit)
                    records.append(BlockRecord(name, scale=limit, counts={"clipped": clipped}))
        return Receipt(
            self.name,
            tuple(records),
            {},
            self.settings(),
            StateReset("none"),
            seconds=meter.seconds,
            memory=meter.memory,
        )


def _bounds(model: nn.Module, chosen: list[Chosen]) -> list[tuple[str, Parameter, float]]:
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    found: dict[int, tuple[str, Parameter, float]] = {}
    for each in chosen:
        if each.weight.computed:
            raise ValueError(f"{each.found.name!r} is parametrised: clipping its originals would not clip it")
        owner, block = each.weight.owner, each.blocks[0]
        recurrent = isinstance(owner, (nn.RNNBase, nn.RNNCellBase))
        fan_in = int(owner.hidden_size) if recurrent else block.fans[1] * block.taps  # type: ignore[arg-type]
        for parameter in (*each.weight.parameters(each.found.name).values(), each.weight.bias()):
            if parameter is not None:
                found[id(parameter)] = (names[id(parameter)], parameter, fan_in**-0.5)
    return list(found.values())
