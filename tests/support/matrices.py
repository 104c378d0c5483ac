"""The zoo of matrices that the engine must be exact on: (out, in, generator) -> float32 matrix."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

Make = Callable[[int, int, Generator], Tensor]


def gaussian(out: int, in_: int, g: Generator) -> Tensor:
    return torch.randn(out, in_, generator=g) / math.sqrt(in_)


def kaiming(out: int, in_: int, g: Generator) -> Tensor:
    return (torch.rand(out, in_, generator=g) * 2 - 1) / math.sqrt(in_)


def with_spectrum(out: int, in_: int, g: Generator, s: Tensor) -> Tensor:
    k = min(out, in_)
    u = torch.linalg.qr(torch.randn(out, k, generator=g, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(in_, k, generator=g, dtype=torch.float64))[0]
    return ((u * s) @ v.T).float()


def power_law(spread: float) -> Make:
    def make(out: int, in_: int, g: Generator) -> Tensor:
        k = min(out, in_)
        rank = torch.arange(1, k + 1, dtype=torch.float64)
        return with_spectrum(out, in_, g, rank ** -(math.log(spread) / math.log(max(k, 2))))

    return make


def geometric(spread: float) -> Make:
    def make(out: int, in_: int, g: Generator) -> Tensor:
        return with_spectrum(out, in_, g, torch.logspace(0, -math.log10(spread), min(out, in_), dtype=torch.float64))

    return make


def trained(out: int, in_: int, g: Generator) -> Tensor:
    """A random bulk with a few large directions on top, as spectra of trained layers look."""
    k = min(out, in_)
    spikes = max(1, k // 32)
    s = torch.zeros(k, dtype=torch.float64)
    s[:spikes] = 5 * torch.arange(1, spikes + 1, dtype=torch.float64) ** -0.5
    return gaussian(out, in_, g) + with_spectrum(out, in_, g, s)


def dead_rows(share: float) -> Make:
    def make(out: int, in_: int, g: Generator) -> Tensor:
        w = gaussian(out, in_, g)
        w[torch.randperm(out, generator=g)[: int(share * out)]] = 0
        return w

    return make


def dead_columns(share: float) -> Make:
    def make(out: int, in_: int, g: Generator) -> Tensor:
        return dead_rows(share)(in_, out, g).T.contiguous()

    return make


def duplicates(share: float, noise: float = 0.0) -> Make:
    def make(out: int, in_: int, g: Generator) -> Tensor:
        w = gaussian(out, in_, g)
        twins = int(share * out)
        w[:twins] = w[out - twins :] + noise * torch.randn(twins, in_, generator=g) / math.sqrt(in_)
        return w

    return make


def two_scales(out: int, in_: int, g: Generator) -> Tensor:
    w = gaussian(out, in_, g)
    w[: out // 2] *= 1e-6
    return w


def rank_one(out: int, in_: int, g: Generator) -> Tensor:
    return torch.randn(out, 1, generator=g) @ torch.randn(1, in_, generator=g)


def scaled(factor: float) -> Make:
    return lambda out, in_, g: gaussian(out, in_, g) * factor


def orthogonal(out: int, in_: int, g: Generator) -> Tensor:
    return with_spectrum(out, in_, g, torch.ones(min(out, in_), dtype=torch.float64))


ZOO: dict[str, Make] = {
    "gaussian": gaussian,
    "kaiming": kaiming,
    "trained": trained,
    "power law 1e3": power_law(1e3),
    "power law 1e8": power_law(1e8),
    "geometric 1e3": geometric(1e3),
    "geometric 1e5": geometric(1e5),
    "geometric 1e8": geometric(1e8),
    "two scales": two_scales,
    "dead rows 10%": dead_rows(0.1),
    "dead rows 60%": dead_rows(0.6),
    "dead columns 10%": dead_columns(0.1),
    "dead columns 60%": dead_columns(0.6),
    "duplicates 10%": duplicates(0.1),
    "duplicates 40%": duplicates(0.4),
    "near duplicates": duplicates(0.2, 1e-5),
    "rank one": rank_one,
    "ones": lambda out, in_, g: torch.ones(out, in_),
    "zero": lambda out, in_, g: torch.zeros(out, in_),
    "identity": lambda out, in_, g: torch.eye(out, in_),
    "orthogonal": orthogonal,
    "huge": scaled(1e30),
    "tiny": scaled(1e-30),
    "opposite rows": lambda out, in_, g: torch.cat([(a := gaussian(out - out // 2, in_, g)), -a[: out // 2]]),
}


def build(name: str, out: int, in_: int, seed: int = 0) -> Tensor:
    return ZOO[name](out, in_, torch.Generator().manual_seed(seed))
