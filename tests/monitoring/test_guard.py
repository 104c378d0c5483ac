"""The guard: what it accepts, and that a roll-back leaves no trace, whatever the optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from rekindle import methods
from rekindle.monitoring.guard import Guard
from rekindle.triggers import Every

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), capturable=False, foreach=False),
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "nadam": torch.optim.NAdam,
    "lbfgs": torch.optim.LBFGS,
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


DATA = [(torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3)]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model, DATA[0])
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(closure)


def state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "grads": grads})


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_roll_back_restores_everything_bit_for_bit_under_every_optimizer(name: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer)
    before, objects = state(model, optimizer), [*model.parameters(), *model.buffers()]
    slots = {id(p): {k: id(v) for k, v in s.items()} for p, s in optimizer.state.items()}
    receipt = rekindle.fire(model, optimizer, guard=Guard(DATA, loss, max_rise=-100.0))
    assert receipt.rolled_back and receipt.changed == () and receipt.records
    assert equal(state(model, optimizer), before)
    assert all(a is b for a, b in zip(objects, [*model.parameters(), *model.buffers()], strict=True))
    assert {id(p): {k: id(v) for k, v in s.items()} for p, s in optimizer.state.items()} == slots
    twin, other = net(), None
    other = OPTIMIZERS[name](twin.parameters())
    train(twin, other)
    train(model, optimizer, 2)
    train(twin, other, 2)
    assert equal(state(model, optimizer), state(twin, other))


@pytest.mark.parametrize(
    "method",
    [methods.FIRE(), methods.FullReset(), methods.ShrinkPerturb(noise="fresh"), methods.HeadReset(), methods.Rescale()],
    ids=lambda method: method.name,
)
def test_every_method_can_be_guarded(method: Any) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    before = state(model, optimizer)
    assert Guard(DATA, loss, max_rise=-100.0)(method, model, optimizer).rolled_back
    assert equal(state(model, optimizer), before)
    accepted = Guard(DATA, loss, max_rise=100.0)(method, model, optimizer)
    assert not accepted.rolled_back and accepted.changed
    assert accepted.loss_before is not None and accepted.loss_after is not None


def test_modules_that_a_method_put_in_are_taken_out_again() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    before, head = state(model, optimizer), model[-1]
    receipt = Guard(DATA, loss, max_rise=-100.0)(methods.PlasticityInjection(), model, optimizer)
    assert receipt.rolled_back and model[-1] is head and len(optimizer.param_groups) == 1
    assert equal(state(model, optimizer), before)


def test_mirrors_are_rolled_back_too() -> None:
    model, mirror = net(), net()
    nn.init.normal_(mirror[0].weight)
    kept = copy.deepcopy(mirror.state_dict())
    rekindle.fire(model, mirrors=mirror, guard=Guard(DATA, loss, max_rise=-100.0))
    assert equal(mirror.state_dict(), kept)


def test_the_loss_is_measured_without_a_trace() -> None:
    model = net().train()
    before, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    measured = Guard(DATA, lambda m, b: loss(m, b) + torch.rand(()) * 0, max_rise=0.0).measure(model)
    assert measured == pytest.approx(float(loss(model.eval(), DATA[0]).detach()))
    assert equal(model.state_dict(), before) and torch.equal(numbers, torch.get_rng_state())


def test_a_loss_that_is_not_finite_is_never_accepted() -> None:
    calls = iter([1.0, float("nan")])
    guard = Guard(DATA, lambda model, batch: torch.tensor(next(calls)), max_rise=float("inf"))
    assert rekindle.fire(net(), guard=guard).rolled_back


def test_data_that_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(TypeError, match="read only once"):
        Guard(iter(DATA), loss, max_rise=0.1)
    with pytest.raises(ValueError, match="no batches"):
        Guard([], loss, max_rise=0.1).measure(net())


def test_without_a_loss_the_models_own_is_taken() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return type("Output", (), {"loss": self.fc(x).square().mean()})()

    assert Guard([torch.ones(1, 2)], max_rise=0.1).measure(Own()) > 0
    with pytest.raises(ValueError, match=r"no \.loss"):
        Guard(DATA, max_rise=0.1).measure(net())


def test_a_schedule_under_guard() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    schedule = rekindle.Schedule(methods.FIRE(), Every(1, cooldown=5), guard=Guard(DATA, loss, max_rise=-100.0))
    receipt = schedule.step(model, None, {})
    assert receipt is not None and receipt.rolled_back and equal(model.state_dict(), before)
    assert schedule.step(model, None, {}) is None  # it counts as a firing: no new attempt before the cooldown is over
