"""The learning rate as a remedy."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

import rekindle
from rekindle.methods import LearningRate, Rewarm

SCHEDULES = {
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "step": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
}


def train(schedule: str, method: object, steps: int = 10, every: int = 5) -> tuple[list[float], list[float]]:
    """The rate that each step was taken with, and the one that the optimizer shows after it."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULES[schedule](optimizer)
    taken, shown = [], []
    with nullcontext() if method is None else rekindle.attach(model, optimizer, method, every=every) as remedy:
        optimizer.register_step_pre_hook(lambda one, *_: taken.append(one.param_groups[0]["lr"]))
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if remedy is not None:
                remedy.step()
            if scheduler is not None:
                scheduler.step()
            shown.append(optimizer.param_groups[0]["lr"])
    return taken, shown


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rewarming_multiplies_each_step_and_leaves_the_schedule_alone(schedule: str) -> None:
    plain, plain_shown = train(schedule, None)
    taken, shown = train(schedule, Rewarm(3.0, steps=2))
    assert shown == pytest.approx(plain_shown)
    factors = [a / b for a, b in zip(taken, plain, strict=True)]
    assert sorted({round(factor, 6) for factor in factors}) == [1.0, 2.0, 3.0]
    assert factors.count(pytest.approx(3.0)) == 1  # one event in ten steps: nothing acts at the end


def test_the_rate_is_multiplied_for_good_with_its_scheduler() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    receipt = LearningRate(0.5, scheduler=scheduler)(model, optimizer)
    assert receipt.notes == ("learning rate 0.1 → 0.05, 0.2 → 0.1",)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.05])


def test_tensor_rates_are_changed_in_place_and_no_optimizer_is_an_error() -> None:
    model = nn.Linear(2, 1)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    held = optimizer.param_groups[0]["lr"]
    LearningRate(2.0)(model, optimizer)
    assert optimizer.param_groups[0]["lr"] is held and float(held) == pytest.approx(0.2)
    for method in (LearningRate(), Rewarm()):
        with pytest.raises(ValueError, match="give one that has lr"):
            method(model)


def test_rewarming_resumes_where_it_was_and_survives_a_copy() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = Rewarm(3.0, steps=4), Rewarm(3.0, steps=4)
    first.at("event")(model, optimizer)
    first.at("backward")(model, optimizer)
    first.at("step")(model, optimizer)
    second.load_state_dict(first.state_dict())
    copied = copy.deepcopy(first)
    rates = []
    for method in (first, second, copied):
        method.at("backward")(model, optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
        method.at("step")(model, optimizer)
    assert rates == pytest.approx([0.25, 0.25, 0.25])
