"""Shards to owners and back, without a model: run by `launching`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import world
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rekindle.blocks.layouts import matrices
from rekindle.sharding import exchange as exchange_module
from rekindle.sharding import owners
from rekindle.sharding.exchange import Exchange
from rekindle.sharding.gram import factor, pays
from rekindle.sharding.norms import square_sums
from rekindle.sharding.owners import Parcel, assign
from rekindle.sharding.spread import Spread
from rekindle.sharding.team import Team
from rekindle.sharding.units import units


def placed(values: Sequence[Tensor], mesh: DeviceMesh, placements: Any) -> tuple[list[Tensor], list[Any]]:
    distributed = [distribute_tensor(value.clone(), mesh, placements) for value in values]
    return [each.to_local() for each in distributed], distributed


def parcels_of(distributed: Sequence[Any], recipes: Sequence[Any], gram: bool = False) -> list[Parcel]:
    found = []
    for number, (tensor, recipe) in enumerate(zip(distributed, recipes, strict=True)):
        spread = Spread.of(tensor)
        assert spread.local_shape(dist.get_rank()) == tuple(tensor.to_local().shape)
        for unit in units([block.layout for block in recipe(tuple(tensor.shape))], spread, grain=8):
            parcel = Parcel(number, unit, spread, tensor.element_size())
            found.append(Parcel(number, unit, spread, tensor.element_size(), gram=gram and pays(parcel)))
    return assign(found)


def doubled(work: Sequence[tuple[Parcel, Tensor]]) -> None:
    for _, tensor in work:
        tensor.mul_(2).add_(1)


SHAPES = [(7, 5), (3, 8), (1, 4), (12, 6), (4, 3, 3)]
RECIPES = [
    matrices("out in"),
    matrices("out in"),
    matrices("out in"),
    matrices("(part out) in", part=("query", "key", "value")),
    matrices("expert out in", count="expert"),
]


def round_trip(mesh: DeviceMesh, placements: Any, budget: int | None = None) -> None:
    whole = [torch.randn(shape) for shape in SHAPES]
    local, distributed = placed(whole, mesh, placements)
    parcels = parcels_of(distributed, RECIPES)
    exchange = Exchange(Team.of(mesh.mesh.flatten().tolist()), local, parcels, budget=budget)
    done = [index for lot in exchange.run(doubled) for index in lot]
    assert sorted(done) == list(range(len(parcels)))
    for value, tensor in zip(whole, distributed, strict=True):
        assert torch.equal(tensor.full_tensor(), 2 * value + 1)


def case_every_layout_in_one_dimension() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        round_trip(mesh, placements)
        round_trip(mesh, placements, budget=1)


@world(4)
def case_every_layout_in_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    kinds = [Shard(0), Shard(1), Replicate()]
    for first in kinds:
        for second in kinds:
            round_trip(mesh, [first, second], budget=64)


@world(4)
def case_a_part_of_the_processes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))["data"]
    round_trip(mesh, [Shard(0)])


def case_a_stack_cut_along_its_axis_does_not_move() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local, distributed = placed([torch.randn(8, 3, 3)], mesh, [Shard(0)])
    parcels = parcels_of(distributed, [matrices("expert out in", count="expert")])
    exchange = Exchange(Team.of(mesh.mesh.tolist()), local, parcels)
    for _ in exchange.run(doubled):
        pass
    assert exchange.bytes_sent == len(exchange.lots) * 8 * (dist.get_world_size() - 1)  # headers only


def case_every_rank_raises_the_error_of_one_and_nothing_of_that_lot_is_written() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = [torch.randn(6, 6) for _ in range(8)]
    local, distributed = placed(whole, mesh, [Shard(0)])
    parcels = parcels_of(distributed, [matrices("out in")] * 8)
    calls = 0

    def fails(work: Sequence[tuple[Parcel, Tensor]]) -> None:
        nonlocal calls
        calls += 1
        doubled(work)
        if dist.get_rank() == 1 and calls == 2:
            raise KeyError("no such matrix")

    exchange = Exchange(Team.of(mesh.mesh.tolist()), local, parcels, budget=1)
    done: list[int] = []
    with pytest.raises(KeyError, match="rank 1: no such matrix"):
        done.extend(index for lot in exchange.run(fails) for index in lot)
    assert len(done) == dist.get_world_size()
    for number, value in enumerate(whole):
        written = number in {parcels[index].tensor for index in done}
        assert torch.equal(distributed[number].full_tensor(), 2 * value + 1 if written else value)


def case_reading_writes_nothing() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = [torch.randn(6, 6) for _ in range(3)]
    local, distributed = placed(whole, mesh, [Shard(1)])
    parcels = parcels_of(distributed, [matrices("out in")] * 3)
    seen: dict[int, float] = {}

    def look(work: Sequence[tuple[Parcel, Tensor]]) -> None:
        seen.update({parcel.tensor: float(tensor.sum()) for parcel, tensor in work})
        doubled(work)

    team = Team.of(mesh.mesh.tolist())
    for _ in Exchange(team, local, parcels).run(look, write=False):
        pass
    together = {key: value for each in team.gather(seen) for key, value in each.items()}
    for number, value in enumerate(whole):
        assert math.isclose(together[number], float(value.sum()), rel_tol=1e-4, abs_tol=1e-4)
        assert torch.equal(distributed[number].full_tensor(), value)


def case_tall_matrices_go_by_their_gram_matrices() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = [torch.randn(64 * size, 8), torch.randn(8, 64 * size)]
    team = Team.of(mesh.mesh.tolist())
    for value, placement in zip(whole, (Shard(0), Shard(1)), strict=True):
        local, distributed = placed([value], mesh, [placement])
        parcels = parcels_of(distributed, [matrices("out in")], gram=True)
        assert parcels[0].gram

        def isometry(work: Sequence[tuple[Parcel, Tensor]]) -> None:
            for _, gram in work:
                found = factor(gram, torch.float64, tol=0.0)
                assert found is not None
                gram.copy_(found[0])

        exchange = Exchange(team, local, parcels)
        for _ in exchange.run(isometry):
            pass
        u, _, vh = torch.linalg.svd(value.double(), full_matrices=False)
        assert torch.allclose(distributed[0].full_tensor().double(), u @ vh, atol=1e-6)
        moved = sum(team.gather(exchange.bytes_sent))
        assert moved < value.numel() * 4


@contextmanager
def lots_of_one_matrix() -> Iterator[None]:
    kept, owners.MINIMUM = owners.MINIMUM, 1
    try:
        yield
    finally:
        owners.MINIMUM = kept


def case_buffers_hold_three_matrices_whatever_the_layout() -> None:
    """However many copies and ranks there are, and where shards are uneven: counted, and by what the process holds."""
    size = dist.get_world_size()
    flat, mesh = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))
    layouts: list[tuple[DeviceMesh, Any]] = [(flat, [each]) for each in (Shard(0), Shard(1), Replicate())]
    layouts += [(mesh, [Replicate(), Shard(0)]), (mesh, [Shard(1), Replicate()]), (mesh, [Shard(0), Shard(1)])]
    shapes = [(40, 24)] * 9 + [(2, 24), (24, 3), (9, 40), (40, 39)] * 3
    largest = max(math.prod(shape) for shape in shapes) * 4
    with lots_of_one_matrix():
        for where, placements in layouts:
            whole = [torch.randn(shape) for shape in shapes]
            local, distributed = placed(whole, where, placements)
            parcels = parcels_of(distributed, [matrices("out in")] * len(shapes))
            exchange = Exchange(Team.of(where.mesh.flatten().tolist()), local, parcels)
            for _ in exchange.run(doubled):
                pass
            slack = 64 * len(shapes) + 16 * size  # alignment and headers
            assert 0 < exchange.held <= 3 * largest + slack, (placements, exchange.held / largest)
            for value, tensor in zip(whole, distributed, strict=True):
                assert torch.equal(tensor.full_tensor(), 2 * value + 1)


def case_an_allocation_that_fails_on_one_rank_is_raised_by_all_and_nothing_is_written() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    errors = [MemoryError("cannot allocate 9 TB"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
    for error in errors:
        for owner, name in ((torch, "empty"), (exchange_module, "_view"), (exchange_module, "_box")):
            whole = [torch.randn(6, 6) for _ in range(8)]
            local, distributed = placed(whole, mesh, [Shard(0)])
            parcels = parcels_of(distributed, [matrices("out in")] * 8)
            exchange = Exchange(Team.of(mesh.mesh.tolist()), local, parcels, budget=1)
            began = time.perf_counter()
            with broken(owner, name, error), pytest.raises(type(error), match=f"rank 1: {error}"):
                for _ in exchange.run(doubled):
                    pass
            assert time.perf_counter() - began < 30  # the time-out is 60
            for value, tensor in zip(whole, distributed, strict=True):
                assert torch.equal(tensor.full_tensor(), value)


@contextmanager
def broken(owner: Any, name: str, error: Exception) -> Iterator[None]:
    """On rank 1 only, a function raises when it is called first."""
    kept = getattr(owner, name)

    def raises(*args: Any, **options: Any) -> Any:
        setattr(owner, name, kept)  # a small message can still be sent when a large buffer cannot be had
        raise error

    if dist.get_rank() == 1:
        setattr(owner, name, raises)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def case_an_error_while_a_later_lot_is_packed_stops_the_lot_before() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = [torch.randn(8, 8) for _ in range(4 * dist.get_world_size())]
    local, distributed = placed(whole, mesh, [Shard(0)])
    parcels = parcels_of(distributed, [matrices("out in")] * len(whole))
    exchange = Exchange(Team.of(mesh.mesh.tolist()), local, parcels, budget=1)
    pack, packed = exchange._pack_shares, 0

    def fails(trip: Any, buffers: Any) -> None:
        nonlocal packed
        packed += 1
        if dist.get_rank() == 1 and packed == 3:
            raise MemoryError("no memory for the third lot")
        pack(trip, buffers)

    exchange._pack_shares = fails  # type: ignore[method-assign]
    done: list[int] = []
    with pytest.raises(MemoryError, match="rank 1: no memory for the third lot"):
        done.extend(index for lot in exchange.run(doubled) for index in lot)
    assert len(done) == dist.get_world_size()  # the first lot; the second was treated and is not written
    for number, value in enumerate(whole):
        written = number in {parcels[index].tensor for index in done}
        assert torch.equal(distributed[number].full_tensor(), 2 * value + 1 if written else value)


def case_norms_from_shards() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    team = Team.of(mesh.mesh.tolist())
    recipes = [
        *zip(SHAPES, RECIPES, strict=True),
        ((12, 5), matrices("(head part dim) in", part=("query", "key"), head=3, heads="head")),
        ((6, 4, 3, 3), matrices("(group out) in a b", count="group a b", group=2)),
    ]
    for shape, recipe in recipes:
        value = torch.randn(shape)
        for placement in (Shard(0), Shard(1)):
            tensor: Any = distribute_tensor(value, mesh, [placement])
            extents = Spread.of(tensor).extents(dist.get_rank())
            for block in recipe(shape):
                found = team.sum(square_sums(block.layout, tensor.to_local(), extents))
                expected = block.read(value).double().square().sum((1, 2))
                assert torch.allclose(found, expected)


def case_plans_that_differ_are_found_before_anything_moves() -> None:
    team = Team.of(range(dist.get_world_size()))
    team.same("plan", ["a", "b"])
    with pytest.raises(ValueError, match="rank 1 differs from that of rank 0: b against c"):
        team.same("plan", ["a", "b" if dist.get_rank() else "c"])
