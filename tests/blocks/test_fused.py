"""Fused weights of unknown classes: seen in the owner's source, skipped with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rekindle.blocks.finding import find


class Mlp(nn.Module):
    def __init__(self, cut: str) -> None:
        super().__init__()
        self.fc1, self.fc2, self.cut = nn.Linear(4, 16), nn.Linear(8, 4), cut

    def forward(self, x):
        if self.cut == "chunk":
            a, b = self.fc1(x).chunk(2, dim=-1)
        elif self.cut == "torch":
            a, b = torch.split(self.fc1(x), [8, 8], dim=-1)
        elif self.cut == "slices":
            h = self.fc1(x)
            a, b = h[..., :8], h[..., 8:]
        else:
            h = self.fc1(x).view(*x.shape[:-1], 8, 2)
            a, b = h[..., 0], h[..., 1]
        return self.fc2(torch.sigmoid(a) * b)


class Rotary(nn.Module):
    """Splits its query only to turn a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.fc = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        q = self.q_proj(x)
        turned, kept = q[..., :4], q[..., 4:]
        return self.fc(torch.cat((torch.sin(turned), kept), dim=-1))


class Heads(nn.Module):
    """An ordinary attention: viewed by heads, never cut."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, 8)
        return x + self.o(y)


class Modulated(nn.Module):
    """DiT's adaLN: the cut layer is the last of a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation, self.out = nn.Sequential(nn.SiLU(), nn.Linear(4, 8)), nn.Linear(4, 4)

    def forward(self, x, c):
        shift, scale = self.modulation(c).chunk(2, dim=1)
        return self.out(x * scale + shift)


class Grouped(nn.Linear):
    def forward(self, x):
        return torch.bmm(x, self.weight.view(2, -1, self.in_features).transpose(1, 2))


def reason(model: nn.Module, name: str) -> str | None:
    return next(f.reason for f in find(nn.Sequential(model, nn.Linear(4, 4))) if f.name == f"0.{name}.weight")


@pytest.mark.parametrize("cut", ["chunk", "torch", "slices", "view"])
def test_an_output_that_is_cut_holds_several_matrices(cut: str) -> None:
    assert "fused: Mlp cuts its output" in str(reason(Mlp(cut), "fc1"))
    assert reason(Mlp(cut), "fc2") is None


def test_parts_that_come_together_again_are_one_matrix() -> None:
    assert reason(Rotary(), "q_proj") is None


def test_attention_by_heads_is_not_fused() -> None:
    assert [reason(Heads(), name) for name in "qkv"] == [None, None, None]


def test_through_a_sequential_and_a_gated_linear_unit() -> None:
    assert "Modulated" in str(reason(Modulated(), "modulation.1"))
    assert "GLU" in str(reason(nn.Sequential(nn.Linear(4, 8), nn.GLU(), nn.Linear(4, 4)), "0"))


def test_a_linear_that_views_its_own_weight() -> None:
    assert "view of its weight" in str(reason(nn.Sequential(Grouped(4, 8), nn.Linear(8, 4)), "0"))


def test_only_the_weight_of_a_convolution_is_a_kernel() -> None:
    class Scaled(nn.Conv2d):
        def __init__(self) -> None:
            super().__init__(4, 4, 3)
            self.gain = nn.Parameter(torch.ones(4, 1, 1, 1))

    found = {f.name: f for f in find(nn.Sequential(Scaled(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 1)))}
    assert found["0.gain"].blocks == ()
    assert found["0.weight"].blocks


def capped(x, cap):
    return cap * torch.tanh(x / cap)


class Windowed(nn.Module):
    """DeepSeek-V4's compressor takes whole windows of tokens first; xLSTM caps its gates by a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.both, self.in_proj_z, self.out = (
            nn.Linear(4, 8),
            nn.Linear(4, 8),
            nn.Linear(4, 8),
            nn.Linear(4, 4),
        )
        self.out_proj = nn.Linear(8, 4)

    def forward(self, x):
        n = x.shape[1] // 2 * 2
        gate = self.gate(x)[:, :n].view(x.shape[0], n // 2, 2, -1)
        a, b = torch.tensor_split(capped(self.both(x), 15.0), (4,), dim=-1)
        late, early = gate[..., 4:], gate[:, :-1, :, :4]
        return self.out(late.sum() + early.sum() + a * b) + self.out_proj(self.in_proj_z(x))


@pytest.mark.parametrize("name", ["gate", "both"])
def test_a_cut_is_seen_behind_a_slice_of_tokens_and_an_unknown_function(name: str) -> None:
    assert "fused" in str(reason(Windowed(), name))


def test_a_name_that_says_little_gives_way_to_the_source() -> None:
    assert reason(Windowed(), "in_proj_z") is None
