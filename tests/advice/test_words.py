"""A first try with the words of another verb, or data of another kind, ends in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rekindle

X, Y = torch.randn(16, 4), torch.randint(3, (16,))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rekindle.fire(torch.optim.Adam(net().parameters()), net()), r"the order is \(model, optimizer\)"),
        (lambda: rekindle.fire(net().parameters()), r"the order is \(model, optimizer\)"),
        (lambda: rekindle.health(net().double(), [X]), "batch of float32 .*, its weights are float64"),
        (lambda: rekindle.health(net().bfloat16(), [X]), "batch of float32 .*, its weights are bfloat16"),
        (lambda: rekindle.health(net(), [{"x": X}]), "a dict with x"),
        (lambda: rekindle.health(net(), (X, Y)), "wrap it in a list"),
        (lambda: rekindle.probe(net(), [(X, Y.float())], steps=2), r"labels\.long\(\)"),
        (lambda: rekindle.advise(net(), batches=[(X, Y)]), "it is called new_batches="),
        (lambda: rekindle.probe(net(), [(X, Y)], seconds=60), "it is called budget="),
        (lambda: rekindle.fire(net(), targets="attention.qk"), "targets='attention.qk' matches no weight"),
    ],
)
def test_a_first_try_ends_in_a_sentence(call: Callable[[], Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        call()
