"""fire(): everything checked first, plans executed exactly, and nothing half-done."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle.projection.execution as execution
from rekindle.projection.execution import execute
from rekindle.projection.firing import fire
from rekindle.projection.method import MethodError
from rekindle.projection.planning import Plan, plan
from small_networks import dfi_reference, mlp, polar_reference, same, state_of, stepped


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_names_the_parameter_and_changes_nothing(bad: float) -> None:
    model = mlp()
    optimizer = stepped(model)
    with torch.no_grad():
        model[4].weight[2, 3] = bad
    before, state = state_of(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"'4\.weight' holds 1 NaN or Inf"):
        fire(model, optimizer)
    after = state_of(model)
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)
    assert str(optimizer.state_dict()) == str(state)
    assert model[0].weight.grad is not None


def test_large_finite_weights_are_not_mistaken_for_inf() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight.fill_(3e37)
        model[0].weight.add_(1e36 * torch.randn(20, 12))
    assert "0.weight" in fire(model).changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": 0.0}, "strength"),
        ({"strength": 1.5}, "strength"),
        ({"measure": "all"}, "measure"),
        ({"biases": "drop"}, "biases"),
        ({"optimizer_state": "old"}, "optimizer_state"),
        ({"solver": "magic"}, "solver"),
        ({"scale": "huge"}, "scale"),
        ({"targets": "nowhere.*"}, "nowhere"),
        ({"solver": {"tol": -1.0}}, "tol"),
    ],
)
def test_options_are_checked_first(options: dict[str, Any], message: str) -> None:
    model = mlp()
    before = state_of(model)
    with pytest.raises((ValueError, KeyError), match=message):
        fire(model, **options)
    assert same(before, state_of(model))


def test_an_optimizer_that_lacks_a_changed_parameter() -> None:
    model = mlp()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"'2\.weight'.*none of the given"):
        fire(model, torch.optim.Adam(model[0].parameters()))
    assert same(before, state_of(model))


def test_a_scale_that_the_dtype_cannot_hold() -> None:
    model = mlp(torch.float16)
    before = state_of(model)
    with pytest.raises(ValueError, match=r"torch\.float16 and cannot hold"):
        fire(model, scale=1e5)
    assert same(before, state_of(model))


def test_zero_matrices_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(6, 10, 3), nn.Conv2d(10, 4, 3), nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[:, :, 1, 1] = 0
        model[2].weight.zero_()
    w = model[0].weight.detach().clone()
    receipt = fire(model, targets="auto", scale="paper")
    assert model[0].weight[:, :, 1, 1].abs().sum() == 0
    assert model[2].weight.abs().sum() == 0
    assert "min_norm" in receipt.skipped["2.weight"]
    assert any("1 matrices of 0.weight are zero" in note for note in receipt.notes)
    record = receipt.records[0]
    assert record.sfe == pytest.approx(float((w - model[0].weight).double().square().sum().detach()), rel=1e-3)
    fire(model, min_norm=0.0, targets="auto", scale="paper")
    assert dfi_reference(model[2].weight, 1.0) < 1e-4


def broken_solve(after: int) -> Any:
    real = execution.solve

    def solve(sources: Any, **options: Any) -> Any:
        for number, item in enumerate(real(sources, **options)):
            if number == after:
                raise torch.linalg.LinAlgError("did not converge")
            yield item

    return solve


def test_a_failure_midway_carries_the_partial_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = stepped(model)
    before = state_of(model)
    monkeypatch.setattr(execution, "solve", broken_solve(2))
    with pytest.raises(MethodError, match="it had changed") as caught:
        fire(model, optimizer)
    changed = caught.value.receipt.changed
    assert len(changed) == 2
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in changed)
        assert (optimizer.state[parameter]["step"] == 0) == (name in changed)
        assert (parameter.grad is None) == (name in changed)


class CountsPerGroup(torch.optim.Optimizer):
    """Keeps Adam's moments per parameter and one step count per group, as some packages do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self.state[parameter] = {name: torch.ones_like(parameter) for name in ("exp_avg", "exp_avg_sq")}


def test_a_failure_midway_is_not_hidden_by_a_second_check_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    weights = [model[i].weight for i in (0, 2, 4)]
    optimizer = CountsPerGroup([{"params": weights}], {})
    optimizer.step()
    monkeypatch.setattr(execution, "solve", broken_solve(2))
    with pytest.raises(MethodError, match="it had changed") as caught:
        fire(model, optimizer, targets="auto")
    changed = caught.value.receipt.changed
    states = {f"{i}.weight": float(optimizer.state[model[i].weight]["exp_avg"].sum()) for i in (0, 2, 4)}
    assert [name for name, total in states.items() if total == 0] == sorted(changed)


def test_a_failure_before_the_first_write_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    before = state_of(model)
    monkeypatch.setattr(execution, "solve", broken_solve(0))
    with pytest.raises(torch.linalg.LinAlgError):
        fire(model)
    assert same(before, state_of(model))


