"""BatchNorm statistics are re-estimated where they were training, and nothing else notices."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rekindle.projection.recalibration import recalibrate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4, momentum=0.3)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.BatchNorm2d(4).eval()
        self.unused = nn.BatchNorm1d(2)
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor, shift: float = 0.0) -> Tensor:
        x = self.frozen(self.drop(self.norm(self.conv(images + shift))))
        out: Tensor = self.head(x.mean((-1, -2)))
        return out


def reference(net: Net, batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    weight, bias = net.conv.weight.double(), net.conv.bias.double()  # type: ignore[union-attr]
    maps = [torch.nn.functional.conv2d(batch.double(), weight, bias).transpose(0, 1).flatten(1) for batch in batches]
    return torch.stack([m.mean(1) for m in maps]).mean(0), torch.stack([m.var(1) for m in maps]).mean(0)


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_statistics_are_the_mean_over_batches(form: str) -> None:
    torch.manual_seed(0)
    net = Net()
    images = [torch.randn(5, 1, 6, 6) + i for i in range(3)]
    batches: dict[str, list[Any]] = {
        "tensor": images,
        "tuple": [(x, torch.zeros(5)) for x in images],
        "dict": [{"images": x} for x in images],
    }
    buffer = net.norm.running_mean
    before = [b.clone() for layer in (net.frozen, net.unused) for b in layer.buffers()]
    assert recalibrate(net, batches[form]) == ("norm",)
    mean, variance = reference(net, images)
    torch.testing.assert_close(net.norm.running_mean.double(), mean, rtol=1e-5, atol=1e-6)  # type: ignore[union-attr]
    torch.testing.assert_close(net.norm.running_var.double(), variance, rtol=1e-5, atol=1e-6)  # type: ignore[union-attr]
    assert net.norm.running_mean is buffer
    after = [b for layer in (net.frozen, net.unused) for b in layer.buffers()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_modes_momentum_and_random_states_are_what_they_were() -> None:
    net = Net()
    loader = DataLoader(TensorDataset(torch.randn(8, 1, 6, 6)), batch_size=4, shuffle=True)

    class Noisy:
        def __iter__(self) -> Any:
            random.random()
            numpy.random.rand()
            return iter(loader)

    modes = [module.training for module in net.modules()]
    states = random.getstate(), numpy.random.get_state()[1].copy(), torch.get_rng_state()
    recalibrate(net, Noisy())  # type: ignore[arg-type]
    assert [module.training for module in net.modules()] == modes
    assert net.norm.momentum == 0.3
    assert random.getstate() == states[0]
    assert (numpy.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])


def test_nothing_training_means_nothing_done() -> None:
    net = Net().eval()
    assert recalibrate(net, []) == ()


@pytest.mark.parametrize("batches", [[], [torch.randn(4, 1, 6, 6), torch.randn(4, 3, 6, 6)]])
def test_a_failure_puts_statistics_and_modes_back(batches: list[Tensor]) -> None:
    net = Net()
    net(torch.randn(4, 1, 6, 6))
    before = [b.clone() for b in net.buffers()]
    modes = [module.training for module in net.modules()]
    with pytest.raises((ValueError, RuntimeError)):
        recalibrate(net, batches)
    assert all(torch.equal(x, y) for x, y in zip(before, net.buffers(), strict=True))
    assert [module.training for module in net.modules()] == modes
