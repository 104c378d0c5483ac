"""The guard: what it accepts, and that a roll-back leaves no trace, whatever the optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from optimizers.test_foreign import ALONE, GROUPED
from optimizers.test_foreign import made as foreign
from optimizers.test_foreign import name_of as foreign_name
from optimizers.test_resetting import VARIANTS
from optimizers.test_resetting import name_of as torch_name
from optimizers.test_resetting import step as torch_step
from rekindle import methods
from rekindle.monitoring.guard import Guard
from rekindle.projection.receipt import Receipt
from rekindle.triggers import Every
from stacked_muon import StackedMuonAdam

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


# Every optimizer of the suite


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(8, 6, generator=draws)) for _ in range(2))


class Scrambles:
    """Changes all that a method could reach: weights and state in place, slots replaced, added and gone, options."""

    name = "scrambles"

    def __call__(self, model: nn.Module, optimizer: Any = None, **_: Any) -> Receipt:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
                parameter.grad = None
            for slots in list(optimizer.state.values()):
                for value in list(slots.values()):
                    if isinstance(value, Tensor):
                        value.zero_()
                slots["extra"] = torch.ones(1)
                slots.pop(next(iter(slots)))
        for group in optimizer.param_groups:
            group["lr"] = 123.0
            group["another"] = True
        return Receipt("scrambles")


def stepped(optimizer: Any, model: nn.Module, draws: torch.Generator, steps: int) -> None:
    for _ in range(steps):
        torch_step(optimizer, {p: torch.randn(8, 6, generator=draws) for p in model.parameters()})


def torch_case(case: tuple[Any, dict[str, Any]]) -> Any:
    return lambda parameters: case[0](list(parameters), **case[1])


def foreign_case(case: tuple[str, str, dict[str, Any]]) -> Any:
    return lambda parameters: foreign(case, list(parameters))


CASES = {torch_name(case): torch_case(case) for case in VARIANTS}
CASES |= {foreign_name(case): foreign_case(case) for case in [*ALONE, *GROUPED]}
CASES["stacked-muon"] = lambda parameters: StackedMuonAdam([{"params": list(parameters), "kind": "muon"}])


@pytest.mark.parametrize("name", CASES)
def test_whatever_a_method_does_to_any_optimizer_is_taken_back(name: str) -> None:
    model, twin = Two(), Two()
    optimizer, other = CASES[name](model.parameters()), CASES[name](twin.parameters())
    draws = [torch.Generator().manual_seed(1) for _ in range(2)]
    stepped(optimizer, model, draws[0], 3)
    stepped(other, twin, draws[1], 3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    guard = Guard([torch.zeros(1)], lambda m, _: m.a.square().sum(), max_rise=-1e9)
    assert guard(Scrambles(), model, optimizer).rolled_back
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [sorted(map(str, slots)) for slots in optimizer.state.values()] == [
        sorted(map(str, slots)) for slots in other.state.values()
    ]
    stepped(optimizer, model, draws[0], 3)
    stepped(other, twin, draws[1], 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def every_method() -> list[Any]:
    """All that act at events or after steps, with their default options."""
    found = []
    for name in methods.__all__:
        cls = getattr(methods, name)
        if isinstance(cls, type) and name != "Compose":
            found.append(cls(last=1) if name == "LayerReset" else cls())
    return [method for method in found if method.moment in ("event", "step")]


@pytest.mark.parametrize("method", every_method(), ids=lambda method: method.name)
def test_all_methods_are_rolled_back_bit_for_bit(method: Any) -> None:
    model = net()
    if method.name == "layer-norm-reset":
        model.insert(2, nn.LayerNorm(8))
    optimizer = torch.optim.Adam(model.parameters())
    if hasattr(method, "remember"):
        method.remember(model)
    if method.watches:
        method.observe(model)
    train(model, optimizer)
    before = state(model, optimizer)
    receipt = Guard(DATA, loss, max_rise=-100.0)(method, model, optimizer, batches=DATA, loss=loss)
    assert receipt.rolled_back and receipt.changed == () and equal(state(model, optimizer), before)
