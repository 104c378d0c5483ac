"""Who solves what, and when: units get owners balanced by cost, and owners' queues are cut into lots.

Every process computes the same assignment from the same plan, so none of it is communicated.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.sharding.spread import Spread, volume
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


def lots(parcels: Sequence[Parcel], budget: int | None = None) -> list[list[int]]:
    """Indices of the parcels of each lot: per owner no more than `budget` bytes, or one parcel that is larger.

    By default a third of the largest parcel, so that several lots of smaller ones can be in flight in the memory that
    the largest needs anyway.
    """
    room = budget if budget is not None else max([MINIMUM, *(parcel.size // 3 for parcel in parcels)])
    filled: dict[int, tuple[int, int]] = {}
    found: list[list[int]] = []
    # Parcels of one shape follow each other, so that the solver gets them as one batch.
    order = sorted(range(len(parcels)), key=lambda i: (-parcels[i].unit.cost, parcels[i].unit.shape, i))
    for index in order:
        parcel = parcels[index]
        lot, used = filled.get(parcel.owner, (0, 0))
        if used and used + parcel.size > room:
            lot, used = lot + 1, 0
        filled[parcel.owner] = (lot, used + parcel.size)
        while len(found) <= lot:
            found.append([])
        found[lot].append(index)
    return found
