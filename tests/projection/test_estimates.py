"""DfI of very large models is estimated from products with random vectors, and says so."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.blocks.layouts import matrices
from rekindle.projection import measuring
from rekindle.projection.measuring import look


def _matrix(kind: str, out: int, in_: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(out, in_, generator=generator) / math.sqrt(max(out, in_))
    u, _, v = torch.linalg.svd(noise, full_matrices=False)
    k = min(out, in_)
    values = {
        "isometry": torch.ones(k),
        "decaying": torch.arange(1, k + 1).float().reciprocal(),
        "outlier": torch.ones(k).index_fill(0, torch.tensor([0]), 40.0),
        "one direction": torch.zeros(k).index_fill(0, torch.tensor([0]), 3.0),
    }
    return noise if kind == "noise" else u * values[kind] @ v


@pytest.mark.parametrize(("out", "in_"), [(300, 300), (300, 500), (500, 300)])
@pytest.mark.parametrize("kind", ["noise", "decaying", "outlier", "one direction", "isometry"])
@pytest.mark.parametrize("scale", [1.0, None])
def test_an_estimate_is_near_the_exact_value(kind: str, out: int, in_: int, scale: float | None) -> None:
    """Its standard error is √(2/32) times the root of Σλ⁴/(Σλ²)² of what random signs see: about 2 % for noise."""
    weight = _matrix(kind, out, in_)
    block = matrices("out in")((out, in_))[0]
    norm, dfi, free = look(block, weight, scale)
    near_norm, near, near_free = look(block, weight, scale, estimate=True)
    assert near_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    assert near == pytest.approx(dfi, rel=0.1, abs=1e-6)
    assert near_free == pytest.approx(free, rel=0.1, abs=1e-6)


def test_what_is_not_finite_or_zero() -> None:
    block = matrices("out in")((64, 64))[0]
    assert look(block, torch.zeros(64, 64), 1.0, estimate=True)[1:] == pytest.approx((64, 64))
    assert math.isnan(look(block, torch.full((64, 64), math.nan), 1.0, estimate=True)[1] or 0.0)


def test_a_plan_marks_its_estimates_and_can_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 2))
    exact = rekindle.plan(model, targets="auto")
    assert not any(entry.estimated for entry in exact.entries)
    monkeypatch.setattr(measuring, "_EXACT", 1e3)
    monkeypatch.setattr(measuring, "_LARGE", 64)
    rough = rekindle.plan(model, targets="auto")
    assert [entry.estimated for entry in rough.selected] == [True, True]
    assert "≈" in str(rough)
    assert "≈" not in str(rekindle.plan(model, measure="full", targets="auto"))
    assert [e.dfi for e in rekindle.plan(model, measure="full", targets="auto").entries] == [
        e.dfi for e in exact.entries
    ]
    for near, true in zip(rough.selected, exact.selected, strict=True):
        assert near.dfi_now == pytest.approx(true.dfi_now, rel=0.3)


def test_estimates_touch_no_random_state() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    block = matrices("out in")((64, 64))[0]
    first = look(block, torch.eye(64), 2.0, estimate=True)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert look(block, torch.eye(64), 2.0, estimate=True)[1:] == first[1:]
