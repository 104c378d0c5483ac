"""One application of a method: what it was given, and how the replicas of a model (DDP) come to one decision.

Replicas hold the same weights and must be changed alike. Statistics of each replica's data are summed, and random
numbers are those of the first: `Call.total`, `Call.mean`, `Call.first` and `Call.generator` do that, and are the
identity for a model that is not replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from rekindle.blocks.names import unwrapped
from rekindle.projection.method import Batch, Loss
from rekindle.sharding.replicas import replicas
from rekindle.sharding.team import Team


@dataclass
class Call:
    """The arguments of one call of a method.

    >>> call = Call(nn.Linear(1, 1), own=torch.Generator().manual_seed(0))
    >>> call.total([torch.ones(2)])
    [tensor([1., 1.])]
    """

    model: nn.Module
    optimizer: object = None
    batches: Iterable[Batch] | None = None
    loss: Loss | None = None
    own: torch.Generator = field(default_factory=torch.Generator, repr=False)
    given: torch.Generator | None = field(default=None, repr=False)

    @cached_property
    def inner(self) -> nn.Module:
        """The user's own module. Batches are run through it: DDP counts the passes of its own forward."""
        return unwrapped(self.model)

    @cached_property
    def generator(self) -> torch.Generator:
        """The given generator, or the method's own, never the global one; all replicas get the state of the first."""
        generator = self.own if self.given is None else self.given
        if self.replicas.size > 1:
            generator.set_state(self.replicas.first(generator.get_state()))
        return generator

    @cached_property
    def replicas(self) -> Team:
        """The processes over which the model is replicated; this one alone if it is not."""
        return replicas(self.model)

    def total(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The sums of these tensors over all replicas, in one message."""
        return self.replicas.total(values)

    def mean(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The averages of these tensors over all replicas."""
        if self.replicas.size == 1:
            return list(values)
        return [value / self.replicas.size for value in self.total(values)]

    def first(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The first replica's values."""
        if self.replicas.size == 1:
            return dict(values)
        shared = {name: value.detach().contiguous().clone() for name, value in values.items()}
        for value in shared.values():
            self.replicas.copy(value)
        return shared
