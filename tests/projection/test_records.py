"""What the receipt says of a change is what a float64 reference measures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from rekindle.projection.firing import fire
from small_networks import dfi_reference, mlp, polar_reference, state_of

SCALES: dict[Any, Any] = {
    "paper": lambda w: math.sqrt(w.shape[0] / w.shape[1]),
    "nearest": lambda w: float(torch.linalg.svdvals(w.double()).mean()),
    "norm": lambda w: float(w.double().norm()) / math.sqrt(min(w.shape)),
    "fan_in": lambda w: math.sqrt(w.shape[1]),
    0.5: lambda w: 0.5,
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("strength", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_and_receipt_agree_with_the_float64_reference(scale: Any, strength: float, dtype: torch.dtype) -> None:
    model = mlp(dtype)
    before = state_of(model)
    receipt = fire(model, scale=scale, strength=strength, targets="auto")
    assert receipt.changed == ("0.weight", "2.weight", "4.weight")
    tolerance = {torch.float32: 2e-3, torch.float64: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for record in receipt.records:
        w, now = before[record.name], model.state_dict()[record.name]
        s = SCALES[scale](w)
        wanted = (1 - strength) * w.double() + strength * s * polar_reference(w)
        assert now.dtype == dtype
        torch.testing.assert_close(now.double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
        close = {"rel": 3e-3 if dtype != torch.bfloat16 else 2e-2}
        assert record.scale == pytest.approx(s, **close)
        assert record.dfi_before == pytest.approx(dfi_reference(w, s), rel=2e-3, abs=1e-3)
        assert record.dfi_after == pytest.approx(dfi_reference(now, s), rel=1e-2, abs=2e-5)
        k = min(w.shape)
        assert record.residual_stored == pytest.approx(dfi_reference(now, s) / k, rel=1e-2, abs=1e-6)
        assert record.sfe == pytest.approx(float((w.double() - now.double()).square().sum()), **close)
        assert record.sfe_relative == pytest.approx(record.sfe / float(w.double().square().sum()), rel=1e-3)
        assert record.norm_before == pytest.approx(float(w.double().norm()), rel=1e-4)
        assert record.norm_after == pytest.approx(float(now.double().norm()), rel=1e-3)
        # a power iteration from below, documented as a few percent
        assert record.spectral_before == pytest.approx(float(torch.linalg.svdvals(w.double())[0]), rel=0.06)
        assert record.spectral_after == pytest.approx(float(torch.linalg.svdvals(now.double())[0]), rel=0.06)
        assert record.residual is not None
        assert record.residual <= 1e-6
        assert record.converged
    untouched = {name: value for name, value in before.items() if name not in receipt.changed}
    assert all(torch.equal(model.state_dict()[name], value) for name, value in untouched.items())


def test_full_measures_add_exact_spectra_and_ranks() -> None:
    model = mlp()
    before = state_of(model)
    receipt = fire(model, measure="full")
    for record in receipt.records:
        w, now = before[record.name].double(), model.state_dict()[record.name].double()
        assert record.spectral_before == pytest.approx(float(torch.linalg.svdvals(w)[0]), rel=1e-9)
        assert record.sfe == pytest.approx(float((w - now).square().sum()), rel=1e-9)
        assert record.dfi_before == pytest.approx(dfi_reference(w, record.scale or 0), rel=1e-5)
        assert record.dfi_after == pytest.approx(dfi_reference(now, record.scale or 0), rel=1e-5, abs=1e-12)
        spectrum = record.values["spectrum_before"]
        torch.testing.assert_close(torch.tensor(spectrum)[0].double(), torch.linalg.svdvals(w), rtol=1e-6, atol=1e-7)
        assert record.values["effective_rank_after"] == pytest.approx(min(w.shape), rel=1e-3)
        assert record.dfi_free_after == pytest.approx(0, abs=1e-5)
    assert receipt.to_json()


def test_none_measures_nothing_but_keeps_the_certificate() -> None:
    record = fire(mlp(), measure="none").records[0]
    assert record.dfi_before is None
    assert record.sfe is None
    assert record.residual is not None
    assert record.residual <= 1e-6


def test_a_convolution_is_measured_over_all_its_taps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 10, 3), nn.Conv2d(10, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    w = model[0].weight.detach().clone()
    record = fire(model, targets="auto", scale="paper").records[0]
    s = math.sqrt(10 / 6) / 9
    taps = [w[:, :, i, j] for i in range(3) for j in range(3)]
    assert (record.count, record.out, record.in_) == (9, 10, 6)
    assert record.dfi_before == pytest.approx(sum(dfi_reference(tap, s) for tap in taps), rel=1e-4)
    wanted = sum(float((tap.double() - s * polar_reference(tap)).square().sum()) for tap in taps)
    assert record.sfe == pytest.approx(wanted, rel=1e-4)
    for i in range(3):
        for j in range(3):
            got = model[0].weight.detach()[:, :, i, j].double()
            torch.testing.assert_close(got, s * polar_reference(w[:, :, i, j]), rtol=1e-3, atol=1e-4)


def test_twice_is_once() -> None:
    model = mlp()
    fire(model)
    once = state_of(model)
    receipt = fire(model)
    assert (receipt.totals()["sfe_relative"] or 0) < 1e-5
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, once[name], rtol=1e-3, atol=1e-3)
