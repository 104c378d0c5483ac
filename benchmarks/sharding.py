"""fire() on several processes: speed against one, and memory against gathering everything.

GPT-2-small's shapes as plain layers, cut by FSDP2, gloo, one thread per rank. Times are the CPU time of the busiest
rank (its communication threads included), because other work on the machine then does not count; wall time stands
beside. Memory is by how much the peak of a rank's process grows.

    python benchmarks/sharding.py                      # 1, 2 and 4 processes, about 2 minutes on a quiet machine
    python benchmarks/sharding.py --layers 4 --rounds 1
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import rekindle
from rekindle.blocks.layouts import matrices
from rekindle.sharding.assembly import Assembly, Item
from rekindle.sharding.spread import Spread
from rekindle.sharding.team import Team

SPEED_BAR, MEMORY_BAR = 1.6, 0.3
LAYOUTS = {"*.qkv.weight": matrices("(part out) in", part=("query", "key", "value"))}


class Layer(nn.Module):
    """The four weights of a transformer layer; nothing is run through them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


def gpt(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(Layer(width) for _ in range(layers))
    return model


def status(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes (Linux)."""
    line = next(
        line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith(field)
    )
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    """Let the peak begin anew; returns what is resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return status("VmRSS")


def bandwidth() -> float:
    """Bytes that a rank sends per second of its own CPU time, packing and assembling included."""
    if dist.get_world_size() == 1:
        return 1e9
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [distribute_tensor(torch.zeros(1024, 1024), mesh, [Shard(0)]) for _ in range(16)]
    layout = matrices("out in")((1024, 1024))[0].layout
    items = [Item(str(i), tensor, Spread.of(tensor), (layout,)) for i, tensor in enumerate(tensors)]
    assembly = Assembly(Team.of(range(dist.get_world_size())), items)
    best = 0.0
    for _ in range(3):
        began = time.process_time()
        for _ in assembly.run(lambda work: None):
            pass
        assert assembly.exchange is not None
        best = max(best, assembly.exchange.bytes_sent / (time.process_time() - began))
    return best


def rank(folder: Path, layers: int, width: int, rounds: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    model = gpt(layers, width)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    warm = gpt(1, 64)
    fully_shard(warm.layers[0], mesh=mesh)
    rekindle.fire(warm, heads=(), layouts=LAYOUTS)
    times, walls, memory = [], [], 0
    for number in range(rounds):
        dist.barrier()
        before, began, wall = forget_peak(), time.process_time(), time.perf_counter()
        receipt = rekindle.fire(model, heads=(), layouts=LAYOUTS, scale="nearest")
        times.append(time.process_time() - began)
        walls.append(time.perf_counter() - wall)
        memory = max(memory, status("VmHWM") - before)
        assert receipt.totals()["residual"] <= 1e-6, number
    before = forget_peak()
    whole = [p.full_tensor() for p in model.parameters()] if size > 1 else []
    everything = status("VmHWM") - before
    del whole
    numbers = sum(p.numel() for p in model.parameters())
    result = {
        "cpu": min(times),
        "wall": min(walls),
        "memory": memory,
        "gathered": max(everything, 4 * numbers),
        "bandwidth": bandwidth(),
        "largest": 4 * width * 4 * width,
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(result), "utf-8")
    dist.barrier()
    os._exit(0)  # torch 2.13 sometimes aborts while it takes down the threads of FSDP2 and gloo


def launch(size: int, options: argparse.Namespace) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", __file__]
        command += ["--rank", folder, "--layers", str(options.layers), "--width", str(options.width)]
        command += ["--rounds", str(options.rounds)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        subprocess.run(command, check=True, env=environment, timeout=900)
        return [json.loads((Path(folder) / f"{rank}.json").read_text("utf-8")) for rank in range(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rank", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options.rank, options.layers, options.width, options.rounds)
        return
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    name = platform.processor() or platform.machine()
    print(f"{name}, {os.cpu_count()} cores, load {load:.1f}, torch {torch.__version__}")
    print(f"{options.layers} layers of width {options.width}, one thread per rank\n")
    print("processes  CPU s (busiest)  wall s  speed-up (CPU)  memory MB  ÷ gather all")
    alone = None
    for size in options.processes:
        ranks = launch(size, options)
        cpu, wall = max(r["cpu"] for r in ranks), max(r["wall"] for r in ranks)
        alone = alone or cpu
        memory = max(r["memory"] for r in ranks)
        share = memory / ranks[0]["gathered"]
        print(
            f"{size:9d}  {cpu:15.2f}  {wall:6.2f}  {alone / cpu:14.2f}"
            f"  {memory / 1e6:9.0f}  {share:12.2f}   ({min(r['bandwidth'] for r in ranks) / 1e6:.0f} MB/s of exchange)"
        )
    print(f"\nwanted: 2 processes ≥ {SPEED_BAR} times, memory ≤ {MEMORY_BAR}")


if __name__ == "__main__":
    main()
