"""The numerical claims of the paper and of what was written about it, measured, for docs/evidence/claims.md.

    OMP_NUM_THREADS=1 python benchmarks/claims.py          # about a minute

Every line has ten seeds (mean, and the smallest and largest in brackets) unless it is exact. Then every table of the
six pages of evidence is computed again from its stored runs; the exit code is 1 if one differs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import rekindle
from rekindle.lab.networks import network

SEEDS = range(10)


def recipe(w: Tensor, steps: int, spectral: bool = False) -> Tensor:
    """Newton–Schulz as published, in float64; `spectral` divides by σ_max instead of the Frobenius norm."""
    x = w.double() / (torch.linalg.matrix_norm(w.double(), 2) if spectral else w.double().norm())
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x @ (x.mT @ x)
    return x


def dfi(x: Tensor) -> float:
    return float((x.double().mT @ x.double() - torch.eye(x.shape[1], dtype=torch.float64)).square().sum())


def over_seeds(measure: Callable[[int], float]) -> str:
    values = [measure(seed) for seed in SEEDS]
    return f"{sum(values) / len(values):.3g} [{min(values):.3g}, {max(values):.3g}]"


def gaussian(n: int, seed: int) -> Tensor:
    return torch.randn(n, n, generator=torch.Generator().manual_seed(seed))


def steps_to(limit: float, n: int, seed: int, spectral: bool) -> int:
    x = recipe(gaussian(n, seed), 0, spectral)
    for taken in range(200):
        if dfi(x) < limit:
            return taken
        x = 1.5 * x - 0.5 * x @ (x.mT @ x)
    return 200


def trained(seed: int) -> list[Tensor]:
    """The hidden weights of an MLP after two thousand steps of Adam on random labels."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = torch.randn(400, 64), torch.randint(10, (400,))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for step in range(2000):
        rows = slice(step * 40 % 400, step * 40 % 400 + 40)
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [net[0].weight.detach(), net[2].weight.detach()]


def adam_after(policy: str) -> float:
    """The first step after a reset, relative to the rate: a weight that 1,000 steps of Adam have brought to rest."""
    w = nn.Parameter(torch.zeros(200))
    optimizer = torch.optim.Adam([w], lr=1e-3)
    for _ in range(1000):
        w.grad = torch.randn(200)
        optimizer.step()
    state = optimizer.state[w]
    if policy != "kept":
        state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
    if policy == "fresh":
        state["step"].zero_()
    before = w.detach().clone()
    w.grad = torch.randn(200)
    optimizer.step()
    return float((w.detach() - before).abs().mean() / 1e-3)


def cost(name: str, shape: tuple[int, ...], classes: int, batch: Tensor, **sizes: int) -> float:
    """How many training steps one `fire` takes as long as."""
    model = network(name, shape=shape, classes=classes, seed=0, **sizes)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        out = model(batch)
        nn.functional.cross_entropy(out.flatten(0, -2), torch.zeros(out[..., 0].numel(), dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(act: Callable[[], object], times: int) -> float:
        found = []
        for _ in range(times):
            began = time.perf_counter()
            act()
            found.append(time.perf_counter() - began)
        return sorted(found)[times // 4]

    step()
    return timed(lambda: rekindle.fire(model, optimizer), 8) / timed(step, 20)


def smallest(seed: int, steps: int) -> float:
    return float(torch.linalg.svdvals(recipe(gaussian(512, seed), steps))[-1])


def largest_met(seed: int) -> float:
    """The largest singular value in a hundred steps from a spread of 1e8; above √3 the iteration would diverge."""
    u, _, v = torch.linalg.svd(gaussian(64, seed).double())
    w = (u * torch.logspace(0, -8, 64, dtype=torch.float64)) @ v
    return max(float(torch.linalg.svdvals(recipe(w, steps))[0]) for steps in range(0, 100, 5))


def main() -> None:
    torch.set_num_threads(1)
    print("DfI that the recipe leaves on Gaussian 512×512, and the smallest singular value:")
    for steps in (5, 8, 10, 15, 20, 30):
        left = over_seeds(lambda seed, n=steps: dfi(recipe(gaussian(512, seed), n)))
        print(f"  {steps:3d} steps: {left}; {over_seeds(lambda seed, n=steps: smallest(seed, n))}")
    print("  rekindle.polar:", over_seeds(lambda seed: dfi(rekindle.polar(gaussian(512, seed)))))
    print("steps until DfI < 1e-6, dividing by the Frobenius norm; by the spectral norm:")
    for n in (64, 512):
        frobenius, spectral = (over_seeds(lambda seed, n=n, b=b: steps_to(1e-6, n, seed, b)) for b in (False, True))
        print(f"  Gaussian {n}²: {frobenius}; {spectral}")
    nets = [trained(seed) for seed in SEEDS]
    five, ten = (over_seeds(lambda seed, n=n: max(dfi(recipe(w, n)) for w in nets[seed])) for n in (5, 10))
    print(f"DfI after 5 and 10 steps on trained 64² weights: {five}; {ten}")
    print("largest singular value in 100 steps from a spread of 1e8:", over_seeds(largest_met))
    grown = 512 / float(nn.Linear(512, 512).weight.detach().norm())
    print(f"‖√fan_in·Q‖ over ‖W‖ of a new Linear(512, 512): {grown:.1f}")
    torch.manual_seed(0)
    for policy in ("kept", "moments", "fresh"):
        print(
            f"first step of Adam in learning rates, {policy}:", over_seeds(lambda _, policy=policy: adam_after(policy))
        )
    print("one fire in training steps:")
    print(f"  MLP 784-128³-10, batch 32: {cost('mlp', (784,), 10, torch.randn(32, 784)):.1f}")
    images, tokens = torch.randn(128, 3, 16, 16), torch.randint(100, (32, 32))
    print(f"  ResNet-18 width 8, batch 128: {cost('resnet18', (3, 16, 16), 10, images, width=8):.2f}")
    print(f"  GPT 2×64, batch 32×32: {cost('gpt', (32,), 100, tokens, layers=2, heads=2, width=64):.2f}")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "studies"))
    import evidence

    wrong = evidence.differing()
    print("pages that differ from their stored runs:", ", ".join(wrong) or "none")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
