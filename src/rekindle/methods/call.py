"""One application of a method: what it was given, and how the replicas of a model (DDP) come to one decision.

Replicas hold the same weights and must be changed alike. Statistics of each replica's data are summed, and random
numbers are those of the first: `Call.total`, `Call.mean`, `Call.first` and `Call.generator` do that, and are the
identity for a model that is not replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rekindle.blocks.names import unwrapped, wrapped
from rekindle.projection.method import Batch, Loss


@dataclass
class Call:
    """The arguments of one call of a method.

    >>> call = Call(nn.Linear(1, 1), own=torch.Generator().manual_seed(0))
    >>> call.total([torch.ones(2)])
    [tensor([1., 1.])]
    """

    model: nn.Module
    optimizer: Any = None
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
        if self.replicas is not None:
            state = [generator.get_state()]
            dist.broadcast_object_list(state, src=self._source, group=self.replicas)
            generator.set_state(state[0])
        return generator

    @cached_property
    def replicas(self) -> Any:
        """The process group over which the model is replicated, None if it is not."""
        return replicas(self.model)

    def total(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The sums of these tensors over all replicas, in one message."""
        if self.replicas is None or not values:
            return list(values)
        flat = torch.cat([value.detach().double().flatten() for value in values])
        dist.all_reduce(flat, group=self.replicas)
        parts = torch.split(flat, [value.numel() for value in values])
        return [part.reshape(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)]

    def mean(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The averages of these tensors over all replicas."""
        if self.replicas is None:
            return list(values)
        return [value / dist.get_world_size(self.replicas) for value in self.total(values)]

    def first(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The first replica's values."""
        if self.replicas is None:
            return dict(values)
        shared = {name: value.detach().contiguous().clone() for name, value in values.items()}
        for value in shared.values():
            dist.broadcast(value, src=self._source, group=self.replicas)
        return shared

    @property
    def _source(self) -> int:
        return dist.get_global_rank(self.replicas, 0)


_given: ContextVar[Any] = ContextVar("replicas", default=None)


@contextmanager
def replicated(group: Any = None) -> Iterator[None]:
    """Inside, bare models count as replicas over this process group (by default all processes), as within DDP.

    For trainers that pass a method the module inside their wrapper. Every process must make the same calls.
    """
    token = _given.set(dist.group.WORLD if group is None else group)
    try:
        yield
    finally:
        _given.reset(token)


def replicas(model: nn.Module) -> Any:
    """The process group of a DDP wrapper around the model, None without one or if it has one member.

    >>> replicas(nn.Linear(1, 1)) is None
    True
    """
    if _given.get() is not None:
        return _given.get()
    inside: nn.Module | None = model
    while inside is not None:
        if isinstance(inside, DistributedDataParallel):
            return inside.process_group if dist.get_world_size(inside.process_group) > 1 else None
        inside = wrapped(inside)
    return None
