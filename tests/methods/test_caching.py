"""What a method has worked out about a model is used only while the model consists of the same parts."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from rekindle import methods
from rekindle.methods.caching import PerModel


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))


def x():
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def loss(model, batch):
    return model(batch).square().mean()


def replaced(model):
    """Another layer in the old place."""
    model[3] = copy.deepcopy(model[3])


def assigned(model):
    """Other parameters in the old modules."""
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


CHANGES = [replaced, assigned]
DECOUPLED = {
    "weight decay": lambda: methods.WeightDecay(0.5),
    "l2 init": lambda: methods.L2Init(0.5, decoupled=True),
    "parseval": lambda: methods.Parseval(0.5, decoupled=True),
    "spectral": lambda: methods.SpectralRegularizer(0.5, decoupled=True),
    "isometry": lambda: methods.IsometryLoss(0.5, decoupled=True),
    "weight clip": lambda: methods.WeightClip(0.1),
    "nap": methods.NormalizeAndProject,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", DECOUPLED)
def test_methods_act_on_the_parameters_that_the_model_has_now(name, change):
    model, method = net(), DECOUPLED[name]()
    if hasattr(method, "remember"):
        method.remember(net(1))
    method(model, torch.optim.SGD(model.parameters(), lr=0.1))
    change(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3).add_(0.1)
    before = model[3].weight.detach().clone()
    receipt = method(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "3.weight" in receipt.changed
    assert not torch.equal(model[3].weight, before)


@pytest.mark.parametrize("change", CHANGES)
def test_upgd_gates_new_parameters_and_starts_their_utility_anew(change):
    model, method = net(), methods.UPGD(sigma=0.0, beta_utility=0.5)
    loss(model, x()).backward()
    method(model)
    change(model)
    model.zero_grad()
    loss(model, x()).backward()
    plain = model[3].weight.grad.clone()
    method(model)
    assert not torch.equal(model[3].weight.grad, plain)
    torch.testing.assert_close(method._utility["3.weight"], -0.5 * plain * model[3].weight.detach())


@pytest.mark.parametrize("make", [methods.ReDo, methods.ReGraMa])
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_seen_of_old_parts_is_not_held_against_new_ones(make, change):
    model, method = net(), make(tau=0.9)
    with method.observe(model):
        loss(model, x()).backward()
    change(model)
    try:
        skipped = method(model).skipped["3"]
    except ValueError as error:  # nothing is left that was seen
        skipped = str(error)
    assert "was recorded" in skipped
    receipt = method(model, batches=[x()], loss=loss)
    assert "3.weight" in receipt.changed


@pytest.mark.parametrize("make", [methods.ContinualBackprop, methods.SelfNormalizedReset])
def test_a_layer_that_is_not_seen_any_more_is_said_to_be_skipped(make):
    model, method = net(), make()
    with method.observe(model):
        loss(model, x()).backward()
        method(model)
        model[4] = nn.ReLU()  # where the activity of layer 3 was read
        loss(model, x()).backward()
        receipt = method(model)
    assert "recorded" in receipt.skipped["3"]


def test_the_tortoise_follows_the_model():
    model, method = net(), methods.HareTortoise(momentum=0.5)
    method.update(model)
    model.double()
    method.update(model)
    assert {tensor.dtype for tensor in method.tortoise().values()} == {torch.float64}
    method(model)
    replaced(model)
    model[3].weight.data.add_(1)
    before = method.tortoise()["3.weight"].clone()
    method.update(model)
    torch.testing.assert_close(method.tortoise()["3.weight"], 0.5 * before + 0.5 * model[3].weight.detach())
    model[3] = nn.Linear(6, 7).double()
    with pytest.raises(ValueError, match=r"3\.weight"):
        method(model)
    method.update(model)
    assert method.tortoise()["3.weight"].shape == (7, 6)


def test_freezing_casting_and_moving_count_as_changes():
    model, cache, made = net(), PerModel(), []
    for change in (lambda: None, lambda: None, lambda: model[0].weight.requires_grad_(False), model.double):
        change()
        cache.get(model, lambda: made.append(1))
    assert len(made) == 3
    cache.get(other := net(), lambda: made.append(1), pytest.fail)
    assert len(pickle.loads(pickle.dumps(cache))._kept) == 0
    del other
    gc.collect()
    assert len(cache._kept) == 1
