"""The multilayer perceptron: the network on which loss of plasticity shows soonest and cheapest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from rekindle.lab.networks.sizes import activation as activation_class
from rekindle.lab.networks.sizes import at_least_one


class MLP(nn.Module):
    """Any number of hidden layers over the flattened input, then the head; torch's default start.

    `width` is one number for all `depth` hidden layers (3 unless told), or a list with one number a layer.
    Without hidden layers (`depth=0`) it is a linear classifier.

    >>> MLP((1, 28, 28), 10)
    MLP(
      (body): Sequential(
        (0): Flatten(start_dim=1, end_dim=-1)
        (1): Linear(in_features=784, out_features=128, bias=True)
        (2): ReLU()
        (3): Linear(in_features=128, out_features=128, bias=True)
        (4): ReLU()
        (5): Linear(in_features=128, out_features=128, bias=True)
        (6): ReLU()
      )
      (head): Linear(in_features=128, out_features=10, bias=True)
    )
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        width: int | Sequence[int] = 128,
        depth: int | None = None,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        widths = [math.prod(shape), *_widths(width, depth)]
        nonlinear = activation_class(activation)
        self.body = nn.Sequential(nn.Flatten())
        for into, out in pairwise(widths):
            self.body.extend([nn.Linear(into, out), nonlinear()])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) for inputs (batch, *shape)."""
        logits: Tensor = self.head(self.body(x))
        return logits


def _widths(width: int | Sequence[int], depth: int | None) -> list[int]:
    if isinstance(width, int):
        at_least_one(width=width)
        if depth is not None and depth < 0:
            raise ValueError(f"depth={depth} must be 0 or more")
        return [width] * (3 if depth is None else depth)
    if depth not in (None, len(width)):
        raise ValueError(f"depth={depth} contradicts width={list(width)}, which has one number a hidden layer")
    for each in width:
        at_least_one(width=each)
    return list(width)
