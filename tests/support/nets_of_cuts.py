"""Nets that cut a weight's output in parts, in every way that Python has."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import case, noise

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


@case(X, **HALVES)
class ChunkBehindArithmetic(Cut):
    def cut(self, y: Tensor) -> Tensor:
        a, b = ((y + 1) / 2 - y.new_ones(16)).chunk(2, -1)
        return a * b.sigmoid()


def glu_of_ones_own(y: Tensor) -> Tensor:
    a, b = torch.chunk(y, 2, dim=-1)
    return a * torch.sigmoid(b)


@case(X, **HALVES)
class ChunkInAHelper(Cut):
    def cut(self, y: Tensor) -> Tensor:
        return glu_of_ones_own(y)


@case(X, **HALVES)
class ChunkInAHelperOfTwoArguments(Cut):
    def cut(self, y: Tensor) -> Tensor:
        return gated(y.relu(), n=self.width)


@case(X, **HALVES)
class PartialFunction(Cut):
    def __init__(self) -> None:
        super().__init__()
        self.meet = functools.partial(gated, n=8)

    def cut(self, y: Tensor) -> Tensor:
        return self.meet(y)


@case(X, **HALVES)
class StaticMethod(Cut):
    def cut(self, y: Tensor) -> Tensor:
        return self.meet(y)

    @staticmethod
    def meet(y: Tensor) -> Tensor:
        return y[:, :8] * y[:, 8:].tanh()


@case(X, **HALVES)
class DictOfParts(Cut):
    def cut(self, y: Tensor) -> Tensor:
        parts = {"a": y[:, :8], "b": y[:, 8:]}
        return parts["a"] * parts["b"].sigmoid()


@case(X, **HALVES)
class IndexBuffer(Cut):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("odd", torch.arange(1, 16, 2))
        self.register_buffer("even", torch.arange(0, 16, 2))

    def cut(self, y: Tensor) -> Tensor:
        return y[:, self.odd] * y[:, self.even].sigmoid()


@case(X, **HALVES)
class BooleanMask(Cut):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.arange(16) < 8)

    def cut(self, y: Tensor) -> Tensor:
        return y[:, self.first] * y[:, ~self.first].sigmoid()


@case(X, **HALVES)
class UnflattenAndSelect(Cut):
    def cut(self, y: Tensor) -> Tensor:
        z = y.unflatten(-1, (2, 8))
        return z[:, 0] * z[:, 1].sigmoid()


@case(X, **HALVES)
class UnpackedAxis(Cut):
    def cut(self, y: Tensor) -> Tensor:
        a, b = y.view(-1, 2, 8).movedim(1, 0)
        return a * b.sigmoid()


def rearranged(y: Tensor, parts: int) -> Tensor:
    """What einops does for `b (n d) -> n b d`."""
    return y.reshape(len(y), parts, -1).permute(1, 0, 2)


@case(X, **HALVES)
class Rearranged(Cut):
    def cut(self, y: Tensor) -> Tensor:
        a, b = rearranged(y, 2)
        return a * b.sigmoid()


@case(X, heads="out", cuts={"c": (4, 12)})
class SplitAtAnIndex(Cut):
    width = 12

    def cut(self, y: Tensor) -> Tensor:
        a, b = torch.tensor_split(y, (4,), -1)
        return a.repeat(1, 3).exp() * b.tanh()


@case(X, heads="out", cuts={"c": (8, 4, 4)})
class CutTwice(Cut):
    def cut(self, y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        c, d = b.chunk(2, -1)
        return a * torch.cat([c.sigmoid(), d.tanh()], -1)


class SwiGLU(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        a, b = y.chunk(2, dim=-1)
        return F.silu(b) * a


@case(X, heads="2", cuts={"0": (8, 8)})
def gate_in_a_sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), SwiGLU(), nn.Linear(8, 3))


class GEGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate)


@case(X, heads="2", cuts={"0.proj": (8, 8)})
def gate_with_its_layer() -> nn.Module:
    return nn.Sequential(GEGLU(), nn.Dropout(), nn.Linear(8, 3))


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, condition: Tensor) -> Tensor:
        scale, shift = condition[:, :8], condition[:, 8:]
        return self.fc(x * (1 + scale) + shift.sin())


@case(X, heads="out", cuts={"time": (8, 8)})
class CutOfAKeywordArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.block, self.out = nn.Linear(8, 16), Adaptive(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(x, condition=self.time(x.cos())).relu())


@case(IMAGE, heads="out", cuts={"film": (6, 6)})
class ModulatedImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.film, self.out = nn.Conv2d(3, 6, 3), nn.Linear(3, 12), nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.film(x.mean((2, 3)))[:, :, None, None].chunk(2, 1)
        return self.out((self.c(x) * (scale + 1) + shift.sin()).relu())


class Gaussian:
    def __init__(self, moments: Tensor) -> None:
        self.mean, self.log = torch.chunk(moments, 2, dim=1)
        self.spread = torch.exp(0.5 * torch.clamp(self.log, -30.0, 20.0))

    def mode(self) -> Tensor:
        return self.mean + self.spread


@case(IMAGE, heads="out", cuts={"moments": (4, 4)})
class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.moments = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)
        self.dec, self.out = nn.Conv2d(4, 8, 1), nn.ConvTranspose2d(8, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dec(Gaussian(self.moments(self.enc(x).relu())).mode()).relu())


def tanh_times_sigmoid(a: Tensor, b: Tensor, channels: Tensor) -> Tensor:
    n, both = int(channels[0]), a + b
    return torch.tanh(both[:, :n, :]) * torch.sigmoid(both[:, n:, :])


@case(noise(2, 8, 5), heads="out", cuts={"c": (8, 8), "condition": (8, 8)})
class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.condition, self.out = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(8, 16, 1), nn.Conv1d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(tanh_times_sigmoid(self.c(x), self.condition(x.cos()), torch.IntTensor([8])))


@case(SEQUENCE, heads="out", cuts={"inlet": (8, 8)})
class SpatialGate(nn.Module):
    """gMLP."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.norm, self.mix, self.out = nn.Linear(8, 16), nn.LayerNorm(8), nn.Linear(5, 5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.gelu(self.inlet(x)).chunk(2, dim=-1)
        return self.out(a * self.mix(self.norm(b).mT).mT)


