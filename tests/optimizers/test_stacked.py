"""Slots that one tensor holds for all parameters of a group: each parameter has its own part of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle import optimizers
from rekindle.optimizers import Slot, slots
from rekindle.projection.snapshots import snapshot_of
from stacked_muon import StackedMuonAdam

STARTS: dict[str, Any] = {
    "momentum_buffer": Slot("moment", stacked=True),
    "second_momentum_buffer": Slot("second", stacked=True),
    "step": 0,
    "exp_avg": 0.0,
    "exp_avg_sq": 0.0,
}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    optimizers.register(StackedMuonAdam, STARTS)
    yield
    slots.SLOTS.pop(StackedMuonAdam)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])


def made(net: nn.Module) -> StackedMuonAdam:
    named = list(net.named_parameters())
    return StackedMuonAdam(
        [
            {"params": [p for name, p in named if "weight" in name], "kind": "muon"},
            {"params": [p for name, p in named if "bias" in name], "kind": "adam"},
        ]
    )


def step(net: nn.Module, optimizer: StackedMuonAdam, seed: int) -> None:
    optimizer.zero_grad()
    net(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()


def trained() -> tuple[nn.Sequential, StackedMuonAdam]:
    net = model()
    optimizer = made(net)
    for seed in range(4):
        step(net, optimizer, seed)
    return net, optimizer


@pytest.mark.parametrize("changed", [("1.0.weight", "3.0.weight"), ("0.0.weight", "2.0.bias")])
def test_the_next_step_is_a_new_optimizers_for_what_changed_and_the_old_ones_for_the_rest(
    changed: tuple[str, ...],
) -> None:
    results = {}
    for kind in ("reset", "kept", "new"):
        net, optimizer = trained()
        if kind == "reset":
            named = {name: p for name, p in net.named_parameters() if name in changed}
            done = optimizers.reset(optimizer, named)
            assert done.reset == done.matched == sum(2 if "weight" in name else 3 for name in changed)
            assert done.without_state == 0
        if kind == "new":
            optimizer = made(net)
        step(net, optimizer, 9)
        results[kind] = dict(net.named_parameters())
    for name, parameter in results["reset"].items():
        wanted, other = ("new", "kept") if name in changed else ("kept", "new")
        # One product of stacked matrices may round a matrix differently than before: not bit for bit.
        assert torch.allclose(parameter, results[wanted][name], atol=1e-6), name
        assert not torch.allclose(parameter, results[other][name], atol=1e-3), name


def test_fire_resets_what_it_changed_and_a_guard_takes_it_back() -> None:
    net, optimizer = trained()
    leader = optimizer.state[net[0][0].weight]
    before = leader["momentum_buffer"].clone()
    receipt = rekindle.fire(net, optimizer, targets=["2.0.weight"])
    assert receipt.changed == ("2.0.weight",)
    assert not leader["momentum_buffer"][2].any() and not leader["second_momentum_buffer"][2].any()
    assert torch.equal(leader["momentum_buffer"][[0, 1, 3]], before[[0, 1, 3]])

    restore = snapshot_of([net[1][0].weight], optimizer)
    kept = leader["momentum_buffer"].clone()
    optimizers.reset(optimizer, {"w": net[1][0].weight})
    assert not torch.equal(leader["momentum_buffer"], kept)
    restore()
    assert torch.equal(leader["momentum_buffer"], kept)


def test_rows_of_one_parameter() -> None:
    net, optimizer = trained()
    leader = optimizer.state[net[0][0].weight]
    before = leader["momentum_buffer"].clone()
    optimizers.reset_rows(optimizer, net[2][0].weight, rows=[1, 4])
    after = leader["momentum_buffer"]
    assert not after[2, [1, 4]].any() and torch.equal(after[2, [0, 2, 3, 5]], before[2, [0, 2, 3, 5]])
    assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])
    second = leader["second_momentum_buffer"][2]
    assert torch.allclose(second[1], second[[0, 2, 3, 5]].mean(0))


def test_a_stack_that_is_not_one_entry_per_parameter_is_refused_before_anything_is_written() -> None:
    net, optimizer = trained()
    leader = optimizer.state[net[0][0].weight]
    leader["momentum_buffer"] = leader["momentum_buffer"][:2]  # as if the rest were on another rank
    weights = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match="one entry for each of the 4 parameters"):
        rekindle.fire(net, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))
    assert rekindle.fire(net, optimizer, optimizer_state="none").changed


def test_a_stacked_slot_must_start_somewhere() -> None:
    with pytest.raises(ValueError, match="stacked"):
        Slot("moment", None, stacked=True)


def test_a_stack_that_nobody_registered_is_not_taken_for_no_state() -> None:
    class Unregistered(StackedMuonAdam):
        pass

    slots.SLOTS.pop(StackedMuonAdam)
    try:
        net = model()
        optimizer = Unregistered([{"params": [layer[0].weight for layer in net], "kind": "muon"}])
        step(net, optimizer, 0)
        with pytest.raises(ValueError, match="register"):
            rekindle.fire(net, optimizer, targets=["2.0.weight"])
    finally:
        optimizers.register(StackedMuonAdam, STARTS)
