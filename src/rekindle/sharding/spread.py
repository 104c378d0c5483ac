"""How one tensor is distributed over processes: for every rank, which index ranges of the whole tensor it holds.

A DTensor's placements on its mesh become, for every dimension, a list of index ranges per rank: one range for an
ordinary shard, several for an uneven shard of FSDP2 on top of tensor parallel, none for a rank with an empty shard.
Everything else in this package works on boxes (one range per dimension) cut with these ranges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

Range = tuple[int, int]
Box = tuple[Range, ...]
Slices = tuple[slice, ...]


class LayoutNotSupported(ValueError):
    """A parameter is distributed in a way that rekindle does not read or write."""


@dataclass(frozen=True)
class Piece:
    """A part of a box that one rank holds: where it lies in that rank's own tensor, and where in the box."""

    local: Slices
    inside: Slices
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Spread:
    """A tensor of `shape` on a mesh of processes.

    `mesh` is the mesh's shape and `ranks` its global ranks in row-major order. `splits` lists (tensor dimension, mesh
    dimension) in the order in which the tensor is cut; mesh dimensions that are not named hold copies.

    >>> rows = Spread((5, 4), (2,), (0, 1), ((0, 0),))
    >>> rows.extents(0), rows.extents(1)
    ((((0, 3),), ((0, 4),)), (((3, 5),), ((0, 4),)))
    >>> [(piece.local, piece.inside) for piece in rows.pieces(1, ((2, 5), (0, 4)))]
    [((slice(0, 2, None), slice(0, 4, None)), (slice(1, 3, None), slice(0, 4, None)))]
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    splits: tuple[tuple[int, int], ...] = ()

    @classmethod
    def replicated(cls, shape: tuple[int, ...], ranks: tuple[int, ...]) -> Spread:
        """The same tensor on every rank, as under data parallel training.

        >>> Spread.replicated((2, 2), (0, 1)).holders(((0, 2), (0, 2)))
        (0, 1)
        """
        return cls(shape, (len(ranks),), ranks)

    @classmethod
    def of(cls, tensor: Tensor, name: str = "a parameter") -> Spread:
        """How a DTensor is distributed; raises `LayoutNotSupported` for partial sums and unknown placements."""
        spec: Any = tensor
        mesh = spec.device_mesh
        shape = tuple(tensor.shape)
        cuts: list[tuple[int, int, int]] = []
        for axis, placement in enumerate(spec.placements):
            kind = type(placement).__name__
            if kind == "Replicate":
                continue
            if kind not in ("Shard", "_StridedShard"):
                raise LayoutNotSupported(
                    f"{name!r} is placed as {placement}: only shards and copies can be read and written; "
                    "redistribute it with .redistribute(placements=[Replicate()]) first"
                )
            # FSDP2 on top of tensor parallel cuts what tensor parallel has cut before: split_factor counts those cuts.
            earlier = int(placement.split_factor) if kind == "_StridedShard" else 1
            cuts.append((earlier, axis, placement.dim % len(shape)))
        order = sorted(cuts, key=lambda cut: (cut[0], cut[1]))
        sizes = tuple(mesh.mesh.shape)
        for place, (earlier, axis, dim) in enumerate(order):
            before = math.prod(sizes[other] for _, other, d in order[:place] if d == dim and other > axis)
            if earlier > 1 and before != earlier:
                raise LayoutNotSupported(f"{name!r} has placements {spec.placements} whose order cannot be followed")
        custom = getattr(getattr(spec, "_spec", None), "shard_order", None) or ()
        if all(earlier == 1 for earlier, _, _ in cuts) and any(
            tuple(entry.mesh_dims) != tuple(sorted(entry.mesh_dims)) for entry in custom
        ):
            raise LayoutNotSupported(f"{name!r} is cut in the order {custom}, which is not supported")
        ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
        return cls(shape, sizes, ranks, tuple((dim, axis) for _, axis, dim in order))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where a global rank is on the mesh, None if it is not on it."""
        place = _places(self.ranks).get(rank)
        if place is None:
            return None
        found = []
        for size in reversed(self.mesh):
            place, here = divmod(place, size)
            found.append(here)
        return tuple(reversed(found))

    def extents(self, rank: int) -> tuple[tuple[Range, ...], ...]:
        """The index ranges that a rank holds, for each dimension; in the order of its own tensor."""
        coordinate = self.coordinate(rank)
        if coordinate is None:
            return tuple(() for _ in self.shape)
        return _extents(self.shape, self.mesh, self.splits, coordinate)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's own tensor."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.extents(rank))

    def pieces(self, rank: int, box: Box) -> tuple[Piece, ...]:
        """What a rank holds of a box, in an order that every process agrees on."""
        return _pieces(self.extents(rank), box)

    def held(self, rank: int, box: Box) -> int:
        """How many elements of a box a rank holds."""
        return sum(piece.numel for piece in self.pieces(rank, box))

    def copies(self) -> tuple[int, ...]:
        """The mesh dimensions along which ranks hold the same."""
        cut = {axis for _, axis in self.splits}
        return tuple(axis for axis in range(len(self.mesh)) if axis not in cut)

    def sends(self, rank: int, owner: int) -> bool:
        """Whether, among the ranks with the same piece, this one sends it to `owner`: the copy next to the owner."""
        return self.offset(rank, owner) == 0

    def copied(self) -> int:
        """How many ranks hold each piece.

        >>> Spread((4, 4), (2, 3), tuple(range(6)), ((0, 0),)).copied()
        3
        """
        return math.prod(self.mesh[axis] for axis in self.copies())

    def offset(self, rank: int, owner: int) -> int:
        """How far a rank's copy is from the owner's, counted along the mesh; 0 for the owner's own, -1 off the mesh."""
        coordinate, target = self.coordinate(rank), self.coordinate(owner)
        if coordinate is None:
            return -1
        found = 0
        for axis in self.copies():
            found = found * self.mesh[axis] + (coordinate[axis] - (target[axis] if target else 0)) % self.mesh[axis]
        return found

    def twin(self, rank: int, owner: int, offset: int) -> int:
        """The rank that holds the same piece as `rank`, in the copy at this offset from the owner's.

        >>> spread = Spread((4, 4), (2, 3), tuple(range(6)), ((0, 0),))
        >>> [spread.twin(3, 1, offset) for offset in range(3)], spread.offset(5, 1)
        ([4, 5, 3], 1)
        """
        coordinate, target = self.coordinate(rank), self.coordinate(owner)
        assert coordinate is not None and target is not None
        place = list(coordinate)
        for axis in reversed(self.copies()):
            offset, here = divmod(offset, self.mesh[axis])
            place[axis] = (target[axis] + here) % self.mesh[axis]
        return self.ranks[_flat(tuple(place), self.mesh)]

    def first(self, rank: int) -> int:
        """The first rank of the copy that a rank is in."""
        coordinate = self.coordinate(rank)
        assert coordinate is not None
        copies = self.copies()
        return self.ranks[_flat(tuple(c if a in copies else 0 for a, c in enumerate(coordinate)), self.mesh)]

    def holders(self, box: Box) -> tuple[int, ...]:
        """The ranks that hold all of a box."""
        # A rank that holds all of it holds its first element: checking every rank is slow with thousands of them.
        at: dict[int, int] = {}
        ranges: list[tuple[Range, ...]] = [((0, size),) if size else () for size in self.shape]
        for dim, axis in self.splits:
            total = sum(stop - start for start, stop in ranges[dim])
            before = sum(min(stop, box[dim][0]) - start for start, stop in ranges[dim] if start < box[dim][0])
            at[axis] = before // max(1, -(-total // self.mesh[axis]))
            if at[axis] >= self.mesh[axis]:
                return ()
            ranges[dim] = _chunk(ranges[dim], self.mesh[axis], at[axis])
        choices = ([at[axis]] if axis in at else range(size) for axis, size in enumerate(self.mesh))
        found = [self.ranks[_flat(coordinate, self.mesh)] for coordinate in itertools.product(*choices)]
        return tuple(found) if found and self.held(found[0], box) == volume(box) else ()

    def boundaries(self, dim: int) -> tuple[int, ...]:
        """Where a dimension is cut between ranks."""
        return _boundaries(self.shape, self.mesh, self.splits, dim)


