"""One rank of a DDP run on gloo: `python ranks_worker.py RANK WORLD STORE`; prints what it found as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rekindle
from rekindle import methods
from rekindle.triggers import DormancyAbove


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)
    )


def fingerprint(model: nn.Module, optimizer: Any) -> list[float]:
    slots = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [float(t.double().sum()) for t in (*model.parameters(), *slots)]


def train(make: Callable[[Any, Any], Any], average: nn.Module | None = None) -> tuple[list[float], Any]:
    """Each rank has its own data; the method's decisions and draws must agree all the same."""
    inner = network()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    with make(model, optimizer) as remedy:
        for _ in range(8):
            x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            # Only rank 0 sees enough dormant units: what it decides holds for all.
            remedy.step(dormant=0.9 if dist.get_rank() == 0 else 0.1)
    return fingerprint(inner, optimizer), remedy


def broken(model: Any, optimizer: Any = None, **more: Any) -> Any:
    raise ValueError("not this time")


def main() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    found["fire"], remedy = train(lambda m, o: rekindle.attach(m, o, "fire", at=3, monitor=2))
    found["fire firings"] = [f.step for f in remedy.firings]
    found["trigger"], remedy = train(
        lambda m, o: rekindle.attach(m, o, methods.FullReset(), when=DormancyAbove(0.5, most=1))
    )
    found["trigger firings"] = [f.step for f in remedy.firings]
    # Statistics differ between ranks: which neurons go must not.
    found["redo"], remedy = train(lambda m, o: rekindle.attach(m, o, methods.ReDo(tau=0.8), at=[3, 6]))
    found["redo changed"] = [list(r.changed) for r in remedy.receipts]
    found["cbp"], _ = train(
        lambda m, o: rekindle.attach(m, o, methods.ContinualBackprop(replacement_rate=0.1, maturity_threshold=2))
    )
    guard = rekindle.Guard(
        [(torch.randn(4, 6) + rank, torch.zeros(4).long())], lambda m, b: F.cross_entropy(m(b[0]), b[1]), max_rise=-9.0
    )
    found["guard"], remedy = train(lambda m, o: rekindle.attach(m, o, "fire", at=3, guard=guard))
    found["guard rolled back"] = [r.rolled_back for r in remedy.receipts]
    found["plain"], _ = train(lambda m, o: rekindle.attach(m, o, "fire"))
    try:
        train(lambda m, o: rekindle.attach(m, o, broken, at=2))
    except Exception as error:
        found["error"] = type(error).__name__
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
