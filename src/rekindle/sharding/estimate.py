"""What `fire` on many ranks would cost, before there are any: balance, bytes moved, memory, time.

The units, owners and lots are the real ones, made for a model whose parameters are cut by rows over `ranks` processes
as FSDP2 does. Time comes from speeds measured on this machine.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from rekindle.blocks.layouts import Layout
from rekindle.engine.isometry import polar
from rekindle.engine.solving import WIDE
from rekindle.sharding.exchange import BUFFERS
from rekindle.sharding.owners import Parcel, assign, lots, room_for
from rekindle.sharding.spread import Spread
from rekindle.sharding.units import units

_SIZES = (32, 128, 384, 768)


@dataclass(frozen=True)
class Machine:
    """What one rank can do: seconds per n²m by the smaller side n, and bytes per second to all others.

    speeds are those of square matrices, wide of those with m ≥ 1.5n, which are solved on the n×n side alone.
    overlaps: messages overlap with solving (an accelerator), or take the rank's time (a CPU).
    """

    name: str
    speeds: tuple[tuple[int, float], ...]
    wide: tuple[tuple[int, float], ...]
    bandwidth: float
    latency: float = 1e-4
    overlaps: bool = False

    def seconds(self, layout: Layout) -> float:
        """The time to solve one block; speeds between the measured sizes are interpolated."""
        count, out, in_ = layout.sizes
        n, m = min(out, in_), max(out, in_)
        return count * n * n * m * _per_unit(n, self.wide if m >= WIDE * n else self.speeds)


def _per_unit(n: int, known: tuple[tuple[int, float], ...]) -> float:
    if n <= known[0][0]:
        return known[0][1]
    for (a, slow), (b, fast) in itertools.pairwise(known):
        if n <= b:
            share = (math.log(n) - math.log(a)) / (math.log(b) - math.log(a))
            return math.exp((1 - share) * math.log(slow) + share * math.log(fast))
    return known[-1][1]


def measured_here(bandwidth: float = 6e8, rounds: int = 2) -> Machine:
    """This CPU, by solving square matrices of a few sizes: about a second.

    `bandwidth` cannot be measured by one process: the default is what gloo and packing reach on one machine
    (`benchmarks/sharding.py`).
    """
    generator = torch.Generator().manual_seed(0)

    def measured(times: int) -> tuple[tuple[int, float], ...]:
        found = []
        for n in _SIZES:
            w = torch.randn(max(1, 2**18 // (times * n * n)), n, times * n, generator=generator)
            best = math.inf
            for _ in range(rounds):
                began = time.process_time()
                polar(w, certificate=True)
                best = min(best, time.process_time() - began)
            found.append((n, best / (w.numel() * n)))
        return tuple(found)

    return Machine("this processor", measured(1), measured(4), bandwidth)


@dataclass(frozen=True)
class Estimate:
    """The cost of one call on `ranks` processes. Bytes and memory are those of the busiest rank."""

    machine: str
    ranks: int
    parameters: int
    lots: int
    balance: float
    work: float
    solving: float
    moved: int
    moving: float
    seconds: float
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks, {self.machine}: about {_time(self.seconds)} "
            f"({_time(self.solving)} solving, {_time(self.moving)} moving), one rank alone {_time(self.work)}; "
            f"busiest rank {self.balance:.2f} times the mean load, sends {_bytes(self.moved)}, "
            f"holds {_bytes(self.memory)} beyond its shard, {self.lots} lots"
        )


def estimate(weights: Iterable[tuple[Sequence[Layout], int]], ranks: int, machine: Machine) -> Estimate:
    """Predict one call; weights are (layouts of the blocks, bytes per element) of each parameter, cut by rows."""
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    parcels: list[Parcel] = []
    parameters = 0
    for number, (layouts, itemsize) in enumerate(weights):
        shape = layouts[0].shape
        parameters += math.prod(shape)
        spread = Spread(shape, (ranks,), tuple(range(ranks)), ((0, 0),) if ranks > 1 else ())
        parcels += [Parcel(number, unit, spread, itemsize) for unit in units(layouts, spread)]
    parcels = assign(parcels)
    times = [sum(machine.seconds(part.layout) for part in parcel.unit.parts) for parcel in parcels]
    load = dict.fromkeys(range(ranks), 0.0)
    sent = dict.fromkeys(range(ranks), 0.0)
    queue = lots(parcels)
    solving = moving = total = 0.0
    for lot in queue:
        busy: dict[int, float] = {}
        out: dict[int, float] = {}
        for index in lot:
            parcel = parcels[index]
            busy[parcel.owner] = busy.get(parcel.owner, 0.0) + times[index]
            load[parcel.owner] += times[index]
            if ranks == 1 or parcel.spread.holders(parcel.unit.box):
                continue
            share = parcel.size / ranks  # every other rank sends its rows, the owner sends all of them back
            out[parcel.owner] = out.get(parcel.owner, 0.0) + parcel.size - 2 * share
            out[-1] = out.get(-1, 0.0) + share
        for rank in range(ranks):
            sent[rank] += out.get(rank, 0.0) + out.get(-1, 0.0)
        most = max((size for rank, size in out.items() if rank >= 0), default=0.0) + out.get(-1, 0.0)
        solve, move = max(busy.values()), (most / machine.bandwidth + 2 * machine.latency if ranks > 1 else 0.0)
        solving, moving = solving + solve, moving + move
        total += max(solve, move) if machine.overlaps else solve + move
    mean = sum(load.values()) / ranks
    return Estimate(
        machine.name,
        ranks,
        parameters,
        len(queue),
        max(load.values()) / mean if mean else 1.0,
        sum(load.values()),
        solving,
        int(max(sent.values())),
        moving,
        total,
        BUFFERS * room_for(parcels) if ranks > 1 else 0,
    )


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def _bytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
