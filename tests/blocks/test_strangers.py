"""Small networks as people write them: heads, routers and fused weights are seen in their source, not in names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle


class Recurrent(nn.Module):
    """One cell, used at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.cell, self.read = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            h = torch.tanh(self.inp(x[:, t]) + self.cell(h))
        out: Tensor = self.read(h)
        return out


class Score(nn.Module):
    """A bilinear form at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.form = nn.Linear(4, 6), nn.Bilinear(6, 6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.form(self.a(x), self.a(y))
        return out


class Branches(nn.Module):
    """A mixture whose parts are not called experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.branches = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abc"})
        self.selector, self.fin = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.inp(x))
        p = torch.softmax(self.selector(h), -1)
        h = sum(p[:, i : i + 1] * m(h) for i, m in enumerate(self.branches.values()))
        out: Tensor = self.fin(h)
        return out


class Variational(nn.Module):
    """Mean and variance leave the model, and the decoder reads a sample of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(20, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 20)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.fc1(x))
        return self.fc21(h), self.fc22(h)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encode(x)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mean, log


class Unpacked(nn.Module):
    """Keys, queries and values out of one Linear, by a view and an unpacking."""

    def __init__(self) -> None:
        super().__init__()
        self.kqv, self.mix, self.fin = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.kqv(x).reshape(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.fin(F.relu(self.mix(a.transpose(1, 2).flatten(2))))
        return out


class Dueling(nn.Module):
    """Two streams that are added at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)
        self.adv, self.val = nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        a, v = self.adv(F.relu(self.left(h))), self.val(F.relu(self.right(h)))
        out: Tensor = v + a - a.mean(1, keepdim=True)
        return out


class Exits(nn.Module):
    """An output after every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.body = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.outs = nn.ModuleList([nn.Linear(8, 2) for _ in range(2)])

    def forward(self, x: Tensor) -> list[Tensor]:
        h, found = self.inp(x), []
        for layer, out in zip(self.body, self.outs, strict=True):
            h = F.relu(layer(h))
            found.append(out(h))
        return found


class Einsum(nn.Module):
    """Attention without a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.kqv = nn.Parameter(torch.randn(3, 2, 8, 16))
        self.mlp, self.out = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = torch.einsum("khdm,bsm->kbhsd", self.kqv, x)
        a = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        out: Tensor = self.out(F.relu(self.mlp(a)))
        return out


class Grown(nn.Module):
    """Grouped and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 8, 3, groups=2), nn.ConvTranspose2d(8, 4, 3, groups=2)
        self.rgb = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.rgb(F.relu(self.up(F.relu(self.down(x))))))


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.LazyLinear(2))


@pytest.mark.parametrize(
    ("make", "projected", "skipped"),
    [
        (Recurrent, "inp cell", {"read": "output head"}),
        (Score, "a", {"form": "output head"}),
        (Branches, "inp branches.a branches.b branches.c", {"selector": "router", "fin": "output head"}),
        (Variational, "fc1 fc3", dict.fromkeys(("fc21", "fc22", "fc4"), "output head")),
        (Unpacked, "mix", {"kqv": "fused", "fin": "output head"}),
        (Dueling, "body.0 left right", {"adv": "output head", "val": "output head"}),
        (Exits, "inp body.0 body.1", {"outs.0": "output head", "outs.1": "output head"}),
        (Einsum, "mlp", {"kqv": "layout not known", "out": "output head"}),
        (Grown, "down up", {"rgb": "output head"}),
        (_lazy, "2", {"0": "lazy", "4": "lazy"}),
    ],
)
def test_a_network_that_nobody_here_wrote(
    make: Callable[[], nn.Module], projected: str, skipped: dict[str, str]
) -> None:
    plan = rekindle.plan(make(), measure="none", targets="auto")
    assert [entry.name.removesuffix(".weight") for entry in plan.selected] == projected.split()
    reasons = {entry.name.removesuffix(".weight"): entry.reason or "" for entry in plan.skipped}
    for name, reason in skipped.items():
        assert reasons[name].startswith(reason), (name, reasons[name])
