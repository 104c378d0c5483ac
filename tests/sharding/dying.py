"""One rank of a group of which another dies in the middle of fire(); started by test_killed_rank, not by torchrun.

torchrun would end the other processes itself. Usage: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rekindle
from rekindle.projection import execution
from rekindle.sharding import owners


def main() -> None:
    folder, kind, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(8)))
    model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    owners.MINIMUM = 1  # one matrix per lot
    before = [p.detach().to_local().clone() for p in model.parameters()]
    solve, calls = execution.solve, 0

    def dies(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 2:
            if kind == "killed":
                os.kill(os.getpid(), 9)
            time.sleep(1000)
        return solve(*args, **options)

    execution.solve = dies
    began = time.perf_counter()
    try:
        rekindle.fire(model, heads=(), atomic=True)
        error = None
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    kept = all(torch.equal(p.detach().to_local(), old) for p, old in zip(model.parameters(), before, strict=True))
    result = {"error": error, "seconds": time.perf_counter() - began, "kept": kept}
    (folder / f"{rank}.json").write_text(json.dumps(result), "utf-8")
    os._exit(0)  # leaving the group properly would wait for the dead


if __name__ == "__main__":
    main()
