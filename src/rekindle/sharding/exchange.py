"""Whole matrices on their owners: shards are sent there in packed lots, processed, and sent back.

While one lot is processed, the next is being collected. Each message is one `all_to_all_single` of bytes. The message
that returns a lot begins with the sender's state, so every process knows that all others processed that lot without an
error before it writes any of it.

Everything lives in three buffers that are allocated before the first byte moves, each as large as the largest matrix:
what is sent, what is collected, and where matrices are assembled and processed (results are received there too, after
the matrices were packed). So memory is bounded by construction, an allocation that fails does so before
anything was written, and all ranks raise it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rekindle.sharding.gram import Scratch, apply_factor, gram_of
from rekindle.sharding.messages import Cargo, Route, Trip, offsets, padded, trip
from rekindle.sharding.owners import Parcel, lots
from rekindle.sharding.team import Team

T = TypeVar("T")
Treat = Callable[[Sequence[tuple[Parcel, Tensor]]], None]
"""Called on the owner with the parcels of one lot and their tensors (a box, or a Gram matrix), changed in place."""


@dataclass
class _Buffers:
    """Bytes: `out` is sent, `collected` received on the way to owners; matrices are processed in `work`.

    `landing` is where returned pieces are received: `work`, unless that is on another device than the messages.
    """

    out: Tensor
    collected: Tensor
    work: Tensor
    landing: Tensor
    scratch: Scratch | None = None


class Exchange:
    """Moves the boxes of `parcels` to their owners and back.

    tensors: this rank's own shards, by the parcels' `tensor` number. `held` is what the buffers take, in bytes.

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
        self.bytes_sent = self.held = 0
        self._error: Exception | None = None

    @torch.no_grad()
    def run(self, treat: Treat, *, write: bool = True) -> Iterator[list[int]]:
        """Process all lots; yields the numbers of a lot's parcels once it is written (with `write=False`: processed).

        An exception on any process ends the run on all of them with the same error, before that lot is written.
        """
        if self.team.size == 1:
            yield from self._alone(treat, write)
            return
        trips = [trip(self.team, self.parcels, lot, write=write) for lot in self.lots]
        with self.team.together():
            buffers = self._allocated(trips)
            if trips:
                self._pack_shares(trips[0], buffers)
        request = self._start(trips[0].collecting, buffers.out, buffers.collected) if trips else None
        self._wait(request, "collecting matrices")
        for number, this in enumerate(trips):
            work = self._guarded(lambda this=this: self._assembled(this, buffers)) or []  # type: ignore[misc]
            following = trips[number + 1] if number + 1 < len(trips) else None
            if following is not None:
                self._guarded(lambda following=following: self._pack_shares(following, buffers))  # type: ignore[misc]
                request = self._start(following.collecting, buffers.out, buffers.collected)
            self._guarded(lambda work=work: treat(work) if work else None)  # type: ignore[misc]
            if following is not None:
                self._wait(request, "collecting matrices")
            self._return(this, work, buffers)
            yield this.lot
        self.team.agree(self._error)

    def _alone(self, treat: Treat, write: bool) -> Iterator[list[int]]:
        for lot in self.lots:
            work = []
            for index in lot:
                parcel = self.parcels[index]
                view = self.tensors[parcel.tensor][tuple(slice(low, high) for low, high in parcel.unit.box)]
                work.append((parcel, view if write else view.clone()))
            treat(work)
            yield lot

    def _allocated(self, trips: Sequence[Trip]) -> _Buffers:
        needed = [max((each.sizes()[i] for each in trips), default=0) for i in range(3)]
        here = {tensor.device for tensor in self.tensors} or {torch.device(self.team.device)}
        if len(here) > 1:
            raise ValueError(f"shards lie on several devices of one process: {', '.join(map(str, here))}")
        device = here.pop()
        out, collected = (torch.empty(size, dtype=torch.uint8, device=self.team.device) for size in needed[:2])
        work = torch.empty(needed[2], dtype=torch.uint8, device=device)
        landing = work if device.type == self.team.device else torch.empty_like(work, device=self.team.device)
        tall = [parcel for parcel in self.parcels if parcel.gram]
        scratch = Scratch(max(min(parcel.unit.shape) for parcel in tall), device) if tall else None
        self.held = sum(each.numel() for each in (out, collected, work)) + (scratch.size if scratch else 0)
        return _Buffers(out, collected, work, landing, scratch)

    def _guarded(self, step: Callable[[], T]) -> T | None:
        """An error is kept until the next message reports it to the others; after one nothing more is processed."""
        if self._error is not None:
            return None
        try:
            return step()
        except Exception as error:
            self._error = error
            return None

    def _pack_shares(self, this: Trip, buffers: _Buffers) -> None:
        """This rank's shares of other owners' parcels."""
        for cargo in this.collecting.outgoing:
            parcel, local = cargo.parcel, self.tensors[cargo.parcel.tensor]
            pieces = parcel.spread.pieces(self.team.rank, parcel.unit.box)
            if parcel.gram:
                gram = gram_of(local, pieces, parcel.unit.shape)
                _view(buffers.out, cargo.start, gram.dtype, tuple(gram.shape)).copy_(gram)
                continue
            start = cargo.start
            for piece in pieces:
                _view(buffers.out, start, local.dtype, piece.shape).copy_(local[piece.local])
                start += piece.numel * local.element_size()

    def _assembled(self, this: Trip, buffers: _Buffers) -> list[tuple[Parcel, Tensor]]:
        """This rank's own parcels of a lot, whole."""
        work = []
        shares: dict[int, list[Cargo]] = {}
        for cargo in this.collecting.incoming:
            shares.setdefault(id(cargo.parcel), []).append(cargo)
        for parcel, start in this.boxes:
            local = self.tensors[parcel.tensor]
            whole = _box(buffers.work, start, parcel, local.dtype)
            pieces = parcel.spread.pieces(self.team.rank, parcel.unit.box)
            if parcel.gram:
                whole.zero_()
                if pieces:
                    whole += gram_of(local, pieces, parcel.unit.shape)
            for piece in () if parcel.gram else pieces:
                whole[piece.inside].copy_(local[piece.local])
            for cargo in shares.get(id(parcel), ()):
                self._put_together(whole, cargo, buffers.collected)
            work.append((parcel, whole))
        return work

    def _put_together(self, whole: Tensor, cargo: Cargo, collected: Tensor) -> None:
        parcel, start = cargo.parcel, cargo.start
        if parcel.gram:
            whole += _view(collected, start, whole.dtype, tuple(whole.shape)).to(whole.device)
            return
        for piece in parcel.spread.pieces(cargo.peer, parcel.unit.box):
            whole[piece.inside].copy_(_view(collected, start, whole.dtype, piece.shape))
            start += piece.numel * whole.element_size()

    def _return(self, this: Trip, work: Sequence[tuple[Parcel, Tensor]], buffers: _Buffers) -> None:
        """Send processed boxes back and write them, if no rank has failed; then pass them on to the other copies."""
        route = this.returning
        self._guarded(lambda: self._pack_treated(this, work, buffers.out))
        state = int(self._error is not None)
        for place, start in enumerate(offsets(route.sizes)):
            if place != self.team.place:
                buffers.out[start] = state
        self._wait(self._start(route, buffers.out, buffers.landing), "returning matrices")
        starts = [start for place, start in enumerate(offsets(route.expected)) if place != self.team.place]
        if state or bool(buffers.landing[starts].any()):
            self.team.agree(self._error)
        # From here on nothing is allocated and nothing computed that could fail: what all agreed on is written.
        self._guarded(lambda: self._write_back(this, buffers))
        for handing in this.handing:
            self._copy_out(handing, buffers.out)
            self._wait(self._start(handing, buffers.out, buffers.landing), "handing matrices on to other copies")
            self._copy_in(handing, buffers.landing)

    def _pack_treated(self, this: Trip, work: Sequence[tuple[Parcel, Tensor]], out: Tensor) -> None:
        done = {id(parcel): tensor for parcel, tensor in work}
        behind = padded(this.returning.sent)
        sent = [(cargo.parcel, cargo.start, cargo.peer) for cargo in this.returning.outgoing]
        kept = [(parcel, behind + start, self.team.rank) for parcel, start in this.kept]
        for parcel, start, rank in (*sent, *kept):
            tensor = done[id(parcel)]
            if parcel.gram:
                _view(out, start, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
                continue
            for piece in parcel.spread.pieces(rank, parcel.unit.box):
                _view(out, start, tensor.dtype, piece.shape).copy_(tensor[piece.inside])
                start += piece.numel * tensor.element_size()

    def _write_back(self, this: Trip, buffers: _Buffers) -> None:
        """Write this rank's own pieces of a lot."""
        behind = padded(this.returning.sent)
        for parcel, start in this.kept:
            self._write(parcel, buffers.out, behind + start, buffers.scratch)
        for cargo in this.returning.incoming:
            self._write(cargo.parcel, buffers.landing, cargo.start, buffers.scratch)

    def _write(self, parcel: Parcel, source: Tensor, start: int, scratch: Scratch | None = None) -> None:
        local = self.tensors[parcel.tensor]
        pieces = parcel.spread.pieces(self.team.rank, parcel.unit.box)
        if parcel.gram and scratch is not None:
            side = min(parcel.unit.shape)
            change = _view(source, start, torch.float64, (side, side)).to(local.device)
            if bool(change[0, 0].isfinite()):  # NaN: the owner rejected this route, the matrix stays for now
                apply_factor(local, pieces, parcel.unit.shape, change, scratch)
            return
        for piece in pieces:
            local[piece.local].copy_(_view(source, start, local.dtype, piece.shape))
            start += piece.numel * local.element_size()

    def _copy_out(self, route: Route, out: Tensor) -> None:
        for cargo in route.outgoing:
            local, start = self.tensors[cargo.parcel.tensor], cargo.start
            for piece in cargo.parcel.spread.pieces(self.team.rank, cargo.parcel.unit.box):
                _view(out, start, local.dtype, piece.shape).copy_(local[piece.local])
                start += piece.numel * local.element_size()

    def _copy_in(self, route: Route, landing: Tensor) -> None:
        for cargo in route.incoming:
            self._write(cargo.parcel, landing, cargo.start)

    def _start(self, route: Route, out: Tensor, received: Tensor) -> dist.Work | None:
        sent, into = out[: route.sent], received[: route.received]
        self.bytes_sent += route.sent
        with self.team.waiting("starting an exchange"):
            sizes = (route.expected, route.sizes)
            work: dist.Work | None = dist.all_to_all_single(into, sent, *sizes, group=self.team.group, async_op=True)
        return work

    def _wait(self, request: dist.Work | None, doing: str) -> None:
        if request is not None:
            with self.team.waiting(doing):
                request.wait()


def _box(buffer: Tensor, start: int, parcel: Parcel, dtype: torch.dtype) -> Tensor:
    """Where a parcel is assembled: in the solver's memory order, so that it makes no transposed copy."""
    if parcel.gram:
        side = min(parcel.unit.shape)
        return _view(buffer, start, torch.float64, (side, side))
    shape, parts = parcel.unit.shape, parcel.unit.parts
    if len(shape) == 2 and shape[0] > shape[1] and len(parts) == 1 and parts[0].layout.sizes[0] == 1:
        return _view(buffer, start, dtype, shape[::-1]).mT
    return _view(buffer, start, dtype, shape)


def _view(buffer: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return buffer[start : start + size].view(dtype).view(shape)