@case(SEQUENCE, heads="out", cuts={"inlet": (8, 8), "mixed": (2, 4, 4)})
class SelectiveState(nn.Module):
    """Mamba, without its scan."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.mixed, self.step = nn.Linear(8, 16, bias=False), nn.Linear(8, 10, bias=False), nn.Linear(2, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.inlet(x).chunk(2, dim=-1)
        x = F.silu(x)
        step, b, c = self.mixed(x).split([2, 4, 4], dim=-1)
        step = F.softplus(self.step(step))
        state = (step * x)[..., None] * b[:, :, None]
        y = (state.cumsum(1) @ c[..., None]).squeeze(-1)
        return self.out(y * F.silu(z))


@case(SEQUENCE, heads="out", cuts={"a": (8, 8, 8), "b": (8, 8, 8)})
class GatedCell(nn.Module):
    """A GRU's step, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, 0].cos()
        r, z, n = self.a(x[:, 0]).chunk(3, -1)
        s, y, m = self.b(h).chunk(3, -1)
        r, z = torch.sigmoid(r + s), torch.sigmoid(z + y)
        return self.out((1 - z) * torch.tanh(n + r * m) + z * h)


@case(IMAGE, heads="out")
class CrossStage(nn.Module):
    """C2f: one half goes through further layers, and all of it is joined: one matrix or two, both are right."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.m, self.out = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(12, 3, 1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = list(F.silu(self.norm(self.c(x))).chunk(2, 1))
        y.append(F.silu(self.m(y[-1])))
        return self.out(torch.cat(y, 1))


@case(SEQUENCE, heads="out", cuts={"c": (6, 2), "up": (6, 8)})
class LatentAndRotary(nn.Module):
    """Latent attention: keys of a latent and of a rotated part."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.up, self.q, self.out = nn.Linear(8, 8), nn.Linear(6, 14), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        latent, turned = self.c(x).split([6, 2], dim=-1)
        k, v = self.up(latent)[..., :6], self.up(latent)[..., 6:]
        k = torch.cat([k, turned * 0.5], -1)
        return self.out((self.q(x) @ k.mT).softmax(-1) @ v)


