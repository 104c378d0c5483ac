"""What each rank holds, boxes of whole matrices, owners and lots: no processes needed."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rekindle
from rekindle.blocks.layouts import matrices
from rekindle.methods import RandomIsometry
from rekindle.sharding import owners
from rekindle.sharding.gram import factor, pays
from rekindle.sharding.messages import trip
from rekindle.sharding.owners import Parcel, assign, estimate, lots
from rekindle.sharding.passes import _Messages
from rekindle.sharding.spread import Spread, volume
from rekindle.sharding.team import Team
from rekindle.sharding.units import units

SPLITS = [(), ((0, 0),), ((1, 0),), ((0, 0), (1, 1)), ((0, 0), (0, 1)), ((0, 1), (0, 0)), ((1, 1),)]


def chunked(tensor: torch.Tensor, spread: Spread, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The obvious reference: cut with torch.chunk, one cut after the other."""
    for dim, axis in spread.splits:
        parts = tensor.chunk(spread.mesh[axis], dim)
        here = coordinate[axis]
        tensor = parts[here] if here < len(parts) else tensor.narrow(dim, 0, 0)
    return tensor


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.sampled_from(SPLITS))
def test_every_rank_holds_what_chunk_gives_it(rows, columns, first, second, splits):
    spread = Spread((rows, columns), (first, second), tuple(range(first * second)), splits)
    whole = torch.arange(rows * columns).reshape(rows, columns)
    for rank in spread.ranks:
        expected = chunked(whole, spread, spread.coordinate(rank))
        assert spread.local_shape(rank) == tuple(expected.shape)
        box = ((0, rows), (0, columns))
        rebuilt = torch.full_like(expected, -1)
        for piece in spread.pieces(rank, box):
            rebuilt[piece.local] = whole[piece.inside]
        assert torch.equal(rebuilt, expected)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.sampled_from(SPLITS), st.data())
def test_holders_are_those_that_hold_all_of_a_box(rows, columns, first, second, splits, data):
    spread = Spread((rows, columns), (first, second), tuple(range(first * second)), splits)
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    box = ((top, data.draw(st.integers(top + 1, rows))), (left, data.draw(st.integers(left + 1, columns))))
    assert spread.holders(box) == tuple(rank for rank in spread.ranks if spread.held(rank, box) == volume(box))


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        (matrices("out in"), (5, 7)),
        (matrices("(part out) in", part=("query", "key", "value")), (12, 5)),
        (matrices("in (part out)", part=("query", "key", "value")), (5, 12)),
        (matrices("(head part dim) in", part=("query", "key", "value"), head=2, heads="head"), (12, 5)),
        (matrices("(part dim) in", part={"query": 4, "key": 1, "value": 1}, heads="part"), (12, 5)),
        (matrices("expert (part out) in", part=("gate", "up"), count="expert"), (5, 6, 4)),
        (matrices("(group out) in a b", count="group a b", group=2), (6, 4, 3, 3)),
        (matrices("(group in) out a", count="group a", inputs="in", group=2), (6, 4, 3)),
    ],
)
def test_units_hold_every_matrix_once_and_read_what_the_block_reads(recipe, shape):
    whole = torch.arange(math.prod(shape)).reshape(shape)
    blocks = recipe(shape)
    spread = Spread(shape, (3,), (0, 1, 2), ((0, 0),))
    seen = {}
    for unit in units([block.layout for block in blocks], spread, grain=1):
        box = whole[tuple(slice(low, high) for low, high in unit.box)].contiguous()
        for part in unit.parts:
            for number, matrix in zip(part.numbers, part.layout.read(box), strict=True):
                assert (part.block, number) not in seen
                seen[part.block, number] = matrix
    for index, block in enumerate(blocks):
        for number, matrix in enumerate(block.read(whole)):
            assert torch.equal(seen.pop((index, number)), matrix)
    assert not seen


def parcels(sizes: list[int], ranks: int) -> list[Parcel]:
    found = []
    for number, size in enumerate(sizes):
        spread = Spread((size, size), (ranks,), tuple(range(ranks)), ((0, 0),))
        unit = units([matrices("out in")((size, size))[0].layout], spread)[0]
        found.append(Parcel(number, unit, spread, 4))
    return found


def test_owners_are_balanced_and_the_same_on_every_process():
    given_ = parcels([64] * 7 + [32] * 9 + [48] * 5, 4)
    first, second = assign(given_), assign(given_)
    assert first == second
    load = {rank: sum(p.unit.cost for p in first if p.owner == rank) for rank in range(4)}
    assert max(load.values()) <= sum(load.values()) / 4 + max(p.unit.cost for p in first)


def test_a_lot_holds_no_more_than_its_budget_or_one_parcel_per_owner():
    assigned = assign(parcels([8, 16, 24, 8, 8, 8, 32], 2))
    queue = lots(assigned, budget=1024)
    assert sorted(index for lot in queue for index in lot) == list(range(7))
    for lot in queue:
        for owner in (0, 1):
            held = [assigned[i].size for i in lot if assigned[i].owner == owner]
            assert sum(held) <= 1024 or len(held) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "side"), [(60, 6), (200, 30), (400, 49), (500, 120)])
