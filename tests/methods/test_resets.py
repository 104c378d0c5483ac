"""Resets of whole layers: what goes back, what stays, in place."""

import pytest
import torch
from torch import nn

import zoo_models
from rekindle.initial import draw, snapshot
from rekindle.methods import FullReset, HeadReset, LayerNormReset, LayerReset


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    start = snapshot(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 1, 4, 4)).square().mean().backward()
        optimizer.step()
    return model, start, optimizer


def test_full_reset_to_the_stored_start_restores_buffers_too():
    model, start, optimizer = trained()
    assert int(model[1].num_batches_tracked) == 3
    receipt = FullReset("init", initial=start)(model, optimizer)
    assert all(torch.equal(tensor, start[name]) for name, tensor in snapshot(model).items())
    assert receipt.optimizer.reset == 3 * 6
    assert receipt.notes == ("3 buffers restored",)


def test_full_reset_draws_by_the_models_scheme():
    model, _, _ = trained()
    expected = draw(model, generator=torch.Generator().manual_seed(4))
    FullReset()(model, generator=torch.Generator().manual_seed(4))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in snapshot(model).items())
    assert int(model[1].num_batches_tracked) == 0


def test_full_reset_with_a_factory():
    model = zoo_models.build("nanogpt")
    FullReset(fresh=lambda: zoo_models.NanoGPT())(model)
    assert model.lm_head.weight is model.wte.weight  # the tie stays


def test_only_the_head_changes():
    model, start, optimizer = trained()
    before = snapshot(model)
    done = HeadReset(start="init", initial=start)(model, optimizer)
    assert done.changed == ("4.weight", "4.bias")
    for name, tensor in snapshot(model).items():
        assert torch.equal(tensor, start[name] if name.startswith("4.") else before[name])
    assert done.optimizer.reset == 6
    assert float(optimizer.state[model[0].weight]["step"]) == 3  # others keep their state


def test_named_and_last_layers():
    model = zoo_models.build("resnet")
    named = LayerReset("layer2")(model).changed
    assert named
    assert all(name.startswith("layer2.") for name in named)
    last = LayerReset(last=1)(model).changed
    assert last == ("fc.weight", "fc.bias")
    assert LayerReset(kind="Linear")(model).changed == last
    with pytest.raises(ValueError, match="matches no module"):
        LayerReset("nope")(model)
    with pytest.raises(ValueError, match="either layers="):
        LayerReset()


def test_norm_layers_only():
    model, _, optimizer = trained()
    before = snapshot(model)
    receipt = LayerNormReset()(model, optimizer)
    assert receipt.changed == ("1.weight", "1.bias")
    assert model[1].weight.tolist() == [1.0] * 4
    assert model[1].bias.tolist() == [0.0] * 4
    assert model[1].running_var.tolist() == [1.0] * 4
    assert torch.equal(model[0].weight, before["0.weight"])
    gpt = zoo_models.build("llama")
    assert all("norm" in name for name in LayerNormReset()(gpt).changed)


def test_the_last_layers_include_the_norms_among_them():
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    for norm in (model[1], model[3]):
        nn.init.constant_(norm.weight, 5.0)
    changed = LayerReset(last=2)(model).changed
    assert changed == ("2.weight", "2.bias", "3.weight", "3.bias", "4.weight", "4.bias")
    assert model[1].weight.tolist() == [5.0] * 3 and model[3].weight.tolist() == [1.0] * 3


@pytest.mark.parametrize("last", [0, -1])
def test_last_counts_from_one(last):
    with pytest.raises(ValueError, match="at least 1"):
        LayerReset(last=last)
