"""Does a probe tell a worn-out network from a fresh one, and how long does it take? On an MLP, a CNN and a GPT.

    python benchmarks/probe.py wear /tmp/worn       # two minutes of one core: networks that learn task after task
    python benchmarks/probe.py measure /tmp/worn    # a minute: `rekindle.probe` with its defaults (30 s at most each)

The MLP and the CNN learn 500 digits with new random labels 13 times, the GPT random tokens 26 times. Then the MLP and
the GPT are asked to learn the next such task, the CNN the true digits (random labels it learns too slowly even when it
is fresh).
"""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rekindle
from rekindle.lab.boundaries import quiet, reach
from rekindle.lab.data import load
from rekindle.lab.evaluation import loss_of
from rekindle.lab.networks import network
from rekindle.lab.settings import SETTINGS

KINDS = ("mlp", "cnn", "gpt")
LEARNING_RATES = {"mlp": 3e-3, "cnn": 1e-3, "gpt": 1e-2}
_GPT = {"layers": 2, "width": 64, "heads": 4, "tied": False}


def made(kind: str, seed: int) -> nn.Module:
    """A fresh network."""
    if kind == "gpt":
        return network("gpt", shape=(32,), classes=64, seed=seed, **_GPT)
    options = {"width": [100, 100, 100]} if kind == "mlp" else {}
    return network(kind, shape=(1, 8, 8), classes=10, seed=seed, **options)


def tokens(task: int) -> list[Any]:
    """64 random sequences with random answers, in four batches."""
    draws = torch.Generator().manual_seed(1000 + task)
    x, y = (torch.randint(64, (64, 32), generator=draws) for _ in range(2))
    return [(x[start : start + 16], y[start : start + 16]) for start in range(0, 64, 16)]


def wear(kind: str) -> dict[str, Any]:
    """The weights of a network that learned many tasks, and the batches of the next."""
    if kind == "gpt":
        torch.manual_seed(0)
        model = made("gpt", 0)
        for task in range(26):
            optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-2)
            batches = tokens(task)
            for step in range(200):
                loss = loss_of(model, batches[step % 4])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return {"model": model.state_dict(), "batches": tokens(99)}
    setting = SETTINGS["digits"]
    if kind == "cnn":
        setting = replace(setting, name="cnn", network="cnn", network_options={})
    boundary = reach(quiet(setting), seed=0)
    batches = boundary.batches
    if kind == "cnn":
        images = load("digits", count=512, seed=0)
        batches = [(images.x[start : start + 32], images.y[start : start + 32]) for start in range(0, 512, 32)]
    return {"model": boundary.model.state_dict(), "batches": batches}


def measure(kind: str, folder: Path) -> None:
    """Probe both, and print scores and times."""
    kept = torch.load(folder / f"{kind}.pt", weights_only=False)
    worn, fresh = made(kind, 0), made(kind, 77)
    worn.load_state_dict(kept["model"])
    for name, model in (("worn out", worn), ("fresh", fresh)):
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATES[kind])
        begun = time.perf_counter()
        found = rekindle.probe(model, kept["batches"], loss=loss_of, optimizer=optimizer)
        low, high = found.interval
        took = time.perf_counter() - begun
        print(
            f"| {kind} | {name} | {found.score:.2f} [{low:.2f}, {high:.2f}] | {found.steps} | {took:.1f} s |",
            flush=True,
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["wear", "measure"])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.what == "measure":
        print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads\n")
        print("| network | | score | steps | time |\n|---|---|---|---|---|")
    for kind in KINDS:
        if given.what == "wear":
            torch.save(wear(kind), given.folder / f"{kind}.pt")
        else:
            measure(kind, given.folder)


if __name__ == "__main__":
    main()
