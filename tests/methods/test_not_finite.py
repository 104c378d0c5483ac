"""A NaN in one batch, or one Inf gradient, decides about nothing and stays in no statistic."""

import copy

import pytest
import torch
from torch import nn

from rekindle.methods import UPGD, ContinualBackprop, ReDo, ReGraMa, SelfNormalizedReset


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1)).double()


def good(seed=0):
    return torch.randn(20, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bad():
    x = good()
    x[0, 0] = float("nan")
    return x


def loss(model, x):
    return model(x).square().mean()


def changed(receipt):
    return {record.name: dict(record.counts) for record in receipt.records}


@pytest.mark.parametrize("make", [lambda: ReDo(tau=0.5), lambda: ReGraMa(tau=0.5)])
def test_a_bad_batch_is_left_out_and_counted(make):
    clean, dirty = net(), net()
    expected = make()(clean, batches=[good()], loss=loss)
    receipt = make()(dirty, batches=[bad(), good(), bad()], loss=loss)
    assert changed(receipt) == changed(expected)
    assert "0: 2 passes with NaN or Inf were left out" in receipt.notes
    assert not expected.notes
    for name, tensor in dirty.state_dict().items():
        assert torch.equal(tensor, clean.state_dict()[name])
    before = copy.deepcopy(dirty.state_dict())
    with pytest.raises(ValueError, match=r"'0' holds? NaN or Inf|of '0' holds NaN or Inf"):
        make()(dirty, batches=[bad()], loss=loss)
    assert all(torch.equal(tensor, before[name]) for name, tensor in dirty.state_dict().items())


def test_continual_backprop_learns_nothing_from_a_bad_pass():
    one, two = ContinualBackprop(maturity_threshold=0), ContinualBackprop(maturity_threshold=0)
    model, twin = net(), net()
    for method, m, batches in ((one, model, [good()]), (two, twin, [good(), bad()])):
        with method.observe(m):
            for x in batches:
                m(x)
                receipt = method(m)
    torch.testing.assert_close(one.utilities("0"), two.utilities("0"))
    assert "no finite activity" in receipt.skipped["0"]
    assert "0: 1 passes with NaN or Inf were left out" in receipt.notes


def test_a_bad_pass_is_no_silence():
    method, model = SelfNormalizedReset(first_threshold=2), net()
    with method.observe(model):
        for _ in range(5):
            model(bad())
            receipt = method(model)
    assert not receipt.records
    assert "0: 1 passes with NaN or Inf were left out" in receipt.notes


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_upgd_survives_an_infinite_gradient(make):
    model, method = net(), UPGD()
    optimizer = make(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, good(step)).backward()
        if step == 1:  # a gradient scaler tries a scale that is too large, and skips the step
            model[0].weight.grad[0, 0] = float("inf")
            kept = {name: value.clone() for name, value in method.state_dict()["utility"].items()}
            receipt = method(model, optimizer)
            assert "1 gradients hold NaN or Inf (0.weight" in receipt.notes[0]
            assert all(torch.equal(value, kept[name]) for name, value in method.state_dict()["utility"].items())
            assert model[0].weight.grad[0, 1].isfinite()
            continue
        method(model, optimizer)
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(value.isfinite().all() for value in method.state_dict()["utility"].values())