def volume(box: Box) -> int:
    """The number of elements of a box.

    >>> volume(((0, 2), (3, 7)))
    8
    """
    return math.prod(stop - start for start, stop in box)


def _flat(coordinate: tuple[int, ...], mesh: tuple[int, ...]) -> int:
    place = 0
    for here, size in zip(coordinate, mesh, strict=True):
        place = place * size + here
    return place


@lru_cache(maxsize=4096)
def _places(ranks: tuple[int, ...]) -> dict[int, int]:
    return {rank: place for place, rank in enumerate(ranks)}


@lru_cache(maxsize=65536)
def _extents(
    shape: tuple[int, ...], mesh: tuple[int, ...], splits: tuple[tuple[int, int], ...], coordinate: tuple[int, ...]
) -> tuple[tuple[Range, ...], ...]:
    ranges: list[tuple[Range, ...]] = [((0, size),) if size else () for size in shape]
    for dim, axis in splits:
        ranges[dim] = _chunk(ranges[dim], mesh[axis], coordinate[axis])
    return tuple(ranges)


def _chunk(ranges: tuple[Range, ...], parts: int, part: int) -> tuple[Range, ...]:
    """The part that torch.chunk would give, of indices that may lie in several ranges."""
    total = sum(stop - start for start, stop in ranges)
    size = -(-total // parts)
    low, high = min(total, part * size), min(total, (part + 1) * size)
    kept, position = [], 0
    for start, stop in ranges:
        first, last = max(low - position, 0), min(high - position, stop - start)
        if first < last:
            kept.append((start + first, start + last))
        position += stop - start
    return tuple(kept)


@lru_cache(maxsize=65536)
def _pieces(extents: tuple[tuple[Range, ...], ...], box: Box) -> tuple[Piece, ...]:
    per_dim: list[list[tuple[slice, slice]]] = []
    for ranges, (low, high) in zip(extents, box, strict=True):
        cuts, position = [], 0
        for start, stop in ranges:
            first, last = max(start, low), min(stop, high)
            if first < last:
                at = position + first - start
                cuts.append((slice(at, at + last - first), slice(first - low, last - low)))
            position += stop - start
        per_dim.append(cuts)
    return tuple(_combined(per_dim))


def _combined(per_dim: list[list[tuple[slice, slice]]]) -> Iterator[Piece]:
    for cuts in itertools.product(*per_dim):
        shape = tuple(inside.stop - inside.start for _, inside in cuts)
        yield Piece(tuple(local for local, _ in cuts), tuple(inside for _, inside in cuts), shape)


@lru_cache(maxsize=4096)
def _boundaries(
    shape: tuple[int, ...], mesh: tuple[int, ...], splits: tuple[tuple[int, int], ...], dim: int
) -> tuple[int, ...]:
    axes = [axis for d, axis in splits if d == dim]
    points = {0, shape[dim]}
    for values in itertools.product(*(range(mesh[axis]) for axis in axes)):
        coordinate = [0] * len(mesh)
        for axis, value in zip(axes, values, strict=True):
            coordinate[axis] = value
        for start, stop in _extents(shape, mesh, splits, tuple(coordinate))[dim]:
            points |= {start, stop}
    return tuple(sorted(points))
