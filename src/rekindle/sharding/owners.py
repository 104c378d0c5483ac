"""Who solves what, and when: units get owners balanced by cost, and owners' queues are cut into lots.

Every process computes the same assignment from the same plan, so none of it is communicated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rekindle.blocks.layouts import Layout
from rekindle.sharding.spread import Box, Spread, volume
from rekindle.sharding.units import Unit, units

# A lot holds at least this much per rank: matrices of small models are sent together.
MINIMUM = 1 << 20
BUFFERS = 3  # gathered matrices that a rank has room for; the solver's own workspace comes on top


@dataclass(frozen=True)
class Parcel:
    """A unit to send: which tensor it is a box of, how that is placed, who solves it.

    `tensor` is the place of the parameter in the caller's list. `gram` says that ranks send the Gram matrix of their
    rows instead of the rows, and get the k×k factor to multiply them with.
    """

    tensor: int
    unit: Unit
    spread: Spread
    itemsize: int
    owner: int = -1
    gram: bool = False

    @property
    def size(self) -> int:
        """Bytes of the assembled box, or of a Gram matrix in float64."""
        if self.gram:
            side = min(self.unit.shape)
            return 8 * side * side
        return volume(self.unit.box) * self.itemsize

    @property
    def need(self) -> int:
        """The bytes that its owner needs room for: a Gram matrix comes from every sender and goes back to each."""
        if not self.gram:
            return self.size
        senders = sum(share > 0 for share in _shares(self.spread, self.unit.box, self.spread.ranks[0]))
        return max(1, senders) * self.size

    def sent_by(self, rank: int) -> int:
        """Bytes that a rank with a share of it sends to the owner, and gets back."""
        held = self.spread.held(rank, self.unit.box)
        return (self.size if held else 0) if self.gram else held * self.itemsize


def assign(parcels: Sequence[Parcel]) -> list[Parcel]:
    """Give every parcel an owner: a rank that holds all of it where there is one, else the least loaded of its mesh.

    Largest first, so that loads are nearly equal; ties go to the lower rank.

    >>> from rekindle.blocks.layouts import matrices
    >>> from rekindle.sharding.units import units
    >>> spread = Spread((4, 4), (2,), (0, 1), ((0, 0),))
    >>> unit = units([matrices("out in")((4, 4))[0].layout], spread)[0]
    >>> [p.owner for p in assign([Parcel(i, unit, spread, 4) for i in range(4)])]
    [0, 1, 0, 1]
    """
    ranks = sorted({rank for parcel in parcels for rank in parcel.spread.ranks})
    load = dict.fromkeys(ranks, 0.0)
    heaps: dict[tuple[int, ...], list[tuple[float, int]]] = {}
    owners: dict[int, int] = {}
    for index in sorted(range(len(parcels)), key=lambda i: (-parcels[i].unit.cost, i)):
        parcel = parcels[index]
        candidates = parcel.spread.holders(parcel.unit.box) or parcel.spread.ranks
        owner = _least(heaps, tuple(sorted(candidates)), load)
        owners[index] = owner
        load[owner] += parcel.unit.cost
    return [Parcel(p.tensor, p.unit, p.spread, p.itemsize, owners[index], p.gram) for index, p in enumerate(parcels)]


def _least(
    heaps: dict[tuple[int, ...], list[tuple[float, int]]], candidates: tuple[int, ...], load: Mapping[int, float]
) -> int:
    """The least loaded candidate; heaps are corrected lazily, since loads only grow."""
    heap = heaps.setdefault(candidates, [(0.0, rank) for rank in candidates])
    while True:
        known, rank = heap[0]
        if known == load[rank]:
            return rank
        heapq.heapreplace(heap, (load[rank], rank))


def room_for(parcels: Sequence[Parcel]) -> int:
    """The bytes that each of an exchange's three buffers may have: the largest parcel, or `MINIMUM` if that is more."""
    return max((MINIMUM, *(parcel.need for parcel in parcels)))


@dataclass
class _Lot:
    members: list[int] = field(default_factory=list)
    owned: dict[int, int] = field(default_factory=dict)  # bytes by owner
    sent: Tensor | int = 0  # bytes by rank
    copied: tuple[Any, ...] | None = None  # along which axes of which mesh its members are copied, if they are


