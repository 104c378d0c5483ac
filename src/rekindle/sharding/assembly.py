"""Distributed parameters with the layouts of their matrices, ready to be treated whole on their owners.

This is where a model's parameters meet the rest of the package: `Assembly` reads how each is placed, checks that all
processes agree on it, cuts it into parcels and runs an exchange over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rekindle.blocks.layouts import Block, Layout
from rekindle.blocks.names import partition_of
from rekindle.sharding.exchange import Exchange
from rekindle.sharding.gram import pays
from rekindle.sharding.norms import square_sums
from rekindle.sharding.owners import Parcel, assign
from rekindle.sharding.partitions import Partitions
from rekindle.sharding.spread import Piece, Spread
from rekindle.sharding.team import Team, local
from rekindle.sharding.units import Part, units

Work = Sequence[tuple[int, Parcel, Tensor]]
"""What an owner gets: the item's number, the parcel, and its tensor (a box of the parameter, or a Gram matrix)."""


@dataclass(frozen=True)
class Item:
    """One distributed parameter and the layouts of the matrices in it that matter."""

    name: str
    tensor: Tensor
    spread: Spread
    layouts: tuple[Layout, ...]


class Assembly:
    """Items that are processed together; creating one is collective: every process of the team takes part.

    gram: send the Gram matrices of tall matrices where that moves less.

    >>> from rekindle.blocks.layouts import matrices
    >>> layout = matrices("out in")((2, 3))[0].layout
    >>> weight = torch.ones(2, 3)
    >>> item = Item("weight", weight, Spread.replicated((2, 3), (0,)), (layout,))
    >>> for done in Assembly(Team.solo(), [item]).run(lambda work: [tensor.zero_() for _, _, tensor in work]):
    ...     print(done, weight.sum().item())
    [(0, (0,))] 0.0
    """

    def __init__(self, team: Team, items: Sequence[Item], *, gram: bool = False) -> None:
        self.team, self.items = team, items
        with team.together():
            for item in items:
                held, expected = tuple(local(item.tensor).shape), item.spread.local_shape(team.rank)
                if held != expected:
                    raise ValueError(f"{item.name!r} holds {held} here, its placements say {expected}")
        described = [(i.name, i.spread.shape, i.spread.mesh, i.spread.splits, i.layouts, i.tensor.dtype) for i in items]
        team.same("plan", described)
        # The same parameter may live on several meshes, one per group of ranks: expert parallel beside data parallel.
        instances = self._instances()
        self.tensors: list[Tensor] = []
        self._item: list[int] = []
        parcels: list[Parcel] = []
        for number, item in enumerate(items):
            for spread in instances[number]:
                mine = spread == item.spread
                for unit in units(item.layouts, spread):
                    parcel = Parcel(len(self.tensors), unit, spread, item.tensor.element_size())
                    parcels.append(replace(parcel, gram=gram and team.size > 1 and pays(parcel)))
                self._item.append(number)
                here = item.tensor if partition_of(item.tensor) is not None else local(item.tensor)
                self.tensors.append(here if mine else here.new_empty(0))
        self.parcels = assign(parcels)
        self.partitioned = any(partition_of(tensor) is not None for tensor in self.tensors)
        self.exchange: Exchange | Partitions | None = None

    def run(
        self,
        treat: Callable[[Work], None],
        *,
        write: bool = True,
        only: Callable[[Parcel], bool] | None = None,
        assembled: bool = False,
    ) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
        """Process every parcel on its owner; yields (item, layouts) of what is written, lot by lot.

        only: leave other parcels out. assembled: no Gram matrices, whatever was decided at first.
        """
        chosen = [p for p in self.parcels if only is None or only(p)]
        if assembled:
            chosen = [replace(parcel, gram=False) for parcel in chosen]
        self.exchange = (Partitions if self.partitioned else Exchange)(self.team, self.tensors, chosen)

        def numbered(work: Sequence[tuple[Parcel, Tensor]]) -> None:
            treat([(self._item[parcel.tensor], parcel, tensor) for parcel, tensor in work])

        for lot in self.exchange.run(numbered, write=write):
            yield [(self._item[chosen[i].tensor], tuple(part.block for part in chosen[i].unit.parts)) for i in lot]

    def measure(self, look: Callable[[int, Part, Tensor], Any]) -> dict[tuple[int, int], list[tuple[Part, Any]]]:
        """Call look(item, part, box) for every part on its owner; (item, layout) → (part, result), on every process.

        >>> from rekindle.blocks.layouts import matrices
        >>> item = Item("w", torch.ones(2, 3), Spread.replicated((2, 3), (0,)), (matrices("out in")((2, 3))[0].layout,))
        >>> found = Assembly(Team.solo(), [item]).measure(lambda item, part, box: box.sum().item())
        >>> [(key, [value for _, value in values]) for key, values in found.items()]
        [((0, 0), [6.0])]
        """
        own: dict[tuple[int, int], list[tuple[Part, Any]]] = {}

        def treat(work: Work) -> None:
            for number, parcel, box in work:
                for part in parcel.unit.parts:
                    own.setdefault((number, part.block), []).append((part, look(number, part, box)))

        for _ in self.run(treat, write=False, assembled=True):
            pass
        found: dict[tuple[int, int], dict[tuple[int, ...], tuple[Part, Any]]] = {}
        for each in self.team.gather(own):
            for key, results in each.items():
                for part, result in results:
                    found.setdefault(key, {}).setdefault(part.numbers, (part, result))
        return {key: [parts[numbers] for numbers in sorted(parts)] for key, parts in sorted(found.items())}

    def pieces(self, number: int) -> list[Piece]:
        """This rank's own pieces of all units of an item."""
        mine = [p for p in self.parcels if self.item(p) == number and p.spread == self.items[number].spread]
        return [piece for parcel in mine for piece in parcel.spread.pieces(self.team.rank, parcel.unit.box)]

    def item(self, parcel: Parcel) -> int:
        """The number of the item that a parcel is a part of."""
        return self._item[parcel.tensor]

    def norms(self) -> list[list[Tensor]]:
        """‖W‖_F of every matrix, for each layout of each item, from sums over shards alone; collective."""
        if self.partitioned:
            return self._fetched_norms()
        found: list[list[Tensor]] = [[] for _ in self.items]
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, item in enumerate(self.items):
            groups.setdefault(item.spread.ranks, []).append(number)
        for ranks, members in groups.items():
            sums: list[Tensor] = []
            with self.team.together():
                for number in members:
                    item = self.items[number]
                    counts = item.spread.sends(self.team.rank, ranks[0])  # one copy of each piece
                    for layout in item.layouts:
                        own = square_sums(layout, local(item.tensor), item.spread.extents(self.team.rank))
                        sums.append(own.cpu() if counts else torch.zeros_like(own, device="cpu"))
            team = self.team if ranks == self.team.ranks or self.team.size == 1 else Team.of(ranks, self.team.device)
            total = team.sum(torch.cat(sums)).sqrt()
            parts = iter(torch.split(total, [len(each) for each in sums]))
            for number in members:
                found[number] = [next(parts) for _ in self.items[number].layouts]
        return found

    def _fetched_norms(self) -> list[list[Tensor]]:
        measured = self.measure(lambda number, part, box: part.layout.norms(box, torch.float64).cpu())
        found = [[torch.empty(layout.sizes[0], dtype=torch.float64) for layout in item.layouts] for item in self.items]
        for (number, place), parts in measured.items():
            for part, norms in parts:
                found[number][place][list(part.numbers)] = norms
        return found

    def _instances(self) -> list[tuple[Spread, ...]]:
        own = [item.spread.ranks for item in self.items]
        alike = len(set(self.team.gather(hash(tuple(own))))) == 1
        lists = [own] if alike else self.team.gather(own)
        found = []
        for number, item in enumerate(self.items):
            every = sorted({ranks[number] for ranks in lists})
            found.append(tuple(replace(item.spread, ranks=ranks) for ranks in every))
        return found


def inside(block: Block, part: Part) -> Block:
    """The block as it lies inside a box.

    >>> from rekindle.blocks.layouts import matrices
    >>> from rekindle.sharding.units import units
    >>> block = matrices("expert out in", count="expert")((4, 3, 2))[0]
    >>> inside(block, units([block.layout], Spread((4, 3, 2), (2,), (0, 1), ((0, 0),)))[0].parts[0]).count
    2
    """
    count, out, in_ = part.layout.sizes
    return replace(block, layout=part.layout, count=count, out=out, in_=in_)