def test_the_gram_route_ends_where_the_solver_ends(dtype, rows, side):
    """Not at the exact factor, 1e-4 away from what one process writes; float32 carries 6e-8 times the condition.

    What is small and of condition 300 is solved in float32, so the route turns it down.
    """
    for spread in (1.0, 3.0, 30.0, 300.0):
        w = torch.randn(rows, side, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        u, _, vh = torch.linalg.svd(w, full_matrices=False)
        w = ((u * torch.logspace(0, -math.log10(spread), side, dtype=torch.float64)) @ vh).to(dtype)
        alone, expected = rekindle.polar(w, certificate=True)
        found = factor(w.double().mT @ w.double(), dtype)
        if found is None:
            assert dtype == torch.float32 and spread == 300
            continue
        change, certificate = found
        assert (w.double() @ change - alone.double()).norm() <= 1e-5 * alone.double().norm(), spread
        assert float(certificate.nuclear) == pytest.approx(float(expected.nuclear), rel=1e-5)


def test_the_gram_route_turns_ill_conditioned_matrices_down():
    w = torch.randn(200, 6, dtype=torch.float64)
    w[:, 0] = w[:, 1] + 1e-6 * w[:, 0]
    assert factor(w.T @ w, torch.float64) is None
    assert factor(torch.zeros(3, 3, dtype=torch.float64), torch.float32) is None


@pytest.mark.parametrize("seed", [*range(8), 20, 29, 197, 220])
def test_messages_match_and_three_buffers_of_one_matrix_hold_any_lot(seed, monkeypatch):
    """Whatever mixture of axes, copies, uneven shards and Gram matrices: the tables of all ranks, without processes."""
    monkeypatch.setattr(owners, "MINIMUM", 1)
    draw = random.Random(seed)
    mesh = draw.choice([(2,), (3,), (7,), (2, 2), (2, 3), (4, 2), (2, 2, 2)])
    ranks = tuple(range(math.prod(mesh)))
    parcels = []
    for number in range(12):
        shape = (64 * draw.randint(1, 60), 64 * draw.randint(1, 60))
        splits = [(draw.randint(0, 1), axis) for axis in range(len(mesh)) if draw.random() < 0.7]
        spread = Spread(shape, mesh, ranks, tuple(splits))
        for unit in units([matrices("out in")(shape)[0].layout], spread):
            parcel = Parcel(number, unit, spread, 4)
            parcels.append(replace(parcel, gram=seed % 2 == 0 and pays(parcel)))
    assigned = assign(parcels)
    largest = max(4 * volume(parcel.unit.box) for parcel in assigned)
    needed = dict.fromkeys(ranks, (0, 0, 0))
    for lot in lots(assigned):
        trips = [trip(Team(ranks, rank), assigned, lot) for rank in ranks]
        for rank, each in enumerate(trips):
            needed[rank] = tuple(map(max, needed[rank], each.sizes()))
        routes = [[each.collecting, each.returning, *each.handing] for each in trips]
        for step in zip(*routes, strict=True):
            for a in ranks:
                assert [step[a].sizes[b] for b in ranks] == [step[b].expected[a] for b in ranks]
    for sizes in needed.values():
        assert sum(sizes) <= 3 * largest + 64 * len(assigned) + 16 * len(ranks)  # alignment and headers


def test_looking_for_messages_lets_every_operator_through():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.ones(1, 2, 4, 8)
    seen = []
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), _Messages(seen.append):  # as in `isolated`
        found = flex_attention(q, q, q)
    assert torch.allclose(found, q) and not seen


def test_an_estimate_counts_what_moves():
    layout = matrices("out in")((256, 256))[0].layout
    weights = [([layout], 4)] * 16
    four = estimate(weights, 4)
    # Each matrix: three quarters go to its owner and three quarters come back, over four ranks.
    assert four.moved * 4 == pytest.approx(16 * 2 * 0.75 * 256 * 256 * 4)
    experts = matrices("expert out in", count="expert")((8, 64, 64))[0].layout
    assert estimate([([experts], 4)], 4).moved == 0
    assert "64 ranks" in str(estimate(weights, 64))


def test_what_deepspeed_partitions_is_refused_with_the_way():
    model = torch.nn.Linear(3, 3)
    model.weight._hp_mapping = None  # what ZeRO 1 and 2 attach; None on ranks that hold nothing of the weight
    with pytest.raises(ValueError, match=r"gathered\(model, engine.optimizer\) as whole: RandomIsometry"):
        RandomIsometry()(model)
    rekindle.plan(model)  # the weights are there, in the lower precision
    model = torch.nn.Linear(3, 3)
    model.weight.ds_id, model.weight.data = 1, torch.empty(0)  # a partitioned parameter of ZeRO 3
    for call in (rekindle.plan, rekindle.health, RandomIsometry()):
        with pytest.raises(ValueError, match=r"rekindle\.sharding\.gathered"):
            call(model)


def test_the_command_line_predicts_the_cost_on_many_ranks(tmp_path):
    from safetensors.torch import save_file
    from typer.testing import CliRunner

    from rekindle.cli.app import app

    save_file({f"layers.{i}.weight": torch.randn(64, 64) for i in range(6)}, tmp_path / "model.safetensors")
    text = CliRunner().invoke(app, ["plan", str(tmp_path / "model.safetensors"), "--ranks", "4"])
    assert text.exit_code == 0, text.output
    assert "4 ranks: busiest rank" in text.output
    data = CliRunner().invoke(app, ["plan", str(tmp_path / "model.safetensors"), "--ranks", "4", "--json"])
    assert json.loads(data.stdout)["costs"][0]["ranks"] == 4
