"""Small checkpoints of every format, and the obvious reference for what FIRE makes of a matrix."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def small_model(seed: int = 0, width: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 4)
    )


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    width = next(model.parameters()).shape[1]
    for _ in range(2):
        model(torch.ones(3, width)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def save_dcp(tree: dict[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=folder, no_dist=True)


def save_sharded(
    tensors: dict[str, Tensor], folder: Path, shards: int = 2, config: dict[str, Any] | None = None
) -> None:
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    each = -(-len(names) // shards)
    weight_map = {}
    for i in range(shards):
        part = names[i * each : (i + 1) * each]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), "utf-8")


def isometry(weight: Tensor) -> Tensor:
    """√(out/in)·UVᵀ in float64: FIRE at the paper's scale, from the formula."""
    u, _, vh = torch.linalg.svd(weight.double(), full_matrices=False)
    return (weight.shape[0] / weight.shape[1]) ** 0.5 * (u @ vh)


def digest(path: Path) -> str:
    """Every byte and name of a file or folder."""
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            found.update(f"{file.name}\0".encode() + file.read_bytes())
    return found.hexdigest()


def in_child(work: Callable[[], Any], *, after: float | None = None) -> int:
    """Run something in a forked process, killed with SIGKILL after a time; 0, 1 for an error, -9 for a kill."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # a forked process must not wait for its parent's threads
            if after is not None:
                signal.setitimer(signal.ITIMER_REAL, max(after, 1e-6))
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".rekindle-" in path.name)
