"""Which bytes go from which rank to which in one all-to-all, and where they are in its two buffers.

Both ends compute the same table from the same plan, so no sizes are exchanged. A lot makes a trip of several messages:
its pieces are collected by their owners, returned to the ranks of the owner's own copy of the model, and passed on from
there to the same ranks of the other copies (DDP, HSDP), one copy after the other, so that no buffer grows with their
number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rekindle.sharding.owners import Parcel
from rekindle.sharding.team import Team

HEADER = 8  # bytes, which keeps what follows aligned
ALIGNED = 64  # where a matrix begins in memory: alignment for vector instructions


@dataclass(frozen=True)
class Cargo:
    """What one rank sends another of one parcel: where it begins in the buffer, and the rank at the other end."""

    parcel: Parcel
    start: int
    peer: int


@dataclass(frozen=True)
class Route:
    """One all-to-all: bytes to send to and receive from each rank of the team, and what they are."""

    sizes: list[int]
    expected: list[int]
    outgoing: list[Cargo]
    incoming: list[Cargo]

    @property
    def sent(self) -> int:
        """Bytes of the buffer that is sent."""
        return sum(self.sizes)

    @property
    def received(self) -> int:
        """Bytes of the buffer that is received."""
        return sum(self.expected)


@dataclass
class Trip:
    """All messages of one lot, and where this rank's own matrices lie while they are whole."""

    lot: list[int]
    collecting: Route
    returning: Route
    handing: list[Route]
    boxes: list[tuple[Parcel, int]]  # own parcels and where each begins
    kept: list[tuple[Parcel, int]]  # the parts of own parcels that stay on this rank: where behind what is sent back
    space: int = 0  # bytes of the boxes
    rest: int = 0  # bytes of what is kept

    def sizes(self) -> tuple[int, int, int]:
        """Bytes that it needs of the buffers: of the one that is sent, the one collected into, the one worked in."""
        handed = [route.sent for route in self.handing]
        landed = [route.received for route in self.handing]
        outgoing = max([self.collecting.sent, padded(self.returning.sent) + self.rest, *handed])
        return outgoing, self.collecting.received, max([self.space, self.returning.received, *landed])


def trip(team: Team, parcels: Sequence[Parcel], lot: list[int], *, write: bool = True) -> Trip:
    """The messages of one lot as this rank sees them; with `write=False` nothing is returned but each rank's state.

    >>> trip(Team.solo(), [], []).sizes()
    (0, 0, 0)
    """
    chosen = [parcels[index] for index in lot]
    rounds = max((parcel.spread.copied() for parcel in chosen), default=1) if write else 1
    made = Trip(
        lot,
        _route(team, _collecting(team, chosen)),
        _route(team, _returning(team, chosen) if write else (), HEADER),
        [_route(team, _handing(team, chosen, number)) for number in range(1, rounds)],
        [],
        [],
    )
    for parcel in chosen:
        if parcel.owner == team.rank:
            made.boxes.append((parcel, made.space))
            made.space += padded(parcel.size, ALIGNED)
            held = parcel.sent_by(team.rank) if write else 0
            if held:
                made.kept.append((parcel, made.rest))
                made.rest += padded(held)
    return made


_Step = tuple[Parcel, int, int, int]  # the parcel, from whom, to whom, bytes


def _collecting(team: Team, parcels: Sequence[Parcel]) -> Iterator[_Step]:
    for parcel in parcels:
        for rank in parcel.spread.ranks if parcel.owner == team.rank else (team.rank,):
            if rank != parcel.owner and parcel.spread.sends(rank, parcel.owner):
                yield parcel, rank, parcel.owner, parcel.sent_by(rank)


def _returning(team: Team, parcels: Sequence[Parcel]) -> Iterator[_Step]:
    for parcel, rank, owner, size in _collecting(team, parcels):
        yield parcel, owner, rank, size


def _handing(team: Team, parcels: Sequence[Parcel], number: int) -> Iterator[_Step]:
    """From the owner's copy to the one that is `number` copies further on."""
    for parcel in parcels:
        spread = parcel.spread
        if number < spread.copied() and spread.offset(team.rank, parcel.owner) in (0, number):
            first, other = (spread.twin(team.rank, parcel.owner, offset) for offset in (0, number))
            yield parcel, first, other, spread.held(team.rank, parcel.unit.box) * parcel.itemsize


def _route(team: Team, steps: Iterable[_Step], header: int = 0) -> Route:
    places = {rank: place for place, rank in enumerate(team.ranks)}
    sizes, expected = [header] * team.size, [header] * team.size
    sizes[team.place] = expected[team.place] = 0
    found: list[tuple[bool, Parcel, int, int]] = []
    for parcel, sender, receiver, size in steps:
        out = sender == team.rank
        peer = receiver if out else sender
        row = sizes if out else expected
        if size:
            found.append((out, parcel, row[places[peer]], peer))
            row[places[peer]] += padded(size)
    starts = {True: offsets(sizes), False: offsets(expected)}
    cargo = [(out, Cargo(parcel, starts[out][places[peer]] + start, peer)) for out, parcel, start, peer in found]
    return Route(sizes, expected, [each for out, each in cargo if out], [each for out, each in cargo if not out])


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each part begins.

    >>> offsets([3, 0, 4])
    [0, 3, 3]
    """
    return list(accumulate(sizes, initial=0))[:-1]


def padded(size: int, to: int = HEADER) -> int:
    """The next multiple of `to`.

    >>> padded(9), padded(8)
    (16, 8)
    """
    return -(-size // to) * to