def lots(parcels: Sequence[Parcel], budget: int | None = None) -> list[list[int]]:
    """Indices of the parcels of each lot: no owner gets, and no rank sends, more than `budget` bytes of a lot.

    A parcel that is larger than the budget is its owner's only one in the lot. The default is `room_for(parcels)`.
    What a copy receives is what the copy next to it has sent to its owners, so that is bounded by the same number as
    long as all copies of a lot lie along the same axes.
    """
    room = room_for(parcels) if budget is None else budget
    largest = max([room, *(parcel.need for parcel in parcels)])
    ranks = 1 + max((rank for parcel in parcels for rank in parcel.spread.ranks), default=0)
    queue: dict[int, int] = {}
    found: list[_Lot] = []
    # Parcels of one shape follow each other, so that the solver gets them as one batch.
    for index in sorted(range(len(parcels)), key=lambda i: (-parcels[i].unit.cost, parcels[i].unit.shape, i)):
        parcel = parcels[index]
        sent, axes = _sent(parcel, ranks), _copied(parcel.spread)
        number = queue.get(parcel.owner, 0)
        while number < len(found) and not _fits(found[number], parcel, sent, axes, room, largest):
            number += 1
        if number == len(found):
            found.append(_Lot())
        lot = found[number]
        lot.members.append(index)
        lot.owned[parcel.owner] = lot.owned.get(parcel.owner, 0) + parcel.need
        lot.sent = lot.sent if sent is None else lot.sent + sent
        lot.copied = lot.copied or axes
        queue[parcel.owner] = number
    return [lot.members for lot in found]


def _fits(
    lot: _Lot, parcel: Parcel, sent: Tensor | None, axes: tuple[Any, ...] | None, room: int, largest: int
) -> bool:
    used = lot.owned.get(parcel.owner, 0)
    if used and used + parcel.need > room:
        return False
    if axes is not None and lot.copied not in (None, axes):
        return False
    return sent is None or isinstance(lot.sent, int) or int((lot.sent + sent).max()) <= largest


def _copied(spread: Spread) -> tuple[Any, ...] | None:
    return (spread.mesh, spread.copies()) if spread.copied() > 1 else None


def _sent(parcel: Parcel, ranks: int) -> Tensor | None:
    """Bytes that each rank sends to the owner, or passes on to another copy if that is more; None: nothing.

    The owner's own share counts where there are copies.
    """
    spread, box = parcel.spread, parcel.unit.box
    copied = spread.copied() > 1
    if not copied and spread.held(parcel.owner, box) == volume(box):
        return None
    shares = torch.zeros(ranks, dtype=torch.int64)
    shares[list(spread.ranks)] = torch.tensor(_shares(spread, box, spread.first(parcel.owner)))
    if not copied:
        shares[parcel.owner] = 0
    handed = shares * parcel.itemsize
    return torch.maximum((shares > 0) * parcel.size, handed * copied) if parcel.gram else handed


@lru_cache(maxsize=4096)
def _shares(spread: Spread, box: Box, first: int) -> tuple[int, ...]:
    """How many elements of a box each rank of the mesh holds that is in the same copy as `first`; 0 for the others."""
    return tuple(spread.held(rank, box) if spread.sends(rank, first) else 0 for rank in spread.ranks)


@dataclass(frozen=True)
class Estimate:
    """The cost of one call on `ranks` processes: bytes and memory are those of the busiest one."""

    ranks: int
    parameters: int
    lots: int
    balance: float
    moved: int
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks: busiest rank {self.balance:.2f} times the mean load, "
            f"sends {self.moved / 1e6:,.1f} MB, holds {self.memory / 1e6:,.1f} MB beyond its shard, {self.lots} lots"
        )


def estimate(weights: Iterable[tuple[Sequence[Layout], int]], ranks: int) -> Estimate:
    """What one call moves and holds, before there are any ranks.

    The weights are (layouts of the blocks, bytes per element) of each parameter, cut by rows as FSDP2 does.
    """
    parcels: list[Parcel] = []
    parameters = 0
    for number, (layouts, itemsize) in enumerate(weights):
        shape = layouts[0].shape
        parameters += math.prod(shape)
        spread = Spread(shape, (ranks,), tuple(range(ranks)), ((0, 0),) if ranks > 1 else ())
        parcels += [Parcel(number, unit, spread, itemsize) for unit in units(layouts, spread)]
    parcels = assign(parcels)
    load, sent = [0.0] * ranks, [0.0] * ranks
    for parcel in parcels:
        load[parcel.owner] += parcel.unit.cost
        if ranks > 1 and not parcel.spread.holders(parcel.unit.box):
            share = parcel.size / ranks  # every other rank sends its rows, the owner sends all of them back
            for rank in range(ranks):
                sent[rank] += parcel.size - share if rank == parcel.owner else share
    mean = sum(load) / ranks
    balance = max(load) / mean if mean else 1.0
    memory = BUFFERS * room_for(parcels) if ranks > 1 else 0
    return Estimate(ranks, parameters, len(lots(parcels)), balance, int(max(sent)), memory)
