"""What names and classes say that a layer does, and where what ran says more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.blocks.families import named_role
from rekindle.blocks.finding import find


@pytest.mark.parametrize(
    ("path", "beside", "role"),
    [
        ("attn.c_q", (), "query"),
        ("attn.c_k", (), "key"),
        ("attn.c_v", (), "value"),
        ("attention.self.value", (), "value"),
        ("self.key", ("query", "key", "value"), "key"),
        ("feed_forward.key", ("key", "receptance", "value"), "other"),
        ("critic.value", (), "other"),
        ("attn.ve_gate", (), "gate"),
        ("smear_gate", (), "gate"),
        ("mlp.gate", (), "mlp-gate"),
    ],
)
def test_by_name(path: str, beside: tuple[str, ...], role: str) -> None:
    *above, leaf = path.split(".")
    assert named_role(leaf, above, beside) == role


class GRUGating(nn.Module):
    """What x-transformers calls its gated residual."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRUCell(8, 8)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.gru(x, residual)


def test_a_gated_residual_is_no_router() -> None:
    assert [f.role for f in find(GRUGating()) if f.blocks] == ["other", "other"]


class Neutral(nn.Module):
    """Attention that is written out, under names that say nothing; its values are gated."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.d, self.last = nn.Linear(8, 8), nn.Linear(8, 5)
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        values = self.c(x) * torch.sigmoid(self.d(x))
        scores = self.b(x) @ self.a(x).mT / 8**0.5 if self.turned else self.a(x) @ self.b(x).mT / 8**0.5
        weights = scores.softmax(-2).mT if self.turned else scores.softmax(-1)
        return self.last(weights @ values)


@pytest.mark.parametrize("turned", [False, True])
def test_by_what_ran(turned: bool) -> None:
    roles = {e.module: e.role for e in rekindle.plan(Neutral(turned), example=torch.randn(2, 5, 8)).entries if e.blocks}
    wanted = {"a": "query", "b": "key", "d": "gate", "last": "head"}
    assert {name: roles[name] for name in wanted} == wanted
    assert roles["c"] in ("value", "other")  # it is multiplied by a gate first


class Critic(nn.Module):
    """Its network is called `value`, as those of agents are."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Any:
        return self.value(x)


def test_a_network_called_value_is_no_attention() -> None:
    for options in ({}, {"example": torch.randn(3, 6)}):
        assert [e.role for e in rekindle.plan(Critic(), **options).entries if e.blocks] == ["other", "head"]
