"""Whether a model normalizes its activations: by what ran, by its classes, by the keys of its file."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rekindle.blocks.normalization import normalizes, state_normalizes
from rekindle.recording import facts_of, record


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.between(self.one(x))))


class Standardized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        return F.linear(x, (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5), self.bias)


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


class Attention(nn.Module):
    """Its queries and keys are normalized, which no weight reads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k = F.normalize(self.q(x), dim=-1), F.normalize(self.k(x), dim=-1)
        return self.o((q @ k.mT / 2.4).softmax(-1) @ self.v(x))


def scaled(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-6) ** -0.5


def standardized(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, 0, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt()


BY_HAND = {
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "F.normalize": lambda x: F.normalize(x, dim=-1),
    "a root mean square": scaled,
    "a standard deviation": standardized,
    "its norm": lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6),
    "std": lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5),
    "a module": RootMeanSquare(),
}
NONE = {
    "a function": torch.relu,
    "softmax": lambda x: x.softmax(-1),
    "softmax by hand": lambda x: (x - x.amax(-1, keepdim=True)).exp() / x.exp().sum(-1, keepdim=True),
    "a constant": lambda x: x / 8**0.5,
    "a gate": lambda x: x * x.mean(-1, keepdim=True).sigmoid(),
    "squared ReLU": lambda x: x.relu().square(),
    "GELU by hand": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x.pow(3)))),
}
BATCH = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def recorded(model: nn.Module, batch: Tensor = BATCH) -> bool | None:
    return normalizes(model, facts_of(record(model, batch)))


@pytest.mark.parametrize("name", BY_HAND)
def test_a_normalization_is_seen_whoever_wrote_it(name: str) -> None:
    assert recorded(Between(BY_HAND[name])) is True
    assert normalizes(Between(BY_HAND[name])) is not False


@pytest.mark.parametrize("name", NONE)
def test_what_only_looks_like_one_is_none(name: str) -> None:
    assert recorded(Between(NONE[name])) is False
    assert normalizes(Between(NONE[name])) is not True


def test_only_what_a_weight_reads_counts() -> None:
    layers = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)
    assert recorded(nn.Sequential(*layers, nn.LayerNorm(3))) is False
    assert recorded(nn.Sequential(nn.LayerNorm(6), *layers)) is False  # of the input
    assert recorded(nn.Sequential(*layers)) is False and normalizes(nn.Sequential(*layers)) is False
    assert recorded(nn.Sequential(layers[0], nn.BatchNorm1d(8).eval(), *layers[1:])) is True
    assert recorded(nn.Sequential(Standardized(6, 8), nn.ReLU(), layers[2])) is False
    assert recorded(Attention(), BATCH[None]) is False and normalizes(Attention()) is None
    assert normalizes(nn.DataParallel(nn.Sequential(layers[0], nn.RMSNorm(8), layers[2]))) is True


def test_a_file_says_yes_or_nothing() -> None:
    norms = nn.BatchNorm1d(8, affine=False), nn.LayerNorm(8), RootMeanSquare()
    for norm in norms:
        assert state_normalizes(nn.ModuleDict({"fc": nn.Linear(6, 8), "norm": norm}).state_dict()) is True
    assert state_normalizes(nn.Sequential(nn.Linear(6, 8), nn.PReLU(8), nn.Linear(8, 3)).state_dict()) is None
