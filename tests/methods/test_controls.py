"""The controls: each differs from FIRE, or from a reset, in exactly one thing."""

import pytest
import torch
from torch import nn

import zoo_models
from rekindle.blocks.finding import find
from rekindle.initial import draw
from rekindle.methods import FIRE, FreshAtNorm, Gaussian, RandomIsometry, Rescale
from rekindle.projection.planning import plan


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 2)
    ).double()


def blocks(model):
    selected = {e.name: e.blocks for e in plan(model).selected}
    parameters = dict(model.named_parameters())
    return {(n, i): b.read(parameters[n]).clone() for n, bs in selected.items() for i, b in enumerate(bs)}


@pytest.mark.parametrize("scale", ["paper", "nearest", "norm", 0.7])
def test_random_isometry_is_an_isometry_at_fires_scale_and_far_from_the_old_weights(scale):
    model, fired = net(), net()
    old = blocks(model)
    RandomIsometry(scale)(model)
    FIRE(scale=scale)(fired)
    for key, mine, theirs in zip(old, blocks(model).values(), blocks(fired).values(), strict=True):
        for q, nearest, w in zip(mine, theirs, old[key], strict=True):
            values = torch.linalg.svdvals(q)
            torch.testing.assert_close(values, torch.linalg.svdvals(nearest), rtol=1e-5, atol=1e-8)
            assert values.max() - values.min() < 1e-6 * values.max()
            if min(w.shape) > 2:
                assert (q - w).norm() > (nearest - w).norm()  # FIRE's is the nearest


@pytest.mark.parametrize("scale", ["paper", "nearest", 0.7])
def test_rescale_has_fires_norm_and_the_old_direction(scale):
    model, fired = net(), net()
    old = blocks(model)
    Rescale(scale)(model)
    FIRE(scale=scale)(fired)
    for key, mine, theirs in zip(old, blocks(model).values(), blocks(fired).values(), strict=True):
        for w, new, nearest in zip(old[key], mine, theirs, strict=True):
            torch.testing.assert_close(new / new.norm(), w / w.norm())
            assert new.norm().item() == pytest.approx(nearest.norm().item(), rel=1e-5)


def test_fresh_at_norm_is_a_draw_with_the_old_norm_of_each_matrix():
    model = net()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    old = blocks(model)
    start = draw(model, generator=torch.Generator().manual_seed(2))
    FreshAtNorm()(model, generator=torch.Generator().manual_seed(2))
    selected = {e.name: e.blocks for e in plan(model).selected}
    for (name, index), new in blocks(model).items():
        drawn = selected[name][index].read(start[name])
        for w, d, n in zip(old[name, index], drawn, new, strict=True):
            torch.testing.assert_close(n, d * w.norm() / d.norm())


@pytest.mark.parametrize("make", [RandomIsometry, Rescale, FreshAtNorm])
def test_controls_touch_what_fire_touches_and_leave_zero_matrices(make):
    model = zoo_models.build("gpt2")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.weight.zero_()
    receipt = make()(model)
    assert set(receipt.changed) == {e.name for e in plan(zoo_models.build("gpt2")).selected}
    assert model.transformer.h[0].mlp.c_proj.weight.abs().max() == 0
    parts = [r.part for r in receipt.records if "c_attn" in r.name]
    assert parts == ["query", "key", "value"] * 2
    assert all(f.role != "embedding" for f in find(model) if f.name in receipt.changed)


def test_rescaling_to_a_part_of_the_old_norm_leaves_directions_alone() -> None:
    """The control of remedies that shrink weights in front of a normalization: the norm and nothing else."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    x = torch.randn(8, 3, 3, 3)
    was = model(x)
    Rescale(scale="norm:0.1", targets="auto")(model)
    torch.testing.assert_close(model[0].weight.detach(), before * 0.1)
    torch.testing.assert_close(model(x), was, atol=5e-3, rtol=0)


@pytest.mark.parametrize("scale", ["paper", "norm", "init:kaiming"])
def test_gaussian_matrices_have_fires_norm_on_average_and_new_entries(scale):
    model, fired = net(), net()
    Gaussian(scale)(model)
    FIRE(scale=scale)(fired)
    for mine, theirs in zip(blocks(model).values(), blocks(fired).values(), strict=True):
        if mine.numel() > 100:
            assert mine.norm().item() == pytest.approx(theirs.norm().item(), rel=0.25)
            assert mine.mean().abs() < 4 * mine.std() / mine.numel() ** 0.5
    wide = nn.Sequential(nn.Linear(100, 400), nn.ReLU(), nn.Linear(400, 2))
    Gaussian("init:kaiming", targets="layers")(wide)
    assert wide[0].weight.std().item() == pytest.approx((2 / 100) ** 0.5, rel=0.02)
    assert wide[2].weight.std().item() == pytest.approx((2 / 400) ** 0.5, rel=0.15)
