"""A change drags along the right things: optimizer slots, gradients, biases, mirrors, parametrizations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from rekindle.projection.firing import fire
from small_networks import mlp, polar_reference, same, state_of, stepped


def test_slots_of_changed_parameters_start_over_and_are_counted() -> None:
    model = mlp()
    optimizer = stepped(model)
    receipt = fire(model, optimizer, targets="auto")
    assert receipt.optimizer is not None
    assert (receipt.optimizer.parameters, receipt.optimizer.matched, receipt.optimizer.reset) == (3, 9, 9)
    for name, parameter in model.named_parameters():
        expected = 0 if name in receipt.changed else 3
        assert optimizer.state[parameter]["step"] == expected, name


def test_stale_gradients_are_cleared_and_counted() -> None:
    model = mlp()
    stepped(model)
    receipt = fire(model, targets="auto")
    assert receipt.gradients_cleared == 3
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name in receipt.changed)
    assert receipt.optimizer is None


def test_a_master_copy_gets_the_new_weight() -> None:
    model = mlp(torch.bfloat16)
    optimizer = stepped(model)
    for parameter, state in optimizer.state.items():
        state["master_param"] = parameter.detach().float()
    receipt = fire(model, optimizer, targets="auto")
    assert receipt.optimizer is not None
    assert receipt.optimizer.masters == 3
    assert torch.equal(optimizer.state[model[0].weight]["master_param"], model[0].weight.detach().float())


def test_biases_are_zeroed_only_when_asked_and_only_beside_changed_weights() -> None:
    model, mirror = mlp(), mlp(seed=1).requires_grad_(False)
    optimizer = stepped(model)
    receipt = fire(model, optimizer, biases="zero", mirrors=mirror, targets="auto")
    assert receipt.biases_zeroed == 3
    for i in (0, 2, 4):
        assert model[i].bias.abs().sum() == 0
        assert mirror[i].bias.abs().sum() == 0
        assert optimizer.state[model[i].bias]["step"] == 0
    assert model[6].bias.abs().sum() > 0
    assert optimizer.state[model[6].bias]["step"] == 3
    kept = mlp()
    before = state_of(kept)
    fire(kept, targets="auto")
    assert all(torch.equal(kept[i].bias, before[f"{i}.bias"]) for i in (0, 2, 4, 6))


def test_only_the_targeted_part_of_a_fused_bias_is_zeroed() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=6)
    model = transformers.GPT2LMHeadModel(config)
    attention = model.transformer.h[0].attn
    with torch.no_grad():
        attention.c_attn.bias.fill_(1.0)
    fire(model, targets="attention.qk", biases="zero")
    assert attention.c_attn.bias.tolist() == [0.0] * 16 + [1.0] * 8
    lstm = nn.Sequential(nn.LSTM(4, 5))
    fire(lstm, biases="zero", heads=())
    assert all(p.abs().sum() == 0 for name, p in lstm.named_parameters() if "bias" in name)


def test_the_bias_of_separate_projections_is_zeroed_by_thirds() -> None:
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)
    with torch.no_grad():
        attention.in_proj_bias.fill_(1.0)
    fire(attention, targets="attention.qk", biases="zero", heads=())
    assert attention.in_proj_bias.tolist() == [0.0] * 16 + [1.0] * 8


def test_mirrors_get_the_same_weights() -> None:
    model = mlp()
    target, average = mlp(seed=1), torch.optim.swa_utils.AveragedModel(mlp(seed=2))
    half = mlp(seed=3).bfloat16()
    kept = state_of(target)
    receipt = fire(model, mirrors=[target, average, half], targets="auto")
    assert receipt.mirrors == 3
    for name in receipt.changed:
        now = model.state_dict()[name]
        assert torch.equal(target.state_dict()[name], now)
        assert torch.equal(average.module.state_dict()[name], now)
        assert torch.equal(half.state_dict()[name], now.bfloat16())
    assert torch.equal(target.state_dict()["6.weight"], kept["6.weight"])


def test_a_mirror_that_does_not_fit_is_found_first() -> None:
    model = mlp()
    before = state_of(model)
    with pytest.raises(KeyError, match=r"mirror 0.*'0\.weight'"):
        fire(model, mirrors=nn.Linear(3, 3))
    other = mlp()
    other[2] = nn.Linear(20, 17)
    with pytest.raises(ValueError, match=r"'2\.weight'.*mirror 1"):
        fire(model, mirrors=[mlp(), other])
    assert same(before, state_of(model))


def test_a_tied_weight_is_treated_once() -> None:
    model = mlp()
    model.add_module("again", nn.Linear(12, 20))
    model.again.weight = model[0].weight  # type: ignore[union-attr]
    w = model[0].weight.detach().clone()
    receipt = fire(model, heads="6.*", targets="auto", scale="paper")
    assert receipt.changed.count("0.weight") == 1
    assert "tied" in receipt.skipped["again.weight"]
    wanted = math.sqrt(20 / 12) * polar_reference(w)
    torch.testing.assert_close(model[0].weight.detach().double(), wanted, rtol=1e-3, atol=1e-3)


def test_two_parameters_in_one_memory_are_treated_once_and_both_start_over() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 2))
    model[2].weight.data = model[0].weight.data
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    w = model[0].weight.detach().clone()
    receipt = fire(model, optimizer, targets="auto", scale="paper")
    assert receipt.changed == ("0.weight",)
    assert "shares its memory with 0.weight" in receipt.skipped["2.weight"]
    torch.testing.assert_close(model[2].weight.detach().double(), polar_reference(w), rtol=1e-3, atol=1e-3)
    assert all(optimizer.state[model[i].weight]["step"] == 0 for i in (0, 2))
    assert model[2].weight.grad is None


def test_weight_norm_is_written_through_and_others_are_refused() -> None:
    model = mlp()
    parametrizations.weight_norm(model[0])
    nn.utils.weight_norm(model[2])
    parametrizations.spectral_norm(model[4])
    originals = dict(model.named_parameters())
    optimizer = stepped(model)
    model(torch.ones(1, 12))  # an old-style hook computes its weight in the forward pass
    w = [model[0].weight.detach().clone(), model[2].weight.detach().clone()]
    receipt = fire(model, optimizer, targets="auto")
    assert set(receipt.changed) == {"0.weight", "2.weight"}
    assert "_SpectralNorm" in receipt.skipped["4.weight"]
    for i, value in zip((0, 2), w, strict=True):
        s = math.sqrt(value.shape[0] / value.shape[1])
        model(torch.ones(1, 12))
        torch.testing.assert_close(model[i].weight.double(), s * polar_reference(value), rtol=1e-3, atol=2e-3)
    assert all(p is originals[name] for name, p in model.named_parameters())
    assert receipt.optimizer is not None
    assert receipt.optimizer.parameters == 4
    alone = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 8)), nn.Linear(8, 2))
    with pytest.raises(ValueError, match="_Orthogonal"):
        fire(alone, scale=3.0, targets="auto")
