"""Injection: no jump at the moment, only the new part learns, and linear heads merge back exactly."""

import copy

import pytest
import torch
from torch import nn

import zoo_models
from rekindle.methods import PlasticityInjection
from rekindle.methods.plasticity_injection import InjectedHead


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def fit(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x()).square().mean().backward()
        optimizer.step()


def x():
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_output_is_unchanged_and_only_the_new_part_moves():
    model = net()
    adam = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.8, 0.9))
    fit(model, adam)
    before = model(x())
    receipt = PlasticityInjection()(model, adam)
    torch.testing.assert_close(model(x()), before, rtol=0, atol=1e-6)
    head = model[2]
    assert isinstance(head, InjectedHead)
    assert adam.param_groups[-1]["lr"] == 0.02
    assert adam.param_groups[-1]["betas"] == (0.8, 0.9)
    assert {id(p) for p in adam.param_groups[-1]["params"]} == {id(p) for p in head.new.parameters()}
    old, minus = copy.deepcopy(head.old.state_dict()), copy.deepcopy(head.minus.state_dict())
    new = copy.deepcopy(head.new.state_dict())
    fit(model, adam)
    assert all(torch.equal(v, old[k]) for k, v in head.old.state_dict().items())
    assert all(torch.equal(v, minus[k]) for k, v in head.minus.state_dict().items())
    assert not any(torch.equal(v, new[k]) for k, v in head.new.state_dict().items())
    assert receipt.totals()["counts"] == {"new parameters": 27}


def test_the_new_head_is_a_fresh_draw():
    model = net()
    PlasticityInjection()(model, generator=torch.Generator().manual_seed(3))
    assert not torch.equal(model[2].new.weight, model[2].old.weight)
    assert model[2].new.weight.abs().max() <= 8**-0.5


def test_linear_heads_merge_back_to_one_matrix_in_the_same_parameter():
    model = net()
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    weight = model[2].weight
    method = PlasticityInjection()
    method(model, adam)
    fit(model, adam)
    before = model(x())
    assert method.merge(model, adam) == "2"
    assert isinstance(model[2], nn.Linear)
    assert model[2].weight is weight
    assert weight.requires_grad
    torch.testing.assert_close(model(x()), before)
    assert len(adam.param_groups) == 1
    held = {id(p) for p in adam.param_groups[0]["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert float(adam.state[weight]["step"]) == 0 if adam.state.get(weight) else True
    fit(model, adam)  # and it trains
    with pytest.raises(ValueError, match="no injection"):
        method.merge(model, adam)


def test_a_second_injection_merges_the_first_if_linear():
    model = net()
    adam = torch.optim.Adam(model.parameters())
    method = PlasticityInjection()
    method(model, adam)
    fit(model, adam)
    before = model(x())
    receipt = method(model, adam)
    torch.testing.assert_close(model(x()), before)
    assert isinstance(model[2].old, nn.Linear)
    assert "merged" in receipt.notes[0]
    assert len(adam.param_groups) == 2


def test_a_nonlinear_head_is_kept_as_a_wider_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    method = PlasticityInjection(head="1")
    for _ in range(2):
        before = model(x())
        receipt = method(model, sgd)
        torch.testing.assert_close(model(x()), before, rtol=0, atol=1e-12)
        fit(model, sgd)
    assert isinstance(model[1].old, InjectedHead)
    assert "wider head" in receipt.notes[0]
    assert sum(p.requires_grad for p in model[1].parameters()) == 4
    with pytest.raises(ValueError, match="not linear"):
        method.merge(model, sgd)


def test_a_tied_head_is_untied_and_the_embedding_still_learns():
    model = zoo_models.build("nanogpt")
    adam = torch.optim.Adam(model.parameters())
    batch = zoo_models.batch("nanogpt")
    before = model(batch)
    receipt = PlasticityInjection()(model, adam)
    torch.testing.assert_close(model(batch), before, rtol=0, atol=1e-6)
    assert "one linear layer" in receipt.notes[0] and "tied" in receipt.notes[1]
    assert model.wte.weight.requires_grad
    zoo_models.loss(model, batch).backward()
    assert model.wte.weight.grad.abs().max() > 0
    assert model.lm_head.old.weight.grad is None


def test_unknown_heads_and_foreign_optimizers_are_errors_before_any_change():
    model = net()
    with pytest.raises(ValueError, match="no such module"):
        PlasticityInjection(head="nope")(model)
    with pytest.raises(ValueError, match="in none of the given optimizers"):
        PlasticityInjection()(model, torch.optim.Adam(model[0].parameters()))
    assert isinstance(model[2], nn.Linear)
