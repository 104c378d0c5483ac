"""UPGD beside a plain loop in float64, with the divisor of the paper and with that of its authors' code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rekindle.methods import UPGD


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def reference(beta: float, steps: int, data: Tensor, corrected: bool) -> list[Tensor]:
    model = network()
    weights = list(model.parameters())
    utilities = [torch.zeros_like(weight) for weight in weights]
    for step in range(1, steps + 1):
        gradients = torch.autograd.grad(model(data).square().mean(), weights)
        utilities = [beta * u - (1 - beta) * g * w for u, g, w in zip(utilities, gradients, weights, strict=True)]
        top = max(u.max() for u in utilities) / (1 - beta**step if corrected else 1)
        with torch.no_grad():
            for weight, gradient, utility in zip(weights, gradients, utilities, strict=True):
                weight -= 0.1 * gradient * (1 - torch.sigmoid(utility / (1 - beta**step) / top))
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999])
def test_gates_are_those_of_the_largest_corrected_utility(beta: float) -> None:
    data = torch.randn(16, 3, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    model = network()
    optimizer, method = torch.optim.SGD(model.parameters(), lr=0.1), UPGD(sigma=0.0, beta_utility=beta)
    for _ in range(20):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        method(model, optimizer)
        optimizer.step()
    ours = [weight.detach() for weight in model.parameters()]
    papers, authors = (reference(beta, 20, data, corrected) for corrected in (True, False))
    close = [
        all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(ours, x, strict=True)) for x in (papers, authors)
    ]
    assert close == [True, beta == 0]
