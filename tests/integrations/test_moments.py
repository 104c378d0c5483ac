"""At which moment of a step a method acts: terms of the loss, between backward pass and step, after every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rekindle
from rekindle import methods
from trained import adam, batches, network, penalized, same, train


def test_a_loss_term_is_added_once_per_step_unscaled_and_while_accumulating() -> None:
    def penalty() -> methods.L2Init:
        return methods.L2Init(0.05)

    expected = network()
    term = penalty()
    term.remember(expected)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for x, y in batches(8):
        optimizer.zero_grad()
        (F.cross_entropy(expected(x), y) + term.loss_term(expected)).backward()
        optimizer.step()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with rekindle.attach(model, optimizer, penalty()):
        for x, y in batches(8):
            for half_x, half_y in zip(x.split(4), y.split(4), strict=True):
                scaler.scale(F.cross_entropy(model(half_x), half_y) / 2).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_method_between_backward_and_step(kind: str) -> None:
    make = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1), "adam": torch.optim.Adam}[kind]
    expected, method = network(), methods.UPGD(seed=1)
    optimizer = make(expected.parameters())
    for x, y in batches(8):
        optimizer.zero_grad()
        F.cross_entropy(expected(x), y).backward()
        method(expected, optimizer)
        optimizer.step()
    model = network()
    own = make(model.parameters())
    with rekindle.attach(model, own, methods.UPGD(seed=1)) as remedy:
        train(model, own, batches(8), remedy)
    assert same(model, expected)


def test_a_method_after_every_step_with_statistics() -> None:
    model = network()
    optimizer = adam(model)
    method = methods.ContinualBackprop(replacement_rate=0.05, maturity_threshold=2)
    with rekindle.attach(model, optimizer, method) as remedy:
        train(model, optimizer, batches(4), remedy)
    assert remedy.last is not None and remedy.last.method == method.name
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_methods_of_several_moments_in_one() -> None:
    model = network()
    optimizer = adam(model)
    both = methods.Compose([methods.FIRE(), methods.WeightClip(0.5)])
    with rekindle.attach(model, optimizer, both, at=5) as remedy:
        train(model, optimizer, batches(4), remedy)
    expected, clip = network(), methods.WeightClip(0.5)
    own = adam(expected)
    for step, (x, y) in enumerate(batches(4)):
        if step == 5:
            rekindle.fire(expected, own)
        own.zero_grad()
        F.cross_entropy(expected(x), y).backward()
        own.step()
        clip(expected, own)
    assert same(model, expected) and [r.method for r in remedy.receipts] == ["compose(fire)", "compose(weight-clip)"]


def test_one_round_for_several_optimizers() -> None:
    model = network()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    rest = torch.optim.Adam([p for layer in model[1:] for p in layer.parameters()])
    calls = []

    class Counted(methods.WeightClip):
        def __call__(self, model: Any, optimizer: Any = None, **more: Any) -> Any:
            calls.append(len(optimizer))
            return super().__call__(model, optimizer, **more)

    with rekindle.attach(model, [first, rest], Counted()) as remedy:
        for x, y in batches(8):
            F.cross_entropy(model(x), y).backward()
            first.step()
            rest.step()
            model.zero_grad()
            remedy.step()
        assert remedy.steps == 6 and calls == [2] * 6
        first.step()  # alone, twice: two rounds
        first.step()
        remedy.step()
        assert remedy.steps == 8


def test_each_optimizer_gets_the_loss_term_when_it_steps() -> None:
    """As GANs train: the other's zero_grad and backward pass come between two steps of one round."""

    def alternating(attached: bool) -> nn.Module:
        model, term = network(), methods.L2Init(0.5)
        term.remember(model)
        parts = [model[0].parameters(), [p for layer in model[1:] for p in layer.parameters()]]
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
        remedy = rekindle.attach(model, optimizers, methods.L2Init(0.5)) if attached else None
        for x, y in batches(8):
            for optimizer in optimizers:
                model.zero_grad()
                loss = F.cross_entropy(model(x), y)
                (loss if attached else loss + term.loss_term(model)).backward()
                optimizer.step()
        assert remedy is None or remedy.steps == 6
        return model

    for a, b in zip(alternating(True).parameters(), alternating(False).parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("early", [True, False])
def test_a_loss_term_before_clipping_is_a_term_in_the_loss(early: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with rekindle.attach(model, optimizer, methods.L2Init(0.5)) as remedy:
        for x, y in batches(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if early:
                remedy.before_clipping()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            remedy.step()
    for a, b in zip(model.parameters(), penalized(0.05, late=not early).parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
