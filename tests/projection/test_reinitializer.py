"""The object form: validated settings, a weight that is really written, a decision, and honest stats."""

from __future__ import annotations

import dataclasses
import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rekindle.projection.reinitializer import FIREConfig, FIREReinitializer, ReinitStats

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("guide_*.py"))


def polar_reference(weight: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(weight.double(), full_matrices=False)
    return u @ vh


def dfi(q: Tensor) -> float:
    q = q.double()
    small = q @ q.T if q.shape[0] <= q.shape[1] else q.T @ q
    return float((small - torch.eye(len(small), dtype=torch.float64)).square().sum())


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_defaults_are_the_guides() -> None:
    config = FIREConfig()
    assert (config.target_dfi, config.newton_schulz_iters, config.variance_factor, config.min_weight_norm) == (
        1e-5,
        8,
        1.0,
        1e-3,
    )
    assert FIREConfig(1e-3, 5, 0.9, 1e-4).variance_factor == 0.9


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("target_dfi", 1e-6, 1e-2),
        ("target_sfe", 1e-6, 1e-2),
        ("newton_schulz_iters", 3, 15),
        ("variance_factor", 0.5, 1.5),
        ("min_weight_norm", 1e-5, 1e-2),
    ],
)
def test_ranges_are_validated(name: str, low: float, high: float) -> None:
    step = 1 if isinstance(low, int) else low / 10
    for value in (low, high):
        FIREConfig(**{name: value})  # type: ignore[arg-type]
    for value in (low - step, high + step, math.nan):
        with pytest.raises(ValueError, match="is outside"):
            FIREConfig(**{name: value})  # type: ignore[arg-type]


def test_target_sfe_is_another_name_for_target_dfi() -> None:
    assert FIREConfig(target_sfe=1e-3).target_dfi == FIREConfig(target_dfi=1e-3).target_sfe == 1e-3
    assert FIREConfig(target_sfe=1e-3) == FIREConfig(target_dfi=1e-3)
    with pytest.raises(ValueError, match="two names"):
        FIREConfig(target_dfi=1e-3, target_sfe=1e-4)
    assert dataclasses.replace(FIREConfig(target_sfe=1e-3), variance_factor=0.8).target_dfi == 1e-3