@case(SEQUENCE, heads="out", cuts={"c": (8, 8, 8)})
class AttentionUnbound(Cut):
    rows = 24

    def cut(self, y: Tensor) -> Tensor:
        q, k, v = y.reshape(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * 0.5).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).reshape(2, 5, 8)


@case(X, heads="out", cuts={"c.1": (8, 8)})
class CutAcrossModules(nn.Module):
    """A module returns the whole; the class around it cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.out = nn.Sequential(nn.ReLU(), nn.Linear(8, 16), nn.Identity()), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x)
        a, b = (y[:, i : i + 8] for i in (0, 8))
        return self.out(a.tanh() * b)


@case(SEQUENCE, heads="out")
class WholeHeads(nn.Module):
    """Heads are no parts: each layer is one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, n) for n in (8, 8, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(2, 5, 2, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 8))


@case(SEQUENCE, heads="out")
class WholeWithPartlyTurnedHeads(nn.Module):
    """A rotary embedding of a part of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def turned(self, y: Tensor) -> Tensor:
        y = y.view(2, 5, 2, 4).transpose(1, 2)
        turn, rest = y[..., :2], y[..., 2:]
        angle = torch.arange(5.0)[:, None]
        first, second = turn.chunk(2, -1)
        return torch.cat([turn * angle.cos() + torch.cat([-second, first], -1) * angle.sin(), rest], -1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.turned(self.q(x)) @ self.turned(self.k(x)).mT
        return self.out(scores.softmax(-1).mean(1) @ x)


@case(SEQUENCE, heads="out")
class WholeStreamWithAPeek(nn.Module):
    """A gate that reads some channels of a residual stream cuts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.gate, self.g, self.out = nn.Linear(8, 8), nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.inlet = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x).relu()
        x = x + self.f(x.relu())
        x = x + self.g(x.relu()) * self.gate(x[..., :4]).sigmoid()
        return self.out(x)


@case(SEQUENCE, heads="out")
class WholeChunksOfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, rest = self.c(x).split([1, 4], 1)
        return self.out((first * rest.sigmoid()).mean(1))


@case(IMAGE, heads="out")
class WholeChannelsShuffled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.out = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x).view(2, 2, 4, 6, 6).transpose(1, 2).reshape(2, 8, 6, 6)
        return self.out(y.relu())


@case(IMAGE, heads="out")
class WholePatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.mix, self.out = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.c(x).flatten(2).transpose(1, 2)
        return self.out(self.mix(tokens).relu()[:, 0])


@case(X, heads="out")
class WholeNormOfGroups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x).view(3, 2, 4)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return self.out(y.flatten(1).relu())


class ChannelNorm(nn.Module):
    """A norm whose gain has four axes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.full((1, width, 1, 1), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.g * x.shape[1] ** 0.5


@case(lambda: {"x": noise(2, 4, 6, 6)(), "time": noise(2, 8)()}, heads="last", cuts={"mlp": (12, 12)})
class ScaledByTime(nn.Module):
    """A diffusion block: a time embedding scales and shifts what a norm with four axes has made."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.conv, self.last = nn.Linear(8, 24), nn.Conv2d(4, 12, 3), nn.Conv2d(12, 3, 1)
        self.norm = ChannelNorm(12)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.mlp(time.sigmoid())[:, :, None, None].chunk(2, 1)
        return self.last(F.silu(self.norm(self.conv(x)) * (scale + 1) + shift))


@case(X, heads="out", cuts={"c": (8, 8)})
class SumsOfRowsAreCut(Cut):
    """Each gate is the sum of four rows (WavLM's relative position)."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.sigmoid(self.c(x).view(-1, 4, 4).sum(-1)).chunk(2, -1)
        return self.out(torch.cat([a * (b * 3 - 1), x[:, :6]], -1))


@case(SEQUENCE, heads="out", cuts={"c.0": (8, 8)})
class OneHalfGoesOnAndOneIsCollected(nn.Module):
    """A residual stream gets one half of each layer, the output the other (WaveNet, VITS)."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.ModuleList([nn.Linear(8, 16), nn.Linear(8, 8)])
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = self.c[0](torch.tanh(x))
        stream, collected = x + first[..., :8], first[..., 8:]
        return self.out(torch.relu(collected + self.c[1](torch.tanh(stream))))