def test_atomic_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mirror = mlp(), mlp(seed=1)
    optimizer = stepped(model, torch.optim.SGD, momentum=0.9, dampening=0.5)
    kept = state_of(model), state_of(mirror), copy.deepcopy(optimizer.state_dict())
    gradients = [p.grad for p in model.parameters()]
    objects = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr(execution, "solve", broken_solve(2))
        with pytest.raises(MethodError, match="put back") as caught:
            fire(model, optimizer, atomic=True, mirrors=mirror, biases="zero")
    assert caught.value.receipt.changed == ()
    with pytest.raises(MethodError, match="put back"):
        fire(
            nn.Sequential(model, nn.BatchNorm1d(3)),
            optimizer,
            atomic=True,
            recalibrate=[torch.ones(4, 5)],
            heads="0.6.*",
        )
    assert same(kept[0], state_of(model))
    assert same(kept[1], state_of(mirror))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(optimizer.state[p]["momentum_buffer"] is o for p, o in zip(model.parameters(), objects, strict=True))
    assert str(optimizer.state_dict()) == str(kept[2])


def test_what_misses_its_tolerance_is_solved_by_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    real = execution.solve

    def poor(sources: Any, **options: Any) -> Any:
        for index, factors, certificate in real(sources, **options):
            bad = torch.zeros_like(certificate.converged)
            yield index, factors * 0.5, dataclasses.replace(certificate, converged=bad)

    monkeypatch.setattr(execution, "solve", poor)
    model = mlp()
    w = model[2].weight.detach().clone()
    receipt = fire(model, targets="auto", scale="paper")
    assert [record.fallback for record in receipt.records] == [1, 1, 1]
    assert all(record.converged for record in receipt.records)
    wanted = math.sqrt(16 / 20) * polar_reference(w)
    torch.testing.assert_close(model[2].weight.detach().double(), wanted, rtol=1e-5, atol=1e-6)

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.linalg.LinAlgError("svd did not converge")

    monkeypatch.setattr(torch.linalg, "svd", fails)
    model = mlp()
    before = state_of(model)
    with pytest.raises(torch.linalg.LinAlgError):
        fire(model, targets="auto", scale="paper")
    assert same(before, state_of(model))


def test_a_plan_is_executed_exactly(tmp_path: Any) -> None:
    model, twin = mlp(), mlp()
    made = plan(model, targets="2.weight", scale="nearest")
    made.save(tmp_path / "plan.json")
    receipt = fire(twin, plan=Plan.load(tmp_path / "plan.json"))
    assert receipt.changed == ("2.weight",)
    fire(model, targets="2.weight", scale="nearest")
    assert same(state_of(model), state_of(twin))
    with pytest.raises(ValueError, match="plan= already holds"):
        fire(model, plan=made, scale="norm")
    wrapped = nn.DataParallel(mlp())
    fire(wrapped, plan=made)
    assert same(state_of(wrapped.module), state_of(twin))
    with pytest.raises((KeyError, ValueError), match=r"2\.weight"):
        fire(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), plan=made)


def test_the_reference_scale_takes_the_initial_norms() -> None:
    model, start = mlp(), mlp(seed=5)
    fire(model, scale="reference", reference=start)
    for i in (0, 2, 4):
        assert model[i].weight.norm().item() == pytest.approx(start[i].weight.norm().item(), rel=1e-3)


def test_any_store_with_read_and_write_will_do() -> None:
    class Tensors:
        def __init__(self, tensors: dict[str, Tensor]) -> None:
            self.tensors = tensors

        def read(self, entry: Any) -> Tensor:
            return self.tensors[entry.name]

        def write(self, entry: Any, block: Any, matrices: Tensor) -> None:
            block.write(self.tensors[entry.name], matrices)

    model = mlp()
    store = Tensors(state_of(model))
    receipt = execute(plan(model, targets="auto"), store)
    fire(model, targets="auto")
    assert receipt.changed == ("0.weight", "2.weight", "4.weight")
    assert same(store.tensors, state_of(model))


def test_recalibration_runs_last_and_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    batches = [torch.randn(16, 12) for _ in range(3)]
    receipt = fire(model, recalibrate=batches)
    assert receipt.recalibrated == ("1",)
    means = torch.stack([model[0](batch).mean(0) for batch in batches]).mean(0)
    torch.testing.assert_close(model[1].running_mean, means.detach(), rtol=1e-4, atol=1e-5)
    receipt = fire(model.eval(), recalibrate=batches)
    assert receipt.recalibrated == ()
    assert any("no BatchNorm" in note for note in receipt.notes)


def _cnn(*, norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for into, out in ((2, 8), (8, 16)):
        layers += [nn.Conv2d(into, out, 3), *([nn.BatchNorm2d(out)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))


@pytest.mark.parametrize("norm", [False, True])
def test_it_warns_where_norms_change_much_and_no_normalization_follows(norm: bool) -> None:
    model = _cnn(norm=norm)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0)
    said = [note for note in fire(model, targets="auto").notes if "no normalization follows" in note]
    assert bool(said) == (not norm)
    if said:
        assert "0.weight" in said[0] or "2.weight" in said[0]
    assert not any("no normalization" in note for note in fire(_cnn(norm=norm), scale="norm", targets="auto").notes)
