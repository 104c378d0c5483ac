"""Shrink and perturb against its formula, in both forms of the literature."""

import pytest
import torch
from torch import nn

from rekindle.initial import UnknownStart, draw, snapshot
from rekindle.methods import ShrinkPerturb


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).double()


def train(model):
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double())
    model[1].running_mean.fill_(0.7)


def test_towards_the_stored_init_keeps_a_fifth_by_default():
    model = net()
    start = snapshot(model)
    train(model)
    old = snapshot(model)
    receipt = ShrinkPerturb(initial=start)(model)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), 0.2 * old[name] + 0.8 * start[name], rtol=1e-14, atol=0)
    assert torch.equal(model[1].running_mean, old["1.running_mean"])
    assert set(receipt.changed) == {name for name, _ in model.named_parameters()}


def test_fresh_noise_is_a_draw_by_the_models_own_scheme():
    model = net()
    train(model)
    old = snapshot(model)
    expected = draw(model, generator=torch.Generator().manual_seed(5))
    ShrinkPerturb(0.6, "fresh")(model, generator=torch.Generator().manual_seed(5))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), 0.4 * old[name] + 0.6 * expected[name], rtol=1e-14, atol=1e-16)


def test_two_parameter_form_of_the_original():
    model = net()
    old, start = snapshot(model), draw(model, generator=torch.Generator().manual_seed(5))
    ShrinkPerturb(0.6, "fresh", sigma=0.01)(model, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(model[0].weight.detach(), 0.4 * old["0.weight"] + 0.01 * start["0.weight"])


@pytest.mark.parametrize(("coefficient", "same_as"), [(0.0, "old"), (1.0, "start")])
def test_the_ends_are_nothing_and_a_full_reset(coefficient, same_as):
    model = net()
    start = snapshot(model)
    train(model)
    values = {"old": snapshot(model), "start": start}[same_as]
    ShrinkPerturb(coefficient, initial=start)(model)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), values[name])


def test_a_start_that_is_not_there_is_an_error():
    with pytest.raises(UnknownStart, match=r"remember\(model\)"):
        ShrinkPerturb()(net())
    with pytest.raises(ValueError, match="coefficient=2"):
        ShrinkPerturb(2)
    with pytest.raises(ValueError, match="noise"):
        ShrinkPerturb(noise="loud")


def test_the_next_step_is_a_new_optimizers():
    model = net()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(8, 4, dtype=torch.float64)
    for _ in range(3):
        adam.zero_grad()
        model(x).square().mean().backward()
        adam.step()
    method = ShrinkPerturb(noise="fresh")
    receipt = method(model, adam)
    assert receipt.optimizer.reset == 3 * len(list(model.parameters()))
    assert receipt.gradients_cleared == len(list(model.parameters()))
    twin = net()
    twin.load_state_dict(model.state_dict())
    fresh = torch.optim.Adam(twin.parameters(), lr=0.1)
    for one, optimizer in ((model, adam), (twin, fresh)):
        optimizer.zero_grad()
        one(x).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
