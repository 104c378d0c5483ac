"""A reset of an optimizer that is known by the names of its slots only is tried first: right, or refused."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import optimizer_classes
import rekindle
from rekindle.optimizers import check, reset

package = pytest.importorskip("pytorch_optimizer")
warnings.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ASGD", "is not that of a new ASGD"),
        ("Kron", "changes the steps of others"),  # the first group's count decides for all, after 500 steps
        ("LoRARite", "a trial failed"),
        ("MADGRAD", "'k' for all its parameters"),
        ("Magma", "wraps another optimizer"),
        ("SaRA", "a trial failed"),
    ],
)
def test_the_refusal_says_why(name: str, reason: str) -> None:
    parameters = [Parameter(torch.randn(8, 8)) for _ in range(4)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    optimizer = optimizer_classes.made("pytorch_optimizer", name, groups)
    optimizer_classes.step(optimizer, parameters, 0)
    with pytest.raises(ValueError, match=reason):
        check(optimizer, {"a": parameters[0], "b": parameters[1]})


def test_the_settings_of_the_changed_group_are_tried() -> None:
    class Mixed(torch.optim.Optimizer):
        """Plain steps, but with `counts` they shrink by a count that only this class knows of."""

        def __init__(self, params: Any, lr: float = 0.1) -> None:
            self.hidden: dict[Any, int] = {}
            super().__init__(params, {"lr": lr, "counts": False})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    self.hidden[p] = self.hidden.get(p, 0) + 1
                    p.data.sub_(p.grad, alpha=group["lr"] / (self.hidden[p] if group["counts"] else 1))

    plain, counted = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2, 2))
    optimizer = Mixed([{"params": [plain]}, {"params": [counted], "counts": True}])
    check(optimizer, {"plain": plain})
    with pytest.raises(ValueError, match="is not that of a new Mixed"):
        check(optimizer, {"counted": counted})


def test_a_rate_of_zero_hides_nothing() -> None:
    weight = Parameter(torch.randn(4, 4))
    optimizer = Unnamed([weight], lr=0.0)
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    with pytest.raises(ValueError, match="is not that of a new Unnamed"):
        check(optimizer, {"weight": weight})


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
            rekindle.fire(net, ranger, targets="auto")
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
