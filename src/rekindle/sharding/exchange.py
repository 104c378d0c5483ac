"""Whole matrices on their owners: shards travel there in packed lots, are treated, and travel back.

While one lot is treated, the next is being collected and, where memory allows, the one before is being returned. Each
is one `all_to_all_single` of bytes. The message that returns a lot begins with the sender's state, so every process
knows that all others treated that lot without an error before it writes a single number of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rekindle.sharding.gram import apply_factor, gram_of
from rekindle.sharding.owners import Parcel, lots
from rekindle.sharding.team import Team

Treat = Callable[[Sequence[tuple[Parcel, Tensor]]], None]
"""Called on the owner with the parcels of one lot and their tensors (a box, or a Gram matrix), changed in place."""

_HEADER = 8  # bytes, which keeps what follows aligned
IN_FLIGHT = 3  # gathered matrices that a rank may hold at a time


@dataclass
class _Message:
    """One all-to-all on its way. `sent` is kept alive until it has left."""

    received: Tensor
    sizes: list[int]
    sent: Tensor
    request: Any

    @property
    def size(self) -> int:
        return self.received.numel() + self.sent.numel()


@dataclass
class _Returning:
    message: _Message
    lot: list[int]
    mine: list[tuple[Parcel, Tensor]]  # parts of own boxes that stay here
    failed: bool  # what this rank told the others with it

    @property
    def size(self) -> int:
        return self.message.size + _size(self.mine)


class Exchange:
    """Moves the boxes of `parcels` to their owners and back.

    tensors: this rank's own shards, by the parcels' `tensor` number.

    >>> from rekindle.blocks.layouts import matrices
    >>> from rekindle.sharding.spread import Spread
    >>> from rekindle.sharding.units import units
    >>> weight, spread = torch.ones(2, 3), Spread.replicated((2, 3), (0,))
    >>> parcel = Parcel(0, units([matrices("out in")((2, 3))[0].layout], spread)[0], spread, 4, owner=0)
    >>> for lot in Exchange(Team.solo(), [weight], [parcel]).run(lambda work: [t.mul_(2) for _, t in work]):
    ...     print(lot)
    [0]
    >>> weight.sum()
    tensor(12.)
    """

    def __init__(
        self, team: Team, tensors: Sequence[Tensor], parcels: Sequence[Parcel], *, budget: int | None = None
    ) -> None:
        self.team, self.tensors, self.parcels = team, tensors, parcels
        self.lots = lots(parcels, budget)
        self.bytes_sent = 0
        self.peak = 0
        largest = max((parcel.size for parcel in parcels), default=0)
        self._room = IN_FLIGHT * largest
        self._places = {rank: place for place, rank in enumerate(team.ranks)}
        self._error: Exception | None = None

    @torch.no_grad()
    def run(self, treat: Treat, *, write: bool = True) -> Iterator[list[int]]:
        """Treat all lots; yields the numbers of a lot's parcels once it is written (with `write=False`: treated).

        An exception on any process ends the run on all of them with the same error, before that lot is written.
        """
        if self.team.size == 1:
            yield from self._alone(treat, write)
            return
        returning: _Returning | None = None
        collecting = self._collect(self.lots[0]) if self.lots else None
        for number, lot in enumerate(self.lots):
            assert collecting is not None
            # Before the boxes of this lot take their memory, the lot before may have to give up its own.
            needed = 2 * collecting.received.numel() + (returning.size if returning else 0)
            if returning is not None and needed > self._room:
                yield self._write(returning, collecting, write)
                returning = None
            work = self._assemble(collecting, lot)
            self._note(collecting.size + _size(work), returning)
            collecting = self._collect(self.lots[number + 1]) if number + 1 < len(self.lots) else None
            held = _size(work) + (collecting.size if collecting else 0)
            if returning is not None and held + returning.size > self._room:
                yield self._write(returning, collecting, write)
                returning = None
            self._note(held, returning)
            self._guarded(lambda work=work: treat(work) if work else None)  # type: ignore[misc]
            if returning is not None:
                yield self._write(returning, collecting, write)
            returning = self._return(lot, work, write)
            self._note(_size(work) + (collecting.size if collecting else 0), returning)
            del work
        if returning is not None:
            yield self._write(returning, None, write)
        self.team.agree(self._error)

    def _note(self, held: int, returning: _Returning | None) -> None:
        self.peak = max(self.peak, held + (returning.size if returning else 0))

    def _alone(self, treat: Treat, write: bool) -> Iterator[list[int]]:
        for lot in self.lots:
            work = []
            for index in lot:
                parcel = self.parcels[index]
                view = self.tensors[parcel.tensor][tuple(slice(low, high) for low, high in parcel.unit.box)]
                work.append((parcel, view if write else view.clone()))
            treat(work)
            yield lot

    def _guarded(self, step: Callable[[], Any]) -> Any:
        """An error is kept until the others are told with the next message; after one nothing is treated any more."""
        if self._error is not None:
            return None
        try:
            return step()
        except Exception as error:
            self._error = error
            return None

    def _collect(self, lot: list[int]) -> _Message:
        """Start sending this rank's pieces of a lot to their owners."""
        out: list[list[Callable[[], Tensor]]] = [[] for _ in self.team.ranks]
        sizes = [0] * self.team.size
        expected = [0] * self.team.size
        for index in lot:
            parcel = self.parcels[index]
            if parcel.owner == self.team.rank:
                for rank in parcel.spread.ranks:
                    if rank != parcel.owner and parcel.spread.sends(rank, parcel.owner):
                        expected[self._places[rank]] += _padded(_collected(parcel, rank))
            elif parcel.spread.sends(self.team.rank, parcel.owner):
                place = self._places[parcel.owner]
                sizes[place] += _padded(_collected(parcel, self.team.rank))
                out[place].append(lambda parcel=parcel: self._outgoing(parcel))  # type: ignore[misc]
        return self._send(out, sizes, expected)

    def _outgoing(self, parcel: Parcel) -> Tensor:
        local = self.tensors[parcel.tensor]
        pieces = parcel.spread.pieces(self.team.rank, parcel.unit.box)
        if not pieces:
            return local.new_empty(0)
        if parcel.gram:
            return gram_of(local, pieces, parcel.unit.shape)
        if len(pieces) == 1:
            return local[pieces[0].local]
        return torch.cat([local[piece.local].flatten() for piece in pieces])

    def _assemble(self, message: _Message, lot: list[int]) -> list[tuple[Parcel, Tensor]]:
        """Wait for a lot and put this rank's own boxes together."""
        self._wait(message, "collecting matrices")
        position = _offsets(message.sizes)
        work: list[tuple[Parcel, Tensor]] = []
        for index in lot:
            parcel = self.parcels[index]
            if parcel.owner == self.team.rank:
                whole = self._guarded(lambda parcel=parcel: self._assembled(parcel, message, position))  # type: ignore[misc]
                if whole is not None:
                    work.append((parcel, whole))
        return work

    def _assembled(self, parcel: Parcel, message: _Message, position: list[int]) -> Tensor:
        local = self.tensors[parcel.tensor]
        side = min(parcel.unit.shape)
        if parcel.gram:
            whole = torch.zeros(side, side, dtype=torch.float64, device=local.device)
        else:
            whole = torch.empty(parcel.unit.shape, dtype=local.dtype, device=local.device)
        for rank in parcel.spread.ranks:
            if not parcel.spread.sends(rank, parcel.owner):
                continue
            pieces = parcel.spread.pieces(rank, parcel.unit.box)
            if not pieces:
                continue
            if rank == self.team.rank:
                if parcel.gram:
                    whole += gram_of(local, pieces, parcel.unit.shape)
                else:
                    for piece in pieces:
                        whole[piece.inside] = local[piece.local]
                continue
            place = self._places[rank]
            start = position[place]
            position[place] += _padded(_collected(parcel, rank))
            if parcel.gram:
                whole += _view(message.received, start, whole.dtype, (side, side)).to(whole.device)
                continue
            for piece in pieces:
                whole[piece.inside] = _view(message.received, start, local.dtype, piece.shape).to(local.device)
                start += piece.numel * local.element_size()
        return whole

    def _return(self, lot: list[int], work: list[tuple[Parcel, Tensor]], write: bool) -> _Returning:
        """Start sending treated boxes back; every message begins with this rank's state."""
        out: list[list[Callable[[], Tensor]]] = [[] for _ in self.team.ranks]
        sizes, expected = [_HEADER] * self.team.size, [_HEADER] * self.team.size
        done = {id(parcel): tensor for parcel, tensor in work}
        mine: list[tuple[Parcel, Tensor]] = []
        for index in lot if write else ():
            parcel = self.parcels[index]
            if parcel.owner == self.team.rank:
                tensor = done.get(id(parcel))
                for rank in parcel.spread.ranks:
                    pieces = parcel.spread.pieces(rank, parcel.unit.box)
                    if rank == self.team.rank:
                        if tensor is not None and pieces:
                            kept = [tensor] if parcel.gram else [tensor[p.inside].clone() for p in pieces]
                            mine += [(parcel, each) for each in kept]
                        continue
                    place = self._places[rank]
                    sizes[place] += _padded(_returned(parcel, rank))
                    out[place].append(lambda p=parcel, t=tensor, pieces=pieces: _reply(p, t, pieces))  # type: ignore[misc]
            else:
                expected[self._places[parcel.owner]] += _padded(_returned(parcel, self.team.rank))
        message = self._send(out, sizes, expected, header=True)
        return _Returning(message, lot, mine, self._error is not None)

    def _write(self, returning: _Returning, collecting: _Message | None, write: bool) -> list[int]:
        """Wait for a returned lot; if every rank is well, write this rank's pieces of it."""
        message = returning.message
        self._wait(message, "returning matrices")
        position = _offsets(message.sizes)
        told = [int(message.received[start]) for start in position if start < message.received.numel()]
        # An error that came after this lot left is told with the next one: all ranks must stop at the same lot.
        if returning.failed or any(told):
            if collecting is not None:
                self._wait(collecting, "collecting matrices")
            self.team.agree(self._error)
        self._guarded(lambda: self._place_back(returning, position)) if write else None
        return returning.lot

    def _place_back(self, returning: _Returning, position: list[int]) -> None:
        message = returning.message
        mine = iter(returning.mine)
        position = [start + _HEADER for start in position]
        for index in returning.lot:
            parcel = self.parcels[index]
            pieces = parcel.spread.pieces(self.team.rank, parcel.unit.box)
            local = self.tensors[parcel.tensor] if pieces else message.received
            if parcel.owner == self.team.rank:
                if parcel.gram and pieces:
                    _multiply(local, pieces, parcel, next(mine)[1])
                elif pieces:
                    for piece in pieces:
                        local[piece.local] = next(mine)[1]
                continue
            place = self._places[parcel.owner]
            start = position[place]
            position[place] += _padded(_returned(parcel, self.team.rank))
            if parcel.gram and pieces:
                side = min(parcel.unit.shape)
                change = _view(message.received, start, torch.float64, (side, side)).to(local.device)
                _multiply(local, pieces, parcel, change)
                continue
            for piece in pieces:
                local[piece.local] = _view(message.received, start, local.dtype, piece.shape).to(local.device)
                start += piece.numel * local.element_size()

    def _send(
        self, out: list[list[Callable[[], Tensor]]], sizes: list[int], expected: list[int], header: bool = False
    ) -> _Message:
        """Pack and start one all-to-all."""
        sizes[self.team.place] = expected[self.team.place] = 0
        sent = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.team.device)
        starts = _offsets(sizes)
        for place, pieces in enumerate(out):
            start = starts[place] + (_HEADER if header else 0)
            for make in pieces if place != self.team.place else ():
                start = self._pack(sent, start, make)
        if header and self._error is not None:  # last, because packing may fail too
            for place, start in enumerate(starts):
                if place != self.team.place:
                    sent[start] = 1
        received = torch.empty(sum(expected), dtype=torch.uint8, device=self.team.device)
        with self.team.waiting("starting an exchange"):
            request = dist.all_to_all_single(received, sent, expected, sizes, group=self.team.group, async_op=True)
        self.bytes_sent += sent.numel()
        return _Message(received, expected, sent, request)

    def _pack(self, sent: Tensor, start: int, make: Callable[[], Tensor]) -> int:
        try:
            piece = make()
            size = piece.numel() * piece.element_size()
            if size and start < sent.numel():
                _view(sent, start, piece.dtype, tuple(piece.shape)).copy_(piece)
            return start + _padded(size)
        except Exception as error:  # zeros go out, and the others are told
            self._error = self._error or error
            return sent.numel()

    def _wait(self, message: _Message, doing: str) -> None:
        if message.request is not None:
            with self.team.waiting(doing):
                message.request.wait()
            message.request = None
            message.sent = message.sent.new_empty(0)


def _reply(parcel: Parcel, tensor: Tensor | None, pieces: Any) -> Tensor:
    if tensor is None or not pieces:
        return torch.empty(0)
    if parcel.gram:
        return tensor
    return tensor[pieces[0].inside] if len(pieces) == 1 else torch.cat([tensor[p.inside].flatten() for p in pieces])


def _multiply(local: Tensor, pieces: Any, parcel: Parcel, change: Tensor) -> None:
    if bool(change[0, 0].isfinite()):  # NaN: the owner turned this route down, the matrix stays for now
        apply_factor(local, pieces, parcel.unit.shape, change)


def _collected(parcel: Parcel, rank: int) -> int:
    """Bytes that a rank sends to the owner."""
    held = parcel.spread.held(rank, parcel.unit.box)
    return (parcel.size if held else 0) if parcel.gram else held * parcel.itemsize


_returned = _collected


def _size(work: Sequence[tuple[Parcel, Tensor]]) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in work)


def _offsets(sizes: Sequence[int]) -> list[int]:
    found, total = [], 0
    for size in sizes:
        found.append(total)
        total += size
    return found


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _view(buffer: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return buffer[start : start + size].view(dtype).view(shape)
