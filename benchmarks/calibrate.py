"""Prints the row of `rekindle.engine.tuning` for the machine that it runs on: which route pays up to how many rows.

    OMP_NUM_THREADS=1 python benchmarks/calibrate.py            # two minutes on a quiet core

For each size the routes and ten lean cubic steps are timed alternately on one batch, in process time, and given as
multiples of one batched product. The row is copied into the table by hand: nothing is timed at run time.
"""

from __future__ import annotations

import argparse
import sys

import torch

from measuring import interleaved, processor
from polar import lean
from rekindle import polar
from rekindle.engine import cpu


def measured(n: int, rounds: int) -> dict[str, float]:
    """The cost of each route on a batch of Gaussian n×n matrices, in products."""
    w = torch.randn(max(4, 2**20 // (n * n)), n, n, generator=torch.Generator().manual_seed(n))
    rivals = {"product": lambda: torch.bmm(w, w), "lean": lambda: lean(w)}
    for route in ("svd", "products", "halley") if n <= 32 else ("products", "halley"):
        rivals[route] = lambda route=route: polar(w, solver=route)  # type: ignore[misc]
    times = interleaved(rivals, rounds)
    return {name: spent / times["product"] for name, spent in times.items() if name != "product"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", default=[4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(processor())
    svd = products = 0
    for n in arguments.sizes:
        cost = measured(n, arguments.rounds)
        print(f"{n:4}²  " + "  ".join(f"{name} {spent:6.1f}" for name, spent in cost.items()), flush=True)
        svd = n if cost.get("svd", float("inf")) <= min(cost["products"], cost["halley"]) else svd
        products = n if cost["products"] <= cost["halley"] else products
    print(f'("{cpu.vendor()}", "{cpu.capability()}"): Tuning({svd}, {products}, 64, "measured on …"),')
    return 0


if __name__ == "__main__":
    sys.exit(main())
