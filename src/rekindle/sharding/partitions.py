"""The parameters of DeepSpeed ZeRO whole on their owners: each rank has one of its own at a time.

`Partitions` has the interface of `Exchange`. DeepSpeed's accessors give every rank the whole parameter; all but its
owner free it at once. A lot is one parameter per rank: fetched one after the other, processed in parallel, sent to all
one after the other. So a rank has room for three parameters: its own, the one that is being fetched or put back, and
the one that it receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rekindle.blocks.names import partition_of
from rekindle.sharding.exchange import Treat
from rekindle.sharding.owners import Parcel
from rekindle.sharding.team import Team


class Partitions:
    """Whole parameters for `parcels`, whose `tensor` is a place in `tensors`: stand-ins of `zero`, or whole copies.

    >>> from rekindle.blocks.layouts import matrices
    >>> from rekindle.sharding.spread import Spread
    >>> from rekindle.sharding.units import units
    >>> weight, spread = torch.ones(2, 3), Spread.replicated((2, 3), (0,))
    >>> parcel = Parcel(0, units([matrices("out in")((2, 3))[0].layout], spread)[0], spread, 4, owner=0)
    >>> for lot in Partitions(Team.solo(), [weight], [parcel]).run(lambda work: [t.mul_(2) for _, t in work]):
    ...     print(lot, weight.sum().item())
    [0] 12.0
    """

    def __init__(self, team: Team, tensors: Sequence[Tensor], parcels: Sequence[Parcel]) -> None:
        self.team, self.tensors, self.parcels = team, tensors, parcels
        self.bytes_sent = 0
        self._members: dict[int, list[int]] = {}
        for place, parcel in enumerate(parcels):
            self._members.setdefault(parcel.tensor, []).append(place)
        self._owner: dict[int, int] = {}
        self.lots = self._divided()
        self.held = max((_size(tensors[tensor]) for tensor in self._members), default=0)

    @torch.no_grad()
    def run(self, treat: Treat, *, write: bool = True) -> Iterator[list[int]]:
        """Process all lots; yields the numbers of a lot's parcels once it is written (with `write=False`: processed).

        An exception on any process ends the run on all of them with the same error, before that lot is written.
        """
        with self.team.together():
            landing = torch.empty(self.held if write else 0, dtype=torch.uint8, device=self.team.device)
        for lot in self.lots:
            mine: Tensor | None = None
            for number in lot:
                with self.team.waiting("fetching a partitioned weight"):
                    whole = _fetched(self.tensors[number])
                mine = whole if self._owner[number] == self.team.rank else mine
                del whole
            with self.team.together():
                if mine is not None:
                    owned = next(number for number in lot if self._owner[number] == self.team.rank)
                    treat([(self.parcels[i], _cut(mine, self.parcels[i])) for i in self._members[owned]])
            for number in lot if write else ():
                self._write(number, mine, landing)
            del mine
            yield [place for number in lot for place in self._members[number]]

    def _write(self, number: int, mine: Tensor | None, landing: Tensor) -> None:
        owner, held = self._owner[number], self.tensors[number]
        if owner == self.team.rank and mine is not None:
            value = mine
        else:
            value = landing[: _size(held)].view(held.dtype).view(held.shape)
        if self.team.size > 1:
            with self.team.waiting("sending a partitioned weight"):
                dist.broadcast(value, src=owner, group=self.team.group)
            self.bytes_sent += _size(held) if owner == self.team.rank else 0
        partition = partition_of(held)
        if partition is None:
            held.copy_(value)
        else:
            partition.put(value)

    def _divided(self) -> list[list[int]]:
        """Tensors in lots, one per owner; owners balanced by the cost of what they solve, the largest first."""
        cost = {number: sum(self.parcels[i].unit.cost for i in places) for number, places in self._members.items()}
        load = dict.fromkeys(self.team.ranks, 0.0)
        queues: dict[int, list[int]] = {rank: [] for rank in self.team.ranks}
        for number in sorted(cost, key=lambda number: (-cost[number], number)):
            owner = min(load, key=lambda rank: (load[rank], rank))
            self._owner[number] = owner
            load[owner] += cost[number]
            queues[owner].append(number)
        longest = max(map(len, queues.values()))
        return [[queue[place] for queue in queues.values() if place < len(queue)] for place in range(longest)]


def _fetched(tensor: Tensor) -> Tensor:
    partition = partition_of(tensor)
    whole: Tensor = tensor.detach().clone() if partition is None else partition.fetch()
    return whole


def _cut(whole: Tensor, parcel: Parcel) -> Tensor:
    return whole[tuple(slice(low, high) for low, high in parcel.unit.box)]


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
