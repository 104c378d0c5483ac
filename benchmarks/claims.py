"""The numerical claims of the paper and of what was written about it, measured, for docs/evidence/claims.md.

    OMP_NUM_THREADS=1 python benchmarks/claims.py          # two minutes; writes docs/evidence/runs/claims.json
    python benchmarks/claims.py --check                    # the pages of evidence and README against all stored runs

Every number is stored for each of its seeds; the page's sentences are filled from them (studies/figures.py). The exit
code of --check is 1 if a table or a figure of a page is not that of its stored runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import rekindle
from measuring import processor
from rekindle.lab.networks import network

HOME = Path(__file__).resolve().parents[1]
STORED = HOME / "docs" / "evidence" / "runs" / "claims.json"
SEEDS = range(10)


def recipe(w: Tensor, steps: int, spectral: bool = False) -> Tensor:
    """Newton–Schulz as published, in float64; `spectral` divides by σ_max instead of the Frobenius norm."""
    x = w.double() / (torch.linalg.matrix_norm(w.double(), 2) if spectral else w.double().norm())
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x @ (x.mT @ x)
    return x


def dfi(x: Tensor) -> float:
    return float((x.double().mT @ x.double() - torch.eye(x.shape[1], dtype=torch.float64)).square().sum())


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


def cost(seed: int, name: str, shape: tuple[int, ...], classes: int, batch: Tensor, **sizes: int) -> float:
    """How many training steps the first `fire` of a network takes as long as, both in process time."""
    model = network(name, shape=shape, classes=classes, seed=seed, **sizes)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        out = model(batch)
        nn.functional.cross_entropy(out.flatten(0, -2), torch.zeros(out[..., 0].numel(), dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(act: Callable[[], object]) -> float:
        began = time.process_time()
        act()
        return time.process_time() - began

    step()
    before = [timed(step) for _ in range(5)]
    fire = timed(lambda: rekindle.fire(model, optimizer))
    return fire / statistics.median(before + [timed(step) for _ in range(5)])


def largest_met(seed: int) -> float:
    """The largest singular value in a hundred steps from a spread of 1e8; above √3 the iteration would diverge."""
    u, _, v = torch.linalg.svd(gaussian(64, seed).double())
    w = (u * torch.logspace(0, -8, 64, dtype=torch.float64)) @ v
    return max(float(torch.linalg.svdvals(recipe(w, steps))[0]) for steps in range(0, 100, 5))


def measured() -> dict[str, list[float]]:
    """Every number of the page, by name, for each of its seeds."""
    found = {
        f"dfi-gaussian-512-after-{steps}": [dfi(recipe(gaussian(512, seed), steps)) for seed in SEEDS]
        for steps in (5, 8, 10)
    }
    found["dfi-gaussian-512-exact"] = [dfi(rekindle.polar(gaussian(512, seed))) for seed in SEEDS]
    for name, n, spectral in (("64", 64, False), ("64-spectral", 64, True), ("512", 512, False)):
        found[f"steps-{name}"] = [steps_to(1e-6, n, seed, spectral) for seed in SEEDS]
    found["dfi-trained-64-after-5"] = [max(dfi(recipe(w, 5)) for w in trained(seed)) for seed in SEEDS]
    found["largest-met"] = [largest_met(seed) for seed in SEEDS]
    found["growth-fan-in"] = [512 / float(nn.Linear(512, 512).weight.detach().norm())]
    torch.manual_seed(0)
    for policy in ("kept", "moments", "fresh"):
        found[f"adam-{policy}"] = [adam_after(policy) for _ in SEEDS]
    images, tokens = torch.randn(128, 3, 16, 16), torch.randint(100, (32, 32))
    rekindle.fire(nn.Sequential(nn.Linear(8, 8)))  # what only the first call of a process pays
    for seed in SEEDS:
        mlp = cost(seed, "mlp", (784,), 10, torch.randn(32, 784))
        resnet = cost(seed, "resnet18", (3, 16, 16), 10, images, width=8)
        gpt = cost(seed, "gpt", (32,), 100, tokens, layers=2, heads=2, width=64)
        for name, value in (("mlp", mlp), ("resnet", resnet), ("gpt", gpt)):
            found.setdefault(f"cost-{name}", []).append(value)
    return found


def differing() -> list[str]:
    """What in README and the pages of evidence is not what their stored runs say."""
    sys.path.insert(0, str(HOME / "studies"))
    import evidence
    import figures

    wrong = [f"{name}: a table is not that of its runs" for name in evidence.differing()]
    return wrong + [f"{path.name}: {said}" for path in figures.pages() for said in figures.unfounded(path)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        wrong = differing()
        print("\n".join(wrong) or "all pages are what their runs say")
        sys.exit(bool(wrong))
    torch.set_num_threads(1)
    kept = {"cpu": processor(), "torch": torch.__version__, "values": measured()}
    STORED.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    for name, found in kept["values"].items():
        print(f"{name}: {statistics.mean(found):.3g} [{min(found):.3g}, {max(found):.3g}]")


if __name__ == "__main__":
    main()
