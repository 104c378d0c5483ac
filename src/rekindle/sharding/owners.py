"""Who solves what, and when: units get owners balanced by cost, and owners' queues are cut into lots.

Every process computes the same assignment from the same plan, so none of it is communicated.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rekindle.sharding.spread import Box, Spread, volume
from rekindle.sharding.units import Unit

# A lot holds at least this much per rank: matrices of small models travel together.
MINIMUM = 1 << 20


@dataclass(frozen=True)
class Parcel:
    """A unit on its way: which tensor it is a box of, how that lies, who solves it.

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
        """The bytes that its owner needs room for, before or after it is put together, whichever is more."""
        if not self.gram:
            return self.size
        senders = sum(share > 0 for share in _shares(self.spread, self.unit.box, self.spread.ranks[0]))
        return max(1, senders - 1) * self.size

    def sent_by(self, rank: int) -> int:
        """Bytes that a rank with a share of it sends to the owner, and gets back."""
        held = self.spread.held(rank, self.unit.box)
        return (self.size if held else 0) if self.gram else held * self.itemsize


def assign(parcels: Sequence[Parcel]) -> list[Parcel]:
    """Give every parcel an owner: a rank that holds all of it where there is one, else the least loaded of its mesh.

    Largest first, so that the loads end nearly equal; ties go to the lower rank.

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


def _least(heaps: dict[tuple[int, ...], list[tuple[float, int]]], candidates: tuple[int, ...], load: Any) -> int:
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
    sent: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # bytes by place, per group of ranks


def lots(parcels: Sequence[Parcel], budget: int | None = None) -> list[list[int]]:
    """Indices of the parcels of each lot: no owner gets, and no rank sends, more than `budget` bytes of a lot.

    A parcel that is larger than the budget is its owner's only one in the lot. The default is `room_for(parcels)`.
    """
    room = room_for(parcels) if budget is None else budget
    largest = max([room, *(parcel.need for parcel in parcels)])
    queue: dict[int, int] = {}
    found: list[_Lot] = []
    # Parcels of one shape follow each other, so that the solver gets them as one batch.
    for index in sorted(range(len(parcels)), key=lambda i: (-parcels[i].unit.cost, parcels[i].unit.shape, i)):
        parcel = parcels[index]
        sent = _sent(parcel)
        number = queue.get(parcel.owner, 0)
        while number < len(found) and not _fits(found[number], parcel, sent, room, largest):
            number += 1
        if number == len(found):
            found.append(_Lot())
        lot, group = found[number], parcel.spread.ranks
        lot.members.append(index)
        lot.owned[parcel.owner] = lot.owned.get(parcel.owner, 0) + parcel.need
        if sent is not None:
            lot.sent[group] = lot.sent[group] + sent if group in lot.sent else sent
        queue[parcel.owner] = number
    return [lot.members for lot in found]


def _fits(lot: _Lot, parcel: Parcel, sent: Tensor | None, room: int, largest: int) -> bool:
    used = lot.owned.get(parcel.owner, 0)
    if used and used + parcel.need > room:
        return False
    before = lot.sent.get(parcel.spread.ranks)
    return sent is None or before is None or int((before + sent).max()) <= largest


def _sent(parcel: Parcel) -> Tensor | None:
    """Bytes that each rank of the mesh sends to the owner; None where nothing moves."""
    spread, box = parcel.spread, parcel.unit.box
    if spread.held(parcel.owner, box) == volume(box):
        return None
    shares = torch.tensor(_shares(spread, box, spread.first(parcel.owner)))
    shares[spread.ranks.index(parcel.owner)] = 0
    return (shares > 0) * parcel.size if parcel.gram else shares * parcel.itemsize


@lru_cache(maxsize=4096)
def _shares(spread: Spread, box: Box, first: int) -> tuple[int, ...]:
    """How many elements of a box each rank of the mesh holds that is in the same copy as `first`; 0 for the others."""
    return tuple(spread.held(rank, box) if spread.sends(rank, first) else 0 for rank in spread.ranks)