@pytest.mark.parametrize(
    "bad", [{"scale": "norm"}, {"solver": "magic"}, {"max_condition": 0.0}, {"min_gradient": -1.0}]
)
def test_other_settings_are_checked_too(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        FIREConfig(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(16, 16), (12, 40), (40, 12), (1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("target", [1e-2, 1e-5, 1e-6])
def test_the_weight_is_written_to_the_target(shape: tuple[int, int], dtype: torch.dtype, target: float) -> None:
    weight = torch.nn.Parameter(draw(*shape).to(dtype))
    before, place = weight.detach().clone(), weight.data_ptr()
    stats = FIREReinitializer(FIREConfig(target_dfi=target)).reinitialize(weight)
    scale = math.sqrt(shape[1])
    assert weight.data_ptr() == place
    assert weight.dtype == dtype
    assert stats.was_reinitialized
    assert stats.is_successful() == (stats.orthogonality_error < 1e-3)
    assert stats.orthogonality_error <= target
    assert dfi(weight.detach() / scale) <= target * 1.01 + 1e-9
    # the distance to the polar factor is at most about √DfI
    error = (weight.detach().double() / scale - polar_reference(before)).norm()
    assert error <= math.sqrt(target) + 1e-4
    assert stats.initial_norm == pytest.approx(float(before.norm()), rel=1e-5)
    assert stats.final_norm == pytest.approx(float(weight.detach().norm()), rel=1e-5)
    assert stats.norm_preservation() == pytest.approx(stats.final_norm / stats.initial_norm)


def test_the_paper_solver_takes_the_given_steps_and_admits_that_they_are_too_few() -> None:
    weight = draw(16, 16)
    x = weight.double() / weight.double().norm()
    for _ in range(8):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    stats = FIREReinitializer(FIREConfig(solver="paper")).reinitialize(weight)
    torch.testing.assert_close(weight.double(), 4 * x, rtol=1e-4, atol=1e-4)
    assert stats.orthogonality_error == pytest.approx(dfi(x), rel=1e-3)
    assert stats.orthogonality_error > 0.1
    assert stats.iterations_used == 8
    assert not stats.is_successful()


def test_the_papers_scale_and_the_variance_factor() -> None:
    weight, other = draw(32, 8), draw(32, 8)
    FIREReinitializer(FIREConfig(scale="paper", variance_factor=0.5)).reinitialize(weight)
    torch.testing.assert_close(weight.double(), polar_reference(draw(32, 8)) * 2 * 0.5, rtol=1e-3, atol=1e-3)
    FIREReinitializer(FIREConfig(variance_factor=1.5)).reinitialize(other)
    torch.testing.assert_close(other.norm().item(), 1.5 * math.sqrt(8) * math.sqrt(8), rtol=1e-3, atol=0)


def test_a_small_weight_is_left_alone() -> None:
    weight = draw(4, 4) * 1e-5
    before = weight.clone()
    stats = FIREReinitializer().reinitialize(weight)
    assert not stats.was_reinitialized
    assert not stats.is_successful()
    assert torch.equal(weight, before)
    assert FIREReinitializer(FIREConfig(min_weight_norm=1e-5)).reinitialize(weight).was_reinitialized


def test_should_reinitialize() -> None:
    fire = FIREReinitializer()
    healthy, gradient = draw(32, 64), draw(32, 64, seed=1)
    assert not fire.should_reinitialize(healthy)
    assert not fire.should_reinitialize(healthy, gradient)
    assert fire.should_reinitialize(healthy, torch.zeros(32, 64))
    assert fire.should_reinitialize(healthy, gradient * 1e-9)
    assert not fire.should_reinitialize(healthy * 1e-6, torch.zeros(32, 64))
    dead = healthy.clone()
    dead[3] = 0
    assert fire.should_reinitialize(dead)
    spiked = healthy + 20 * torch.outer(draw(32, seed=2), draw(64, seed=3))
    assert fire.should_reinitialize(spiked)
    lenient = FIREReinitializer(FIREConfig(max_condition=1e12, max_deviation=1e6, min_gradient=1e-30))
    assert not lenient.should_reinitialize(spiked, gradient * 1e-9)


def test_after_reinitialize_there_is_nothing_left_to_do() -> None:
    fire = FIREReinitializer()
    weight = draw(32, 64) + 20 * torch.outer(draw(32, seed=2), draw(64, seed=3))
    assert fire.should_reinitialize(weight)
    fire.reinitialize(weight)
    assert not fire.should_reinitialize(weight)


def test_the_optimizer_starts_afresh_for_this_weight() -> None:
    layer, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam([*layer.parameters(), *other.parameters()])
    other(layer(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    FIREReinitializer().reinitialize(layer.weight, optimizer=optimizer)
    assert optimizer.state[layer.weight]["step"] == 0
    assert optimizer.state[other.weight]["step"] == 1
    with pytest.raises(TypeError, match="Parameter"):
        FIREReinitializer().reinitialize(torch.eye(3), optimizer=optimizer)
    stray = torch.nn.Parameter(torch.eye(3) * 2)
    with pytest.raises(ValueError, match="none of the given optimizers"):
        FIREReinitializer().reinitialize(stray, optimizer=optimizer)
    assert torch.equal(stray, torch.eye(3) * 2)


@pytest.mark.parametrize(
    "bad", [torch.zeros(2, 2, 3), torch.zeros(3), torch.eye(3).long(), torch.full((2, 2), math.nan)]
)
def test_what_is_no_finite_matrix_is_refused(bad: Tensor) -> None:
    fire = FIREReinitializer()
    with pytest.raises(ValueError, match=r"shape"):
        fire.reinitialize(bad)
    with pytest.raises(ValueError, match=r"shape"):
        fire.should_reinitialize(bad)


def test_stats_of_a_zero_weight() -> None:
    stats = ReinitStats(False, 0.0, 0.0, math.nan, 0)
    assert math.isnan(stats.norm_preservation())
    assert stats.to_dict()["successful"] is False


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_run(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    names = runpy.run_path(str(example))
    names["main"]()
    assert "accuracy" in capsys.readouterr().out


def test_there_are_four_examples() -> None:
    assert len(EXAMPLES) == 4
