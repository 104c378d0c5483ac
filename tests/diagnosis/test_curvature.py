"""The Hessian's largest eigenvalue against the whole Hessian, and what does not count as converged."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from known_units import draw
from rekindle.diagnosis.curvature import hessian_eigenvalue


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_hessian_eigenvalue_against_the_whole_hessian(sign: float) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    batches = [
        (draw(12, 3).double(), draw(12, 2, seed=1).double()),
        (draw(12, 3, seed=2).double(), draw(12, 2).double()),
    ]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return sign * F.mse_loss(model(batch[0]), batch[1])

    names = [name for name, _ in net.named_parameters()]
    shapes = [p.shape for p in net.parameters()]

    def whole(flat: Tensor) -> Tensor:
        parts = flat.split([s.numel() for s in shapes])
        given = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        outputs = [F.mse_loss(torch.func.functional_call(net, given, x), y) for x, y in batches]
        return sign * sum(outputs) / 2

    start = torch.cat([p.detach().flatten() for p in net.parameters()])
    values = torch.linalg.eigvalsh(torch.autograd.functional.hessian(whole, start))
    expected = max(values.tolist(), key=abs)
    found = hessian_eigenvalue(net, batches, loss, steps=2000, tol=1e-5)
    assert found.converged
    assert found.value == pytest.approx(expected, rel=1e-6)
    assert (found.value < 0) == (sign < 0)
    short = hessian_eigenvalue(net, batches, loss, steps=1, tol=1e-9)
    assert not short.converged
    assert short.steps == 1


def test_opposite_eigenvalues_are_not_called_converged() -> None:
    saddle = nn.Linear(2, 1, bias=False)
    found = hessian_eigenvalue(saddle, [0], lambda m, _: (m.weight.square() * torch.tensor([[1.0, -1.0]])).sum())
    assert not found.converged


def test_curvature_through_attention() -> None:
    net = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    found = hessian_eigenvalue(net, [draw(2, 3, 8)], lambda m, x: m(x).square().mean(), steps=3)
    assert found.steps <= 3
    assert np.isfinite(found.value)
