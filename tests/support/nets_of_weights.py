"""Nets whose weights enter in other ways than `nn.Linear` does: turned, scaled, masked, stacked, with heads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import case, noise

X = noise(3, 8)
SEQUENCE = noise(2, 5, 8)
IMAGE = noise(2, 3, 6, 6)


class Entering(nn.Module):
    """One weight `w`, used in a subclass's own way, before an output layer."""

    shape: tuple[int, ...] = (8, 6)
    wide = 6

    def __init__(self) -> None:
        super().__init__()
        self.w, self.out = nn.Parameter(torch.randn(self.shape)), nn.Linear(self.wide, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.use(x, self.w).relu())

    def use(self, x: Tensor, w: Tensor) -> Tensor:
        raise NotImplementedError


ONE: dict[str, Any] = {"heads": "out", "sizes": {"w": (1, 6, 8)}}


@case(X, **ONE)
class Product(Entering):
    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w


@case(X, **ONE)
class ProductTurned(Entering):
    shape = (6, 8)

    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x, w.T)


@case(X, **ONE)
class ProductFromTheLeft(Entering):
    shape = (6, 8)

    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return (w @ x.T).T


@case(X, **ONE)
class FunctionalLinear(Entering):
    shape = (6, 8)

    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w, torch.ones(6))


@case(X, **ONE)
class ScaledByWidth(Entering):
    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ (w / math.sqrt(8))


@case(X, **ONE)
class ScaledByAGain(Entering):
    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.addmm(torch.zeros(6), x, w * 0.5)


@case(X, **ONE)
class SumNotation(Entering):
    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("bi,io->bo", x, w)


@case(SEQUENCE, heads="out", sizes={"w": (1, 6, 8)})
class HeadsByNotation(Entering):
    """XLNet's query: width to heads times dimensions."""

    shape = (8, 2, 3)

    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("bth,hnd->btnd", x, w).flatten(2)


@case(SEQUENCE, heads="out", sizes={"w": (1, 6, 8)})
class HeadsBackByNotation(Entering):
    """XLNet's output: heads times dimensions to width."""

    shape = (6, 2, 4)

    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("btnd,hnd->bth", x.unflatten(2, (2, 4)), w)


@case(X, heads="out", sizes={"w": (4, 6, 2)})
class StackOfMatrices(Entering):
    """One matrix per group of inputs."""

    shape, wide = (4, 2, 6), 24

    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("bgi,gio->bgo", x.unflatten(1, (4, 2)), w).flatten(1)


@case(X, heads="out", skipped="w")
class Masked(Entering):
    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ (w * torch.ones(8, 6).tril())


@case(X, heads="out", skipped="w")
class Normalized(Entering):
    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ F.normalize(w, dim=0)


@case(X, heads="out", skipped="w")
class Bounded(Entering):
    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w.tanh()


@case(X, heads="out", skipped="w")
class Positive(Entering):
    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ F.softplus(w)


@case(X, heads="out", skipped="w")
class TriangularProduct(Entering):
    shape, wide = (8, 8), 8

    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w.tril()


@case(IMAGE, heads="out", skipped="w")
class Standardized(Entering):
    shape = (6, 3, 3, 3)

    def use(self, x: Tensor, w: Tensor) -> Tensor:
        flat = w.flatten(1)
        flat = (flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True)
        return F.conv2d(x, flat.view_as(w)).mean((2, 3))


@case(X, heads="out", skipped="w")
class TimesAValue(Entering):
    """A table that meets values element by element."""

    shape, wide = (3, 8), 8

    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return x * w


@case(X, heads="out", skipped="w")
class LookedUp(Entering):
    wide = 6

    def use(self, x: Tensor, w: Tensor) -> Tensor:
        return w[(x[:, 0] > 0).long()]


class OwnLinear(nn.Module):
    """A Linear of one's own, as graph libraries have."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(out, wide)), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@case(X, heads="out", sizes={"c.weight": (1, 6, 8)})
class LinearOfOnesOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.out = OwnLinear(8, 6), OwnLinear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.c(x).relu())


class MaskedLinear(nn.Linear):
    """A subclass of Linear with a forward of its own (MADE)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * torch.ones_like(self.weight).tril(), self.bias)


class CosineLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=1))


class StandardizedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
        return self._conv_forward(x, w, self.bias)


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * (1 / math.sqrt(self.in_features)), self.bias)


class TurnedLinear(nn.Linear):
    """Square, and used the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Around(nn.Module):
    layer: Any = nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.c, self.out = self.layer(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.c(x).relu())


@case(X, heads="out", skipped="c")
class SubclassThatMasks(Around):
    layer = MaskedLinear


@case(X, heads="out", skipped="c")
class SubclassThatNormalizes(Around):
    layer = CosineLinear


@case(X, heads="out", sizes={"c.weight": (1, 8, 8)})
class SubclassThatScales(Around):
    layer = ScaledLinear


@case(X, heads="out", sizes={"c.weight": (1, 8, 8)})
class SubclassThatTurns(Around):
    layer = TurnedLinear


@case(IMAGE, heads="out", skipped="c")
class SubclassThatStandardizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.out = StandardizedConv(3, 6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.c(x).relu().mean((2, 3)))


@case(X, heads="out", skipped="u v")
class ProductOfTwo(nn.Module):
    """What is used is u @ v; neither is the layer's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(3, 8))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(F.linear(x, self.u @ self.v)))
