"""Inputs and surroundings that used to crash fire half-way, or to make it say what is not so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rekindle.engine.isometry import polar
from rekindle.projection.firing import fire
from rekindle.projection.planning import plan
from small_networks import dfi_reference, mlp, polar_reference, same, state_of


class TestSurroundings:
    def test_autocast_changes_neither_weights_nor_certificates(self) -> None:
        plain, cast = mlp(), mlp()
        wanted = fire(plain)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = fire(cast)
        assert same(state_of(plain), state_of(cast))
        for one, other in zip(wanted.records, found.records, strict=True):
            assert one == other

    def test_polar_under_autocast_is_the_polar_factor(self) -> None:
        w = torch.randn(60, 90, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q, certificate = polar(w, certificate=True)
        true = float(dfi_reference(q, 1.0)) / 60
        assert true <= 1e-6
        assert float(certificate.residual) == pytest.approx(true, abs=1e-9)
        torch.testing.assert_close(q.double(), polar_reference(w), rtol=1e-3, atol=1e-3)

    def test_plan_measures_the_same_under_autocast(self) -> None:
        model = mlp()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = plan(model)
        assert cast == plan(model)

    def test_a_default_device_of_another_kind_does_no_harm(self) -> None:
        plain, other = mlp(), mlp()
        fire(plain, biases="zero")
        torch.set_default_device("meta")
        try:
            fire(other, biases="zero")
            assert torch.get_default_device() == torch.device("meta")
        finally:
            torch.set_default_device(None)  # a device would leave its mode behind
        assert same(state_of(plain), state_of(other))

    def test_forward_passes_keep_the_callers_default_device(self) -> None:
        seen = []
        model = mlp()
        model.register_forward_pre_hook(lambda module, args: seen.append(torch.get_default_device().type))
        with torch.device("meta"):
            fire(model, drift=[torch.ones(2, 12, device="cpu")])
        assert seen == ["meta", "meta"]


class TestCheckedBeforeTheFirstWrite:
    def test_an_expanded_weight(self) -> None:
        model = mlp()
        model[2].weight.data = torch.ones(1, 20).expand(16, 20)
        before = state_of(model)
        with pytest.raises(ValueError, match=r"'2\.weight' is an expanded tensor"):
            fire(model)
        assert same(before, state_of(model))

    def test_a_weight_of_inference_mode(self) -> None:
        model = mlp()
        with torch.inference_mode():
            model[2].weight = nn.Parameter(torch.randn(16, 20), requires_grad=False)
        before = state_of(model)
        with pytest.raises(ValueError, match=r"'2\.weight' was made under torch.inference_mode"):
            fire(model, include="2.weight")
        assert same(before, state_of(model))
        with torch.inference_mode():
            assert "2.weight" in fire(model, include="2.weight").changed

    def test_an_expanded_bias_that_would_be_zeroed(self) -> None:
        model = mlp()
        model[2].bias.data = torch.ones(1).expand(16)
        before = state_of(model)
        with pytest.raises(ValueError, match=r"the bias of 2\.weight"):
            fire(model, biases="zero")
        assert same(before, state_of(model))

    def test_a_sparse_parameter_of_equal_size_is_no_tie(self) -> None:
        model = mlp()
        model.register_parameter("mask", nn.Parameter(torch.eye(16, 20).to_sparse()))
        assert fire(model, targets="auto").changed == ("0.weight", "2.weight", "4.weight")


class TestMessages:
    def test_a_state_dict_is_told_where_to_go(self) -> None:
        with pytest.raises(TypeError, match=r"got a state dict.*fire_file"):
            fire(mlp().state_dict())  # type: ignore[arg-type]

    def test_a_wrong_keyword_names_fire_and_the_right_one(self) -> None:
        model = mlp()
        with pytest.raises(TypeError, match=r"fire\(\) got an unexpected keyword argument 'optimiser'.*'optimizer'"):
            fire(model, optimiser=None)

    def test_mlp_on_a_plain_mlp_means_its_layers(self) -> None:
        assert fire(mlp(), targets="mlp").changed == ("0.weight", "2.weight", "4.weight")


class TestReceipt:
    def test_zeroed_biases_are_not_said_to_be_skipped(self) -> None:
        receipt = fire(mlp(), biases="zero", targets="auto")
        assert receipt.biases_zeroed == 3
        assert [name for name in receipt.skipped if name.endswith("bias")] == ["6.bias"]
        assert "1 × bias" in str(receipt)

    def test_it_says_how_far_outputs_moved(self) -> None:
        model = mlp()
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
        model.eval()
        before = model(x).detach()
        receipt = fire(model, drift=[x])
        wanted = float((model(x).detach() - before).norm() / before.norm())
        assert receipt.outputs_moved == pytest.approx(wanted, rel=1e-5)
        assert "outputs moved by" in str(receipt)
        assert receipt.to_dict()["outputs_moved"] == receipt.outputs_moved
        assert fire(mlp()).outputs_moved is None


def test_a_parametrized_weight_is_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import rekindle.projection.execution as execution

    real, sizes = execution.solve, []

    def counted(sources: Any, **options: Any) -> Any:
        sizes.append(len(sources))
        return real(sources, **options)

    monkeypatch.setattr(execution, "solve", counted)
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[2])
    w = model[2].weight.detach().clone()
    receipt = fire(model, targets="auto")
    assert receipt.changed == ("0.weight", "2.weight", "4.weight")
    assert sum(sizes) == 3
    torch.testing.assert_close(model[2].weight.double(), (16 / 20) ** 0.5 * polar_reference(w), rtol=1e-3, atol=1e-3)


def test_the_spectral_norm_of_a_zero_matrix_is_zero() -> None:
    for shape in ((4, 6), (40, 60), (300, 300)):
        _, certificate = polar(torch.zeros(shape), certificate=True)
        assert float(certificate.spectral_norm) == 0
