"""Parametrized weights: written through their originals in place, or refused with the reason."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from rekindle.blocks import parametrized
from rekindle.blocks.finding import find
from rekindle.projection.planning import plan


def old_weight_norm(layer: nn.Module, dim: int | None = 0) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer, dim=dim)  # type: ignore[arg-type]


Wrap = Callable[[nn.Module], nn.Module]
WRAPS: dict[str, Wrap] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm_whole": lambda m: parametrizations.weight_norm(m, dim=None),  # type: ignore[arg-type]
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "cayley": lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley"),
    "householder": lambda m: parametrizations.orthogonal(m, orthogonal_map="householder"),
    "old_weight_norm": old_weight_norm,
    "old_weight_norm_whole": lambda m: old_weight_norm(m, None),
    "old_spectral_norm": nn.utils.spectral_norm,
}
SHAPES = [(6, 6), (6, 4), (4, 6)]


def isometry(out: int, in_: int) -> Tensor:
    q, _ = torch.linalg.qr(torch.randn(max(out, in_), min(out, in_), generator=torch.Generator().manual_seed(2)))
    return q if out >= in_ else q.mT.contiguous()


def layer_of(name: str, shape: tuple[int, int]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return WRAPS[name](nn.Linear(shape[1], shape[0], bias=False))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", WRAPS)
def test_an_isometry_at_scale_one_is_what_the_layer_computes_afterwards(
    name: str, shape: tuple[int, int], training: bool
) -> None:
    layer = layer_of(name, shape).train(training)
    held = parametrized.originals(layer, "weight")
    identity = [(id(p), p.data_ptr()) for p in held]
    value = isometry(*shape)
    assert parametrized.trial(layer, "weight", value) is None
    parametrized.write(layer, "weight", value)
    assert [(id(p), p.data_ptr()) for p in parametrized.originals(layer, "weight")] == identity
    assert torch.allclose(parametrized.read(layer, "weight"), value, atol=1e-5)
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(5))
    assert torch.allclose(layer(x), x @ value.mT, atol=1e-4)
    assert torch.allclose(layer.eval()(x), x @ value.mT, atol=1e-4)
    layer.train()(x).square().sum().backward()
    assert all(p.grad is not None for p in held)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", WRAPS)
def test_another_scale_is_refused_where_it_would_be_lost(name: str, shape: tuple[int, int]) -> None:
    layer = layer_of(name, shape)
    reason = parametrized.trial(layer, "weight", 2 * isometry(*shape))
    if "weight_norm" in name:
        assert reason is None
    else:
        assert reason is not None
        assert "parametrized by" in reason
        assert "50% off" in reason or "cannot be inverted" in reason


@pytest.mark.parametrize("name", WRAPS)
def test_reading_and_trying_change_nothing(name: str) -> None:
    layer = layer_of(name, (5, 4)).train()
    before = copy.deepcopy(dict(layer.state_dict()))
    for value in (isometry(5, 4), 3 * isometry(5, 4)):
        parametrized.trial(layer, "weight", value)
        parametrized.read(layer, "weight")
    after = layer.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert layer.training


def test_no_right_inverse_is_refused() -> None:
    class Squashed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Squashed())
    reason = parametrized.trial(layer, "weight", torch.eye(3))
    assert reason == "parametrized by Squashed, which cannot be inverted (Squashed has no right_inverse)"


def test_a_plain_weight_is_written_as_it_is() -> None:
    layer = nn.Linear(3, 3)
    assert not parametrized.is_parametrized(layer, "weight")
    assert parametrized.trial(layer, "weight", torch.eye(3)) is None
    parametrized.write(layer, "weight", torch.eye(3))
    assert torch.equal(layer.weight, torch.eye(3))
    assert parametrized.originals(layer, "weight") == [layer.weight]


@pytest.mark.parametrize("name", WRAPS)
def test_a_plan_sees_the_weight_behind_the_originals(name: str) -> None:
    model = nn.Sequential(layer_of(name, (6, 4)), nn.ReLU(), nn.Linear(6, 2))
    first = find(model)[0]
    assert (first.name, first.shape, first.parametrized) == ("0.weight", (6, 4), True)
    assert first.key in dict(model.named_parameters())
    others = [f for f in find(model)[1:] if f.name.startswith("0.")]
    assert all("written through it" in str(f.reason) for f in others)
    # √(6/4) ≠ 1, so only weight norm can hold the paper's scale; scale 1 suits all.
    drawn = plan(model, include="2.weight")
    assert (drawn.entries[0].reason is None) == ("weight_norm" in name)
    assert "parametriz" in drawn.table(width=200)
    assert plan(model, scale=1.0).entries[0].reason is None


def test_a_frozen_original_marks_the_weight() -> None:
    model = nn.Sequential(layer_of("weight_norm", (6, 4)), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    assert find(model)[0].reason == "frozen"


def test_half_precision_reads_back_within_its_own_rounding() -> None:
    layer = parametrizations.weight_norm(nn.Linear(16, 16, bias=False)).to(torch.bfloat16)
    assert parametrized.trial(layer, "weight", isometry(16, 16).to(torch.bfloat16)) is None


def test_only_some_of_several_weights_are_parametrized() -> None:
    model = nn.LSTM(4, 4)
    parametrize.register_parametrization(model, "weight_hh_l0", parametrizations._WeightNorm())
    found = {f.name: f for f in find(model)}
    assert found["weight_hh_l0"].parametrized
    assert found["weight_hh_l0"].count == 4
    assert not found["weight_ih_l0"].parametrized


def test_a_parametrized_layer_that_is_used_twice_is_treated_once() -> None:
    layer = layer_of("weight_norm", (4, 4))
    found = find(nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 2)))
    assert [f.name for f in found if f.blocks] == ["0.weight", "3.weight"]
    assert next(f for f in found if f.name == "2.weight").reason == "tied to 0.weight, treated there"
