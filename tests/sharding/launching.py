"""Many cases in one launch of torchrun: starting processes takes seconds, a case milliseconds.

Modules `*_cases.py` hold functions `case_*`, run on every rank; what one raises is written to a file per rank, and a
test looks there. `@world(4)` marks a case that needs this number of processes. By hand, for some cases:

    PYTHONPATH=src:tests:tests/sharding torchrun --nproc-per-node=2 tests/sharding/launching.py FOLDER case_fsdp2
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULES = sorted(Path(__file__).parent.glob("*_cases.py"))
TIMEOUT = 400  # seconds on a busy machine; a quiet one takes a tenth


def launch(world: int, folder: Path, names: list[str] | None = None) -> dict[str, list[str | None]]:
    """Run all cases (or these) on `world` processes; what each rank raised, by case."""
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += [str(here / "launching.py"), str(folder), *(names or [])]
    done = subprocess.run(command, env=surroundings(), capture_output=True, text=True, timeout=TIMEOUT)
    results: dict[str, list[str | None]] = {}
    for rank in range(world):
        path = folder / f"{rank}.json"
        if not path.exists():
            raise AssertionError(f"rank {rank} wrote no results:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        for name, text in json.loads(path.read_text("utf-8")).items():
            results.setdefault(name, []).append(text)
    return results


def surroundings() -> dict[str, str]:
    """The environment of a rank: one thread, this tree's package."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # some VMs announce AMX and die of it
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests/support"), str(Path(__file__).parent)]),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def cases(world: int) -> list[str]:
    """The names of the cases for this number of processes, read from the files: importing them here takes long."""
    found, wanted = [], 0
    for path in MODULES:
        for line in path.read_text("utf-8").splitlines():
            if line.startswith("@world("):
                wanted = int(line.removeprefix("@world(").partition(")")[0])
            if line.startswith("def case_"):
                if wanted in (0, world):
                    found.append(line.removeprefix("def ").partition("(")[0])
                wanted = 0
    return found


def world(size: int) -> Callable[[Any], Any]:
    """Mark a case as one for this number of processes only."""

    def mark(function: Any) -> Any:
        function.world = size
        return function

    return mark


def main() -> None:
    """Run the cases on this rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    folder, only = Path(sys.argv[1]), sys.argv[2:]
    found = {name: value for path in MODULES for name, value in vars(importlib.import_module(path.stem)).items()}
    results: dict[str, str | None] = {}
    for name, function in found.items():
        if not name.startswith("case_") or getattr(function, "world", dist.get_world_size()) != dist.get_world_size():
            continue
        if only and name not in only:
            continue
        try:
            torch.manual_seed(0)
            function()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
