"""Makes docs/figures/theorems.svg: each bound beside what happens, along the way from a Gaussian to its isometry.

    python docs/figures/theorems.py

The horizontal axis of panels 2-4 is DfI per layer. It runs from the converged projection (left) through blends
(1 − t)·W + t·Q back to a Gaussian W; the line marks where the released 10 steps of Newton–Schulz end.
"""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor

from rekindle.engine.isometry import polar
from rekindle.measures.bounds import covariance_bound, curvature_bound, rank_bound, score_bounds
from rekindle.measures.matrices import deviation_from_isometry, singular_values, squared_frobenius_error, srank

OUT = Path(__file__).with_suffix(".svg")
WIDTH = 256


def draw(*shape: int, seed: int) -> Tensor:
    """Gaussian numbers of one seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def released(w: Tensor) -> Tensor:
    """Frobenius normalization and ten cubic Newton–Schulz steps, as released."""
    return polar(w, solver="paper", steps=10)


def dfi(w: Tensor) -> float:
    """Deviation from isometry at scale 1."""
    return deviation_from_isometry(w).item()


def blends(w: Tensor, count: int) -> list[Tensor]:
    """From the isometry (almost) to the matrix itself at the isometry's norm."""
    q = polar(w, tol=0.0)
    w = w / w.norm() * q.norm()
    shares = torch.logspace(-4, 0, count, dtype=torch.float64).tolist()
    return [(1 - t) * q + t * w for t in shares]


def covariance(ax: Axes) -> None:
    """Panel 1."""
    w, z = draw(WIDTH, WIDTH, seed=0) / math.sqrt(WIDTH), draw(512, WIDTH, seed=1)
    h = F.relu(z @ w.mT)
    xs, actual, bound = [], [], []
    for size in torch.logspace(-5, 0, 21, dtype=torch.float64).tolist():
        changed = w + size * draw(WIDTH, WIDTH, seed=2) / math.sqrt(WIDTH)
        h2 = F.relu(z @ changed.mT)
        sfe = squared_frobenius_error(w, changed).item()
        norm = max(singular_values(each)[0].item() for each in (w, changed))
        least = min(h.norm().item(), h2.norm().item())
        xs.append(sfe)
        actual.append((h @ h.mT / h.square().sum() - h2 @ h2.mT / h2.square().sum()).norm().item())
        bound.append(covariance_bound(sfe, inputs=z.norm().item(), features=least, layers=1, spectral_norm=norm))
    ax.loglog(xs, bound, label="bound")
    ax.loglog(xs, actual, label="measured")
    ax.axhline(math.sqrt(2), color="gray", lw=0.8, ls=":")
    ax.text(xs[0], 1.6, "√2: cannot be exceeded", fontsize=7, color="gray")
    ax.axvline(squared_frobenius_error(w, polar(w)).item(), color="gray", lw=0.8)
    ax.text(
        squared_frobenius_error(w, polar(w)).item() * 0.8,
        1e-5,
        "projection of a Gaussian",
        rotation=90,
        fontsize=7,
        ha="right",
    )
    ax.set(title="1. SFE and the feature covariance", xlabel="SFE of one 256×256 layer", ylabel="‖C − C̃‖")


def curvature(ax: Axes) -> None:
    """Panel 2."""
    width, depth = 5, 3
    starts = [draw(width, width, seed=10 + k) for k in range(depth)]
    z = torch.linalg.qr(draw(40, width, seed=3))[0] * math.sqrt(40)
    y = torch.randint(0, width, (40,), generator=torch.Generator().manual_seed(4))
    xs, actual = [], []
    for weights in zip(*(blends(w, 25) for w in starts), strict=True):

        def loss(flat: Tensor) -> Tensor:
            h = z
            for part in flat.split(width * width):
                h = h @ part.view(width, width).mT
            return F.cross_entropy(h, y)

        flat = torch.cat([w.flatten() for w in weights])
        xs.append(sum(dfi(w) for w in weights) / depth)
        actual.append(torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat)).abs().max().item())
    wide = torch.logspace(-7, 2, 40).tolist()
    bound = [curvature_bound([x] * depth, hessian=0.5, gradient=math.sqrt(2)) for x in wide]
    ax.loglog(wide, bound, label="bound")
    ax.loglog(xs, actual, label="measured (5×5)")
    mark(ax, dfi(released(draw(WIDTH, WIDTH, seed=20))))
    ax.set(title="2. DfI and curvature (3 layers)", xlabel="DfI per layer", ylabel="‖∇²L‖")


def rank(ax: Axes) -> None:
    """Panel 3."""
    w = draw(WIDTH, WIDTH, seed=20)
    z = torch.linalg.qr(draw(2 * WIDTH, WIDTH, seed=21))[0]
    points = [(dfi(each), each) for each in blends(w, 25)]
    xs = [x for x, _ in points]
    bound = [rank_bound(dfi=x, dimensions=WIDTH) for x in xs]
    ax.semilogx(xs, [math.nan if b is None else b for b in bound], label="bound")
    ax.semilogx(xs, [srank(singular_values(z @ each.mT)).item() for _, each in points], label="measured")
    mark(ax, dfi(released(w)))
    ax.set(
        title="3. DfI and feature rank (256×256)",
        xlabel="DfI",
        ylabel="srank, δ = 0.01",
        ylim=(0.8 * WIDTH, WIDTH * 1.02),
    )


def scores(ax: Axes) -> None:
    """Panel 4."""
    points = [(dfi(each), each.norm(dim=1)) for each in blends(draw(WIDTH, WIDTH, seed=30), 25)]
    xs = [x for x, _ in points]
    bounds = [score_bounds(dfi=x) or (math.nan, math.nan) for x in xs]
    ax.fill_between(xs, [low for low, _ in bounds], [high for _, high in bounds], alpha=0.3, label="bound")
    for pick in (torch.min, torch.max):
        line = [(pick(norms) / norms.mean()).item() for _, norms in points]
        ax.plot(xs, line, color="C1", label="measured" if pick is torch.min else None)
    ax.set_xscale("log")
    mark(ax, dfi(released(draw(WIDTH, WIDTH, seed=30))))
    ax.set(
        title="4. DfI and dormancy scores (256×256)", xlabel="DfI", ylabel="lowest and highest score", ylim=(0.5, 1.5)
    )


def mark(ax: Axes, x: float) -> None:
    """Where DfI is 1, and where the released recipe ends."""
    ax.axvline(1, color="gray", lw=0.8, ls=":")
    ax.axvline(x, color="C3", lw=1)
    ax.text(
        x,
        0.03,
        " released 10 steps",
        rotation=90,
        fontsize=7,
        color="C3",
        transform=ax.get_xaxis_transform(),
        va="bottom",
        ha="right",
    )


def main() -> None:
    """Draw and save."""
    torch.set_num_threads(1)
    plt.rcParams["svg.hashsalt"] = "rekindle"
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
    for panel, ax in zip((covariance, curvature, rank, scores), axes.flat, strict=True):
        panel(ax)
        ax.legend(frameon=False, fontsize=8)
        ax.title.set_fontsize(10)
    figure.savefig(OUT, metadata={"Date": None})
    print(OUT)


if __name__ == "__main__":
    main()
