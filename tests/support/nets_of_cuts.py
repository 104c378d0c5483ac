"""Nets that cut a weight's output in parts, in every way that Python has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from cases import case, noise
from torch import Tensor, nn

X = noise(3, 8)
SEQUENCE = noise(2, 5, 8)
IMAGE = noise(2, 3, 6, 6)


class Cut(nn.Module):
    """A layer `c` of 16 rows, the cut of a subclass, and an output layer."""

    rows, width = 16, 8

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(8, self.rows)
        self.out = nn.Linear(self.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cut(self.c(x)))

    def cut(self, y: Tensor) -> Tensor:
        raise NotImplementedError


HALVES: dict[str, Any] = {"heads": "out", "cuts": {"c": (8, 8)}}


@case(X, **HALVES)
class Chunk(Cut):
    def cut(self, y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        return a * b.sigmoid()


@case(X, **HALVES)
class ChunkBehindAMask(Cut):
    def cut(self, y: Tensor) -> Tensor:
        a, b = (y * torch.ones(16)).chunk(2, 1)
        return a * torch.tanh(b)


@case(X, **HALVES)
class ChunkBehindANorm(Cut):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def cut(self, y: Tensor) -> Tensor:
        a, b = self.norm(y).chunk(2, -1)
        return a * F.gelu(b)


@case(X, **HALVES)
class UnsafeChunk(Cut):
    def cut(self, y: Tensor) -> Tensor:
        a, b = y.unsafe_chunk(2, -1)
        return a.relu() * b


@case(X, **HALVES)
class Split(Cut):
    def cut(self, y: Tensor) -> Tensor:
        a, b = y.split(8, dim=-1)
        return a * F.silu(b)


@case(X, **HALVES)
class TensorSplit(Cut):
    def cut(self, y: Tensor) -> Tensor:
        a, b = torch.tensor_split(y, 2, dim=-1)
        return a * F.silu(b)


@case(X, **HALVES)
class HorizontalSplit(Cut):
    def cut(self, y: Tensor) -> Tensor:
        a, b = torch.hsplit(y, 2)
        return a * F.silu(b)


@case(X, **HALVES)
class Slices(Cut):
    def cut(self, y: Tensor) -> Tensor:
        return y[..., :8] * y[..., 8:].sigmoid()


@case(X, **HALVES)
class Interleaved(Cut):
    def cut(self, y: Tensor) -> Tensor:
        return y[..., ::2] * y[..., 1::2].sigmoid()


@case(X, **HALVES)
class Narrow(Cut):
    def cut(self, y: Tensor) -> Tensor:
        return y.narrow(-1, 0, 8) * y.narrow(-1, 8, 8).sigmoid()


@case(X, **HALVES)
class ListOfIndices(Cut):
    def cut(self, y: Tensor) -> Tensor:
        return y[:, list(range(8))] * y[:, list(range(8, 16))].sigmoid()


@case(X, **HALVES)
class IndexSelect(Cut):
    def cut(self, y: Tensor) -> Tensor:
        return y.index_select(1, torch.arange(8)) * y.index_select(1, torch.arange(8, 16)).sigmoid()


@case(X, **HALVES)
class ReshapeAndUnbind(Cut):
    def cut(self, y: Tensor) -> Tensor:
        a, b = y.reshape(-1, 2, 8).unbind(1)
        return a * b.sigmoid()


@case(X, **HALVES)
class ReshapeAndSelect(Cut):
    def cut(self, y: Tensor) -> Tensor:
        z = y.view(-1, 8, 2)
        return z[..., 0] * z[..., 1].sigmoid()


@case(X, **HALVES)
class Glu(Cut):
    def cut(self, y: Tensor) -> Tensor:
        return F.glu(y)


@case(X, **HALVES)
class GluModule(Cut):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GLU(-1)

    def cut(self, y: Tensor) -> Tensor:
        return self.act(y)


@case(X, **HALVES)
class Lambda(Cut):
    def __init__(self) -> None:
        super().__init__()
        self.gate = lambda y: y[:, :8] * y[:, 8:].sigmoid()

    def cut(self, y: Tensor) -> Tensor:
        return self.gate(y)


def gated(y: Tensor, n: int) -> Tensor:
    return y[..., :n] * torch.sigmoid(y[..., n:])


@case(X, **HALVES)
class Helper(Cut):
    def cut(self, y: Tensor) -> Tensor:
        return gated(y, 8)


class Gauss:
    def __init__(self, y: Tensor) -> None:
        self.mean, self.log = torch.chunk(y, 2, dim=1)

    def sample(self) -> Tensor:
        return self.mean + self.log.exp()


@case(X, **HALVES)
class PlainClass(Cut):
    def cut(self, y: Tensor) -> Tensor:
        return Gauss(y).sample()


@case(X, **HALVES)
class StarredArguments(Cut):
    def cut(self, y: Tensor) -> Tensor:
        return self.meet(*y.chunk(2, -1))

    def meet(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b.sigmoid()


@case(X, **HALVES)
class ByLoop(Cut):
    def cut(self, y: Tensor) -> Tensor:
        parts = [y[:, i * 8 : (i + 1) * 8] for i in range(2)]
        return parts[0].tanh() * parts[1]


@case(X, heads="out", cuts={"c": (8, 8), "d": (8, 8)})
class SumWithAnother(Cut):
    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (self.c(x) + self.d(x.cos())).chunk(2, -1)
        return self.out(a * b.sigmoid())


@case(X, heads="out", cuts={"c": (4, 4, 8)})
class UnequalParts(Cut):
    def cut(self, y: Tensor) -> Tensor:
        a, b, c = y.split([4, 4, 8], -1)
        return c.exp() * torch.cat([a.sin(), b.cos()], -1)


@case(X, heads="out", cuts={"c": (4, 4, 4, 4)})
class CellOfFourGates(Cut):
    width = 4

    def cut(self, y: Tensor) -> Tensor:
        i, f, g, o = y.chunk(4, -1)
        c = f.sigmoid() * i.sin() + i.sigmoid() * g.tanh()
        return o.exp() * c.tanh()


@case(X, heads="out", cuts={"c": (8, 8)})
class ToTwoLayers(Cut):
    def __init__(self) -> None:
        super().__init__()
        self.d, self.e = nn.Linear(8, 8), nn.Linear(8, 8)

    def cut(self, y: Tensor) -> Tensor:
        return self.d(y[:, :8]).relu() + self.e(y[:, 8:]).relu()


@case(SEQUENCE, heads="out", cuts={"c": (8, 8, 8)})
class Attention(Cut):
    rows = 24

    def cut(self, y: Tensor) -> Tensor:
        q, k, v = y.split(8, 2)
        return (q @ k.mT).softmax(-1) @ v


@case(SEQUENCE, heads="out", cuts={"c": (8, 8, 8)})
class AttentionOfHeads(Cut):
    rows = 24

    def cut(self, y: Tensor) -> Tensor:
        q, k, v = y.view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 8)


@case(SEQUENCE, heads="out", cuts={"c": (8, 8, 8)})
class AttentionInterleaved(Cut):
    rows = 24

    def cut(self, y: Tensor) -> Tensor:
        q, k, v = y.view(2, 5, 2, 12).transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 8)


@case(SEQUENCE, heads="out", cuts={"c": (8, 4, 4)})
class GroupedAttention(Cut):
    def cut(self, y: Tensor) -> Tensor:
        q = y[..., :8].view(2, 5, 2, 4).transpose(1, 2)
        k, v = (z[:, None].expand(2, 2, 5, 4) for z in (y[..., 8:12], y[..., 12:]))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 8)


@case(SEQUENCE, heads="out", cuts={"c": (8, 8)})
class KeysAndValues(Cut):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.c(x).chunk(2, -1)
        return self.out((self.q(x) @ k.mT).softmax(-1) @ v)


@case(IMAGE, heads="out", cuts={"c": (4, 4)})
class ChunkOfChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.out = nn.Conv2d(3, 8, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.c(x).chunk(2, 1)
        return self.out((a * b.sigmoid()).mean((2, 3)))


@case(IMAGE, heads="out", cuts={"c": (4, 4)})
class ChunkOfATransposedConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.out = nn.ConvTranspose2d(3, 8, 2), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.c(x).chunk(2, 1)
        return self.out(a * b.sigmoid())


@case(IMAGE, heads="out", cuts={"c": (2, 2, 4)})
class PartialConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.d, self.e = nn.Conv2d(3, 8, 1), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.c(x).split([2, 2, 4], 1)
        return self.out(torch.cat([self.d(a), self.e(b), c], 1))


class Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        shift, scale, gate = t.chunk(3, -1)
        return x + gate * self.fc(self.norm(x) * (1 + scale) + shift)


@case(noise(3, 8), heads="out", cuts={"time": (8, 8, 8)})
class CutInsideABlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.out = nn.Linear(8, 24), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Modulated(), Modulated()])

    def forward(self, x: Tensor) -> Tensor:
        t = self.time(x.sin())
        for block in self.blocks:
            x = block(x, t)
        return self.out(x)


@case(X, heads="out", cuts={"w": (8, 8)})
class SlicedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.out = nn.Parameter(torch.randn(16, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(x, self.w[:8]).tanh() * F.linear(x, self.w[8:]).sigmoid())


@case(X, heads="out")
class WholeBehindRotation(Cut):
    """Halves that are turned and joined again: one matrix."""

    width = 16

    def cut(self, y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        angle = torch.linspace(0, 1, 16)
        return y * angle.cos() + torch.cat([-b, a], -1) * angle.sin()


@case(SEQUENCE, heads="out")
class WholeOneToken(nn.Module):
    """A token is selected, no row of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.c(x)[:, 0].relu())
