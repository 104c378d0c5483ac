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


def mixed():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(6, 64, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, groups=64),
        nn.Flatten(),
        nn.Linear(64, 300),
        nn.LayerNorm(300),
        nn.Linear(300, 40),
    ).double()


def test_a_he_reset_has_hes_variance_zero_biases_and_norms_at_their_start():
    model = mixed()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(7)
    model(torch.randn(4, 6, 5, 5).double())
    FullReset("he")(model)
    for layer, fan_in in ((model[0], 54), (model[3], 9), (model[5], 64), (model[7], 300)):
        assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.12)
        assert not layer.bias.any()
    for norm in (model[1], model[6]):
        assert torch.equal(norm.weight, torch.ones_like(norm.weight))
        assert not norm.bias.any()
    assert not model[1].running_mean.any()


@pytest.mark.parametrize("gain", [2.0**0.5, 0.5])
def test_an_orthogonal_reset_is_torchs_orthogonal_start(gain):
    model = mixed()
    FullReset("orthogonal", gain=gain)(model)
    for layer in (model[0], model[5], model[7]):
        values = torch.linalg.svdvals(layer.weight.flatten(1))
        torch.testing.assert_close(values, torch.full_like(values, gain), rtol=1e-5, atol=0)
    taps = model[3].weight.flatten(1)  # each channel is a matrix of its own: nine numbers
    torch.testing.assert_close(taps.norm(dim=1), torch.full((64,), gain).double(), rtol=1e-5, atol=0)


def test_scaled_resets_keep_embeddings_gates_and_ties_as_they_start():
    model = zoo_models.build("nanogpt")
    with torch.no_grad():
        model.wte.weight.fill_(3.0)
    FullReset("he", fresh=lambda: zoo_models.NanoGPT())(model)
    assert model.lm_head.weight is model.wte.weight
    assert model.wte.weight.std().item() == pytest.approx(1, rel=0.1)  # as torch draws an embedding, not √(2/32)
    recurrent = nn.LSTM(50, 80)
    FullReset("orthogonal", gain=1.0)(recurrent)
    for gate in recurrent.weight_hh_l0.chunk(4):
        torch.testing.assert_close(gate @ gate.mT, torch.eye(80), rtol=0, atol=1e-5)
    assert not recurrent.bias_ih_l0.any()
    assert not recurrent.bias_hh_l0.any()


def test_parts_of_a_model_can_have_a_he_start():
    model, _, _ = trained()
    before = snapshot(model)
    done = HeadReset(start="he", gain=1.0)(model)
    assert done.changed == ("4.weight", "4.bias")
    assert not model[4].bias.any()
    assert torch.equal(model[0].weight, before["0.weight"])
    with pytest.raises(ValueError, match="gain"):
        FullReset("he", gain=0.0)
    with pytest.raises(ValueError, match="none of fresh, init, he, orthogonal"):
        FullReset("kaiming")
