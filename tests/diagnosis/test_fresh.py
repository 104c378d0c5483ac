"""Without a reference a network is judged against fresh ones of its class."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import rekindle
from rekindle.diagnosis import fresh as fresh_module

WIDTHS = [(64, 100, 100, 10), (64, 32, 10), (64, 256, 256, 256, 10), (64, 64, 64, 64, 10), (64, 16, 16, 10)]


def mlp(widths: tuple[int, ...], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def batches(seed: int = 0) -> list[torch.Tensor]:
    """Inputs of low rank and all positive, as pictures are: torch's start leaves many units dormant on them."""
    draw = torch.Generator().manual_seed(seed)
    basis = torch.rand(4, 64, generator=draw)
    return [torch.rand(64, 4, generator=draw) @ basis for _ in range(2)]


def test_untrained_networks_are_not_called_tired() -> None:
    """By the absolute rule alone several of these have too many dormant units; at most one of 60 may keep a sign."""
    found = [rekindle.health(mlp(widths, seed), batches()) for widths in WIDTHS for seed in range(12)]
    assert sum(health.fresh is not None for health in found) >= 5  # the absolute rule did fire
    assert sum(health.verdict != "healthy" for health in found) <= 1


@pytest.mark.parametrize("widths", WIDTHS)
def test_dead_units_are_still_found(widths: tuple[int, ...]) -> None:
    net = mlp(widths, 1)
    with torch.no_grad():
        net[0].bias[: int(0.9 * widths[1])] = -1e3
    health = rekindle.health(net, batches())
    assert health.verdict == "act"
    assert "in fresh networks of this class" in str(health)


def test_a_zero_start_is_no_sign_and_a_class_that_cannot_be_drawn_keeps_the_absolute_rules() -> None:
    class Zeros(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)

    born = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Zeros(8, 8), nn.ReLU(), nn.Linear(8, 2))
    health = rekindle.health(born, [torch.randn(32, 8)])
    assert "dead weights" not in {finding.sign for finding in health.verdict.findings}

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.act = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x @ self.weight.T - 100.0)

    health = rekindle.health(Own(), [torch.randn(32, 8)])
    assert health.fresh is None and health.verdict == "act"
    assert "fixed thresholds" in str(health)


def test_drawing_leaves_no_trace_and_is_remembered_for_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    net, data = mlp((64, 64, 10), 0), batches()
    with torch.no_grad():
        net[0].bias.fill_(-1e3)
    weights, state = [p.clone() for p in net.parameters()], torch.get_rng_state()
    first = rekindle.health(net, iter(data))
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    draws = 0
    draw = fresh_module.initial.draw

    def counted(*args: object, **options: object) -> object:
        nonlocal draws
        draws += 1
        return draw(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fresh_module.initial, "draw", counted)
    assert rekindle.health(net, data).fresh == first.fresh and draws == 0
    rekindle.health(net, batches(1))
    assert draws == fresh_module.DRAWS
    assert rekindle.diagnosis.results.Health.from_dict(first.to_dict()).verdict == first.verdict
