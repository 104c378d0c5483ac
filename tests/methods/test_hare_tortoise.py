"""Hare and tortoise beside steps that diverge."""

from __future__ import annotations

import torch

from rekindle.methods import HareTortoise


def test_a_step_that_diverged_does_not_poison_the_average() -> None:
    model, method = torch.nn.Linear(2, 2), HareTortoise(momentum=0.5)
    method.update(model)
    good = model.weight.detach().clone()
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    method.update(model)
    method(model)
    assert torch.equal(model.weight, good)
