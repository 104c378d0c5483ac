"""A reset of an optimizer that is known by the names of its slots only is tried first: right, or refused."""

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import rekindle
from rekindle.optimizers import check, reset

package = pytest.importorskip("pytorch_optimizer")
warnings.filterwarnings("ignore")
CLASSES = sorted(
    name
    for name, cls in vars(package).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
)


def made(name: str, parameters: list[Parameter]) -> Any:
    groups = [{"params": [parameter]} for parameter in parameters]
    try:
        return getattr(package, name)(groups, lr=1e-2)
    except Exception as error:
        pytest.skip(f"needs arguments of its own: {error}")


def step(optimizer: Any, parameters: list[Parameter], seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(parameter.shape, generator=draws) for parameter in parameters]

    def closure() -> float:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        return 1.0

    closure()
    torch.manual_seed(seed)
    try:
        optimizer.step()
    except TypeError:
        optimizer.step(closure)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_a_large_package_steps_like_a_new_one_or_is_refused(name: str) -> None:
    torch.manual_seed(0)
    first = [Parameter(torch.randn(8, 6)), Parameter(torch.randn(8, 6))]
    optimizer = made(name, first)
    try:
        for seed in range(4):
            step(optimizer, first, seed)
    except Exception as error:
        pytest.skip(f"does not step on two matrices: {error}")
    before = [parameter.detach().clone() for parameter in first]
    refused = None
    try:
        reset(optimizer, {"first": first[0]})
    except ValueError as error:
        refused = str(error)
    if refused is not None:
        assert "optimizer_state='none'" in refused
        assert all(map(torch.equal, first, before))
        step(optimizer, first, 5)
        return
    second = [Parameter(parameter.detach().clone()) for parameter in first]
    new = made(name, second)
    for seed in range(10, 13):
        step(optimizer, first, seed)
        step(new, second, seed)
        assert torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ASGD", "is not that of a new ASGD"),
        ("MADGRAD", "'k' for all its parameters"),
        ("Magma", "wraps another optimizer"),
        ("SaRA", "a trial failed"),
    ],
)
def test_the_refusal_says_why(name: str, reason: str) -> None:
    parameters = [Parameter(torch.randn(8, 6)), Parameter(torch.randn(8, 6))]
    optimizer = made(name, parameters)
    step(optimizer, parameters, 0)
    with pytest.raises(ValueError, match=reason):
        check(optimizer, {"a": parameters[0]})


def test_options_of_the_constructor_are_no_counts_and_training_goes_on() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    weights = [net[0].weight, net[2].weight]
    others = [p for p in net.parameters() if all(p is not w for w in weights)]
    ranger = package.Ranger([{"params": weights}, {"params": others}])
    for _ in range(12):
        ranger.zero_grad()
        net(torch.randn(4, 8)).square().sum().backward()
        ranger.step()
        if _ == 5:
            rekindle.fire(net, ranger)
    assert ranger.param_groups[0]["k"] == ranger.param_groups[1]["k"] > 0


def test_a_wrapper_is_refused_before_anything_changes() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    before = net[0].weight.detach().clone()
    lookahead = package.Lookahead(torch.optim.AdamW(net.parameters()))
    with pytest.raises(ValueError, match=r"wraps another optimizer \(AdamW"):
        rekindle.fire(net, lookahead)
    assert torch.equal(net[0].weight, before)


class Unnamed(torch.optim.Optimizer):
    """Keeps a moment under a name that means something else elsewhere, and steps by it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("exp_avg", torch.ones_like(p)).mul_(0.5).add_(p.grad)  # starts at one, not at zero
                p.data.sub_(group["lr"] * state["exp_avg"])


def test_a_slot_that_only_looks_familiar_is_found_out() -> None:
    weight = Parameter(torch.randn(4, 4))
    optimizer = Unnamed([weight])
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    with pytest.raises(ValueError, match="is not that of a new Unnamed"):
        check(optimizer, {"weight": weight})
    rekindle.optimizers.register(Unnamed, {"exp_avg": 1.0})
    reset(optimizer, {"weight": weight})
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.ones(4, 4))


def test_without_an_optimizer_the_receipt_says_that_state_may_be_stale() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    assert any("stale" in note for note in rekindle.fire(net).notes)
    assert not any("stale" in note for note in rekindle.fire(net, torch.optim.Adam(net.parameters())).notes)
