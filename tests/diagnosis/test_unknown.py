"""What health does not know it does not call healthy, and what it names can be given to fire."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rekindle.diagnosis.examination import Health, health
from rekindle.diagnosis.verdict import Numbers, Thresholds, judge
from rekindle.measures.matrices import measure
from rekindle.monitoring.monitor import Monitor
from rekindle.projection.firing import fire


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 2))


class TestUnknown:
    def test_a_model_whose_weights_are_not_there(self) -> None:
        with torch.device("meta"):
            model = net()
        found = health(model)
        assert found.verdict == "unknown"
        assert found.verdict.level < 0
        assert not found.verdict.sure
        assert "healthy" not in str(found)
        assert Health.from_dict(found.to_dict()).verdict == "unknown"

    def test_weights_of_one_byte(self) -> None:
        model = net()
        for layer in (model[0], model[2], model[4]):
            layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
        assert health(model).verdict == "unknown"

    def test_one_weight_that_was_read_is_something(self) -> None:
        model = net()
        model[0].weight = nn.Parameter(model[0].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
        assert health(model).verdict.rule.startswith("no sign of lost plasticity in the weights")

    def test_weights_alone_do_not_make_a_network_healthy(self) -> None:
        model, x = net(), torch.randn(64, net()[0].in_features)
        assert health(model).verdict == "unknown"
        assert health(model, reference=model).verdict == "unknown"
        assert health(model, [(x,)]).verdict == "healthy"

    def test_a_sign_is_a_sign_whatever_is_unknown(self) -> None:
        units = {"fc": {"dormant": 0.8}}
        assert judge(Numbers(units=units, unread=3), None, Thresholds()) == "act"
        assert judge(Numbers(units={"fc": {"dormant": 0.0}}, unread=3), None, Thresholds()) == "unknown"
        assert judge(Numbers(units={"fc": {"dormant": 0.0}}), None, Thresholds()) == "healthy"


class TestAgainstABadReference:
    def test_nearly_all_units_dormant_is_not_healthy(self) -> None:
        now, then = ({"fc": {"dormant": share}} for share in (0.95, 0.85))
        verdict = judge(Numbers(units=now), Numbers(units=then), Thresholds())
        assert verdict == "watch"
        assert verdict.findings[0].sign == "dormancy"

    def test_a_vanished_gradient_is_not_healthy(self) -> None:
        now, then = ({"gradient_norm": norm, "loss": 1.0} for norm in (1e-9, 5e-8))
        verdict = judge(Numbers({"w": {}}, whole=now), Numbers({"w": {}}, whole=then), Thresholds())
        assert verdict == "watch"
        assert verdict.findings[0].sign == "gradient"

    def test_the_rule_counts_the_signs(self) -> None:
        now = Numbers({"w": {"effective_rank": 1.0}}, {"fc": {"dormant": 0.5}})
        then = Numbers({"w": {"effective_rank": 9.0}}, {"fc": {"dormant": 0.0}})
        verdict = judge(now, then, Thresholds(signs_to_act=3))
        assert verdict == "watch"
        assert verdict.rule.startswith("2 of 3 signs")


@pytest.mark.parametrize("size", [1e-3, 1e-9, 1e-15, 1e-25, 1e-40, 1e9, 1e18])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_cheap_and_full_agree_on_what_zero_is(size: float, shape: tuple[int, int]) -> None:
    w = size * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    w[0] = 0
    cheap, full = (measure(w, mode=mode) for mode in ("cheap", "full"))  # type: ignore[arg-type]
    for name in ("dead_rows", "dead_columns", "norm", "dfi_scale_free", "participation_rank"):
        assert float(getattr(cheap, name)) == pytest.approx(float(getattr(full, name)), rel=1e-3)


class TestOneNaming:
    def test_units_go_by_the_layer_that_makes_them(self) -> None:
        found = health(net(), [torch.randn(32, 8)])
        assert list(found.units) == ["0", "2"]
        assert [found.about[name]["at"] for name in found.units] == ["1", "3"]

    def test_a_second_activation_of_one_layer_keeps_its_own_name(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                h = self.fc(x)
                return torch.relu(h) + torch.tanh(h)

        assert list(health(Twice(), [torch.randn(8, 4)]).units) == ["fc", "tanh"]

    def test_fire_acts_on_the_layers_that_a_report_names(self) -> None:
        model = net()
        with torch.no_grad():
            model[2].bias.fill_(-100.0)  # every unit of this layer is dead
        report = health(model, [torch.randn(32, 8)])
        assert report.verdict == "act"
        assert report.layers_named() == ["2"]
        receipt = fire(model, targets=report, biases="zero")
        assert receipt.changed == ("2.weight",)
        assert "named by a report (2)" in receipt.settings["targets"]

    def test_a_report_without_findings_names_nothing(self) -> None:
        model = net()
        with pytest.raises(ValueError, match="names no layer"):
            fire(model, targets=health(model))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy])
def test_a_criterion_is_told_what_a_loss_is(loss: object) -> None:
    model, batch = net(), (torch.randn(4, 8), torch.zeros(4, dtype=torch.long))
    with pytest.raises(TypeError, match=r"loss=lambda model, batch"):
        health(model, [batch], loss=loss)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"loss=lambda model, batch"):
        Monitor(model, torch.optim.SGD(model.parameters()), batches=[batch], loss=loss)  # type: ignore[arg-type]


def test_autocast_changes_no_number_of_the_weights() -> None:
    model = net()
    for mode in ("cheap", "full"):
        plain = health(model, mode=mode)  # type: ignore[arg-type]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = health(model, [torch.randn(32, 8)], mode=mode)  # type: ignore[arg-type]
        assert cast.weights == plain.weights
