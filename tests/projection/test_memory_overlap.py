"""Weights that lie over each other in memory are refused before the first write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rekindle


def _net(first: torch.Tensor, second: torch.Tensor) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    net[0].weight, net[2].weight = nn.Parameter(first), nn.Parameter(second)
    return net


def _refused(net: nn.Sequential, match: str) -> None:
    before = net[0].weight.detach().clone()
    with pytest.raises(ValueError, match=match):
        rekindle.fire(net)
    assert torch.equal(net[0].weight, before)


def test_a_weight_over_itself() -> None:
    _refused(_net(torch.randn(8, 8), torch.randn(80).as_strided((8, 8), (4, 1))), "lies over itself")


def test_two_weights_partly_in_the_same_memory() -> None:
    memory = torch.randn(96)
    _refused(_net(memory[:64].view(8, 8), memory[32:].view(8, 8)), "partly in the same memory")


def test_two_weights_side_by_side_in_one_memory_are_fine() -> None:
    memory = torch.randn(2, 8, 8)
    assert len(rekindle.fire(_net(memory[0], memory[1]), targets="auto").records) == 2


def test_a_plan_from_elsewhere_meets_a_weight_without_numbers() -> None:
    net = _net(torch.randn(8, 8), torch.randn(8, 8))
    plan = rekindle.plan(net, measure="none")
    before = net[0].weight.detach().clone()
    net[2] = nn.Linear(8, 8, device="meta")
    with pytest.raises(ValueError, match=r"2.weight.*meta device"):
        rekindle.fire(net, plan=plan)
    assert torch.equal(net[0].weight, before)


def test_polar_says_what_it_cannot_take() -> None:
    with pytest.raises(TypeError, match="sparse"):
        rekindle.polar(torch.eye(3).to_sparse_csr())
    with pytest.raises(ValueError, match="meta device"):
        rekindle.polar(torch.empty(3, 3, device="meta"))
