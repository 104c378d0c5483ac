"""What cannot work is found when it is said or when training starts, not when the method acts for the first time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rekindle
from integrations.test_attaching import train
from rekindle import methods
from rekindle.integrations import Application
from rekindle.triggers import Every, Plateau
from trained import adam, batches, network


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match="no method is called 'fir'"):
        Application("fir")
    with pytest.raises(ValueError, match="own trigger"):
        Application(rekindle.Schedule(methods.FIRE(), Every(2)), at=3)
    with pytest.raises(ValueError, match="acts in every step"):
        Application(methods.UPGD(), at=3)
    with pytest.raises(ValueError, match="acts in every step"):
        Application(methods.L2Init(0.1), guard=rekindle.Guard(batches(8), max_rise=1.0))
    with pytest.raises(ValueError, match="every is a positive number"):
        Application("fire", every=0)
    with pytest.raises(ValueError, match="at is a number"):
        Application("fire", at=[1, -2])
    with pytest.raises(TypeError, match="when is a trigger"):
        Application("fire", when=lambda m: True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mirror"):
        Application("fire", mirrors=[3])  # type: ignore[list-item]
    wrong: dict[str, Any]
    for wrong, said in (
        ({"at": 3.0}, "at is a number"),
        ({"every": True}, "every is a positive number"),
        ({"guard": 0.5}, "guard is a rekindle.Guard"),
        ({"monitor": 0}, "monitor is a Monitor"),
        ({"rewarm": 0.5}, "rewarm is a number of steps"),
        ({"batches": iter([])}, "read only once"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            Application("fire", **wrong)
    with pytest.raises(TypeError, match=r"write FIRE\(\.\.\.\)"):
        Application(methods.FIRE)
    model = network()
    with pytest.raises(ValueError, match="at=0"):
        rekindle.attach(model, adam(model), at=0)
    with pytest.raises(ValueError, match="not the state"):
        Application("fire").load_state_dict({})


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (methods.FIRE(targets="no.such.layer"), "matches no weight"),
        (methods.FIRE(scale="huge"), "scale='huge'"),
        (methods.FIRE(scle=2), "did you mean 'scale'"),
        (methods.FIRE(recalibrate=True), "needs batches"),
        (methods.Compose([methods.OptimizerReset(), methods.DASH()]), "DASH needs batches"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_found_when_training_starts_and_not_when_the_method_acts(method: Any, said: str) -> None:
    model = network()
    with pytest.raises((TypeError, ValueError), match=said):
        rekindle.attach(model, adam(model), method, at=100_000)


def test_what_is_missing_now_may_be_there_later() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight.zero_()  # a layer that starts silent
    rekindle.attach(model, adam(model), methods.FIRE(targets="0.weight"))
    model.requires_grad_(False)
    rekindle.attach(model, adam(model), methods.FIRE(targets="2.weight"))  # unfrozen in a later phase


def test_a_slot_that_nobody_knows_is_found_after_the_first_step() -> None:
    class Strange(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["strange"] = parameter.detach().clone()
            return super().step(closure)

    model = network()
    optimizer = Strange(model.parameters(), lr=0.1)
    with (
        pytest.raises(ValueError, match="unknown slot 'strange'"),
        rekindle.attach(model, optimizer, every=9) as remedy,
    ):
        train(model, optimizer, batches(4)[:1], remedy)


def test_an_optimizer_or_guard_that_cannot_work_is_found_when_training_starts() -> None:
    model = network()
    with pytest.raises(ValueError, match="in none of the given optimizers"):
        rekindle.attach(model, adam(network()), at=5)
    with pytest.raises(ValueError, match="give the guard a loss"):
        rekindle.attach(model, adam(model), at=5, guard=rekindle.Guard([batches(8)[0][0]], max_rise=1.0))


def test_a_step_that_was_never_reached_is_reported() -> None:
    model = network()
    with pytest.warns(UserWarning, match="at step 500 was not applied"), rekindle.attach(model, adam(model), at=500):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rekindle.attach(model, adam(model), every=500):
            pass


def test_gradients_made_inside_a_closure_are_out_of_reach() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    with rekindle.attach(model, optimizer, methods.L2Init(0.1)), pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: F.cross_entropy(model(batches(8)[0][0]), batches(8)[0][1]))


def small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


X, Y = torch.randn(16, 4), torch.randint(0, 3, (16,))
ENTROPY: Any = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
FIRST_TRIES: dict[str, tuple[Callable[[nn.Module, Any], object], str]] = {
    "optimizer first": (lambda m, o: rekindle.fire(o, m), r"the order is \(model, optimizer\)"),
    "parameters": (lambda m, o: rekindle.fire(m.parameters()), r"its parameters\?\): the order is \(model, optimizer"),
    "a layer as target": (lambda m, o: rekindle.fire(m, o, targets=m[0]), "got a layer .Linear.: write its name"),
    "a weight as target": (lambda m, o: rekindle.fire(m, o, targets=[m[0].weight]), "got a tensor .Parameter.: write"),
    "attention of an MLP": (lambda m, o: rekindle.fire(m, o, targets="attention.qk"), "matches no weight"),
    "bfloat16": (lambda m, o: rekindle.health(small(torch.bfloat16), [X]), "its weights are bfloat16"),
    "float64": (lambda m, o: rekindle.health(small(torch.float64), [X]), "its weights are float64"),
    "another width": (
        lambda m, o: rekindle.health(m, [torch.randn(3, 5)]),
        r"a batch of float32 \(3, 5",
    ),
    "a dict": (lambda m, o: rekindle.health(m, [{"x": X}]), "does not run on a dict with x"),
    "one batch, health": (lambda m, o: rekindle.health(m, (X, Y)), r"got one batch: wrap it in a list, \[batch\]"),
    "one tensor, health": (lambda m, o: rekindle.health(m, X), "got one batch"),
    "one batch, probe": (lambda m, o: rekindle.probe(m, (X, Y), loss=ENTROPY), "got one batch"),
    "one batch, advise": (lambda m, o: rekindle.advise(m, (X, Y), loss=ENTROPY), "got one batch"),
    "one batch, guard": (lambda m, o: rekindle.Guard((X, Y), ENTROPY, max_rise=1.0), "got one batch"),
    "one tensor, method": (lambda m, o: methods.ReDo()(m, o, batches=X), "got one batch"),
    "one batch, attach": (
        lambda m, o: rekindle.attach(m, o, methods.ReDo(), every=3, batches=(X, Y)),
        "got one batch",
    ),
    "labels, probe": (
        lambda m, o: rekindle.probe(m, [(X, Y.float())], loss=ENTROPY, steps=2, seeds=1),
        r"class labels are integers \(labels.long\(\)\)",
    ),
    "labels, health": (lambda m, o: rekindle.health(m, [(X, Y.float())], loss=ENTROPY), "class labels are integers"),
    "bfloat16, probe": (
        lambda m, o: rekindle.probe(small(torch.bfloat16), [(X, Y)], loss=ENTROPY, steps=2, seeds=1),
        "its weights are bfloat16",
    ),
    "a loss of outputs": (
        lambda m, o: rekindle.health(m, [(X, Y)], loss=lambda p, y: F.cross_entropy(p, y)),
        r"loss is called as loss\(model, batch\)",
    ),
    "budget": (lambda m, o: rekindle.probe(m, [(X, Y)], loss=ENTROPY, seconds=5), "it is called budget="),
    "batches of advise": (lambda m, o: rekindle.advise(m, batches=[(X, Y)], loss=ENTROPY), "it is called new_batches="),
    "method, optimizer first": (lambda m, o: methods.ReDo()(o, m), r"the order is \(model, optimizer\)"),
    "monitor, optimizer first": (lambda m, o: rekindle.Monitor(o, m), r"the order is \(model, optimizer\)"),
    "attach, optimizer first": (lambda m, o: rekindle.attach(o, m, "fire"), "the order is"),
    "attach without optimizer": (lambda m, o: rekindle.attach(m, None, "fire", every=3), "an optimizer: attach.model"),
    "attach, method second": (lambda m, o: rekindle.attach(m, "fire", every=3), "an optimizer: attach.model"),
    "attach, a function": (lambda m, o: rekindle.attach(m, o, rekindle.fire, every=3), "got the function fire: write"),
    "attach, a typo": (lambda m, o: rekindle.attach(m, o, "fire", evry=3), r"no evry=: did you mean every="),
    "plateau of a name": (lambda m, o: Plateau("loss"), "a metric's name is key="),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("attempt", FIRST_TRIES)
def test_a_first_try_gets_a_sentence(attempt: str) -> None:
    model = small()
    call, sentence = FIRST_TRIES[attempt]
    with pytest.raises((TypeError, ValueError), match=sentence):
        call(model, adam(model))


def test_equal_parts_of_a_tensor_are_batches() -> None:
    model = small()
    whole, parts = rekindle.health(model, [X]), rekindle.health(model, X.split(4))
    assert parts.whole["dormant"] == whole.whole["dormant"]
