"""A small network to fire at, and the formulas in plain float64, for the tests of the verb."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def polar_reference(w: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(w.detach().double(), full_matrices=False)
    return u @ vh


def dfi_reference(w: Tensor, s: float) -> float:
    x = w.detach().double() / s
    small = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
    return float((small - torch.eye(len(small), dtype=torch.float64)).square().sum())


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [
        nn.Linear(12, 20),
        nn.ReLU(),
        nn.Linear(20, 16),
        nn.ReLU(),
        nn.Linear(16, 24),
        nn.ReLU(),
        nn.Linear(24, 3),
    ]
    return nn.Sequential(*layers).to(dtype)


def stepped(model: nn.Module, cls: Any = torch.optim.Adam, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = cls(model.parameters(), lr=1e-3, **options)
    inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(1)).to(next(model.parameters()).dtype)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
    return optimizer


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
