"""How far a reader must walk: which files of rekindle one call visits, and how often it changes file.

    OMP_NUM_THREADS=1 python benchmarks/paths.py [--files]

Two calls are followed with `sys.setprofile`, in this process: `rekindle.fire(model, optimizer)` on a small network,
and a study of two arms on two tasks, from `Study.run()` down to the training loop (the worker's part is done here
instead of in another process). A file counts if one of its functions runs; a change of file is a call from a function
of rekindle to one in another file of rekindle, torch in between not counted. Imports happen before, and so does a first
call. The bars: `fire` in at most 15 files and 120 changes on a Sequential, 18 and 150 on a class of one's own, the
study in at most 40 files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import rekindle
from rekindle.lab.arms import arms
from rekindle.lab.execution.workers import rows_of
from rekindle.lab.settings import Setting
from rekindle.lab.study import Study

HOME = str(Path(rekindle.__file__).parent)
BARS: dict[str, tuple[int, int | None]] = {"fire": (15, 120), "fire, own class": (18, 150), "lab run": (40, None)}


class Here:
    """An executor that performs each run in this process."""

    slots = 1

    def __init__(self) -> None:
        self.job: tuple[str, dict[str, Any]] | None = None

    def submit(self, identity: str, job: dict[str, Any]) -> None:
        """Keep the run until it is asked for."""
        self.job = (identity, job)

    def events(self, timeout: float) -> list[tuple[str, dict[str, Any]]]:
        """Perform it."""
        assert self.job is not None
        (identity, job), self.job = self.job, None
        return [(identity, row) for row in rows_of("rekindle.lab.execution.workers:perform", job, None)]

    def close(self) -> None:
        """Nothing was opened."""


def followed(call: Callable[[], object]) -> tuple[Counter[str], int, int]:
    """Calls by file, changes of file, and the depth of the deepest call, frames of rekindle only."""
    visits: Counter[str] = Counter()
    stack: list[str | None] = []
    changes = depth = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal changes, depth
        if event == "call":
            name = frame.f_code.co_filename
            inside = name if name.startswith(HOME) and not frame.f_code.co_name.startswith("<module") else None
            if inside is not None:
                above = next((each for each in reversed(stack) if each is not None), None)
                changes += above is not None and above != inside
                visits[inside[len(HOME) + 1 :]] += 1
            stack.append(inside)
            depth = max(depth, sum(each is not None for each in stack))
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return visits, changes, depth


class Own(nn.Module):
    """The same network as a class of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        value: torch.Tensor = self.last(torch.relu(self.second(torch.relu(self.first(x)))))
        return value


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def fire(make: Callable[[], nn.Module]) -> Callable[[], object]:
    torch.manual_seed(0)  # how many steps the solver takes depends on the weights
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    rekindle.fire(model, optimizer)
    return lambda: rekindle.fire(model, optimizer)


def study(folder: Path) -> Callable[[], object]:
    stream = {"data": "digits", "count": 64, "tasks": 2, "epochs": 2}
    setting = Setting("small", "random-labels", "mlp", stream, {"width": [16, 16]}, batch=16)
    grid = Study("paths", [setting], arms(["nothing", "fire"]), [0], folder)
    return lambda: grid.run(on=Here())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true", help="list the files with their calls")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        study(Path(folder) / "first")()  # imports, and the cache of the data
        walks = {
            "fire": followed(fire(plain)),
            "fire, own class": followed(fire(Own)),
            "lab run": followed(study(Path(folder) / "second")),
        }
    for name, (visits, changes, depth) in walks.items():
        most, turns = BARS[name]
        met = len(visits) <= most and (turns is None or changes <= turns)
        bar = f"{most} files" + ("" if turns is None else f", {turns} changes")
        print(f"{name:15} {len(visits):3} files, {changes:5} changes of file, {depth:3} calls deep", end="   ")
        print(f"bar {bar}: {'met' if met else 'missed'}")
        for file, count in visits.most_common() if options.files else ():
            print(f"    {count:6} {file}")


if __name__ == "__main__":
    main()
