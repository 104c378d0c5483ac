"""What rekindle.fire() costs as a whole, beside the released recipe over the same layers.

Both run in one process on one thread and in turns, so that a busy machine slows them alike; times are process time,
ratios the median over rounds. The recipe is as plain as the paper's code: ten cubic Newton–Schulz steps a matrix, one
matrix after the other, or all taps of a convolution in one batched product where that is faster; no certificate, no
optimizer, no receipt. The verb converges to DfI/k ≤ 1e-6, plans, checks, measures and writes in place.

    OMP_NUM_THREADS=1 python benchmarks/fire.py            # everything, about 4 minutes
    OMP_NUM_THREADS=1 python benchmarks/fire.py --rounds 1 --blocks 3
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rekindle import polar
from rekindle.lab.networks import network
from rekindle.projection.firing import fire
from rekindle.projection.planning import plan

BARS = {"ResNet-18": 2.3, "GPT-2-small": 4.0}
MEMORY_BAR = 60.0


def resnet18() -> nn.Module:
    return network("resnet18", shape=(3, 32, 32), classes=10, seed=0)


def gpt2(blocks: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config(n_layer=blocks))
    return model


def newton_schulz(x: Tensor, steps: int = 10) -> Tensor:
    """x: (…, small, large), any number of matrices."""
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    for _ in range(steps):
        x = 1.5 * x - 0.5 * (x @ x.mT) @ x
    return x


def recipe(w: Tensor) -> Tensor:
    """(…, out, in)"""
    out, in_ = w.shape[-2:]
    x = newton_schulz(w.mT).mT if out > in_ else newton_schulz(w)
    return math.sqrt(out / in_) * x


@torch.no_grad()  # type: ignore[untyped-decorator]
def recipe_over(model: nn.Module, names: tuple[str, ...], batched: bool) -> None:
    for name, weight in model.named_parameters():
        if name not in names:
            continue
        if weight.ndim == 4:
            taps = weight.shape[2] * weight.shape[3]
            if batched:
                new = recipe(weight.permute(2, 3, 0, 1).contiguous()) / taps
                weight.copy_(new.permute(2, 3, 0, 1))
            else:
                for i in range(weight.shape[2]):
                    for j in range(weight.shape[3]):
                        weight[:, :, i, j] = recipe(weight[:, :, i, j]) / taps
        elif "c_attn" in name:
            for part in weight.chunk(3, dim=1):
                part.copy_(recipe(part.T).T)
        elif "transformer" in name:
            weight.copy_(recipe(weight.T).T)
        else:
            weight.copy_(recipe(weight))


def seconds(call: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def compare(label: str, make: Callable[[], nn.Module], rounds: int) -> bool:
    torch.manual_seed(0)
    model = make()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    receipt = fire(model)
    names = receipt.changed
    # The plain loop over taps and the batched one differ by the machine: the verb is held against the faster.
    candidates = (False, True) if any(p.ndim == 4 for p in model.parameters()) else (False,)
    plain = {batched: seconds(lambda b=batched: recipe_over(model, names, b)) for batched in candidates}
    batched = min(plain, key=lambda key: plain[key])
    chosen = plan(model, measure="none").selected
    matrices = [block.read(start[entry.key]).contiguous() for entry in chosen for block in entry.blocks]
    ours, theirs, alone = [], [], []
    for _ in range(rounds):
        model.load_state_dict(start)
        theirs.append(seconds(lambda: recipe_over(model, names, batched)))
        model.load_state_dict(start)
        ours.append(seconds(lambda: fire(model)))
        alone.append(seconds(lambda: polar(matrices, certificate=True)))
    floor = statistics.median(a / b for a, b in zip(theirs, alone, strict=True))
    ratio = statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
    totals = receipt.totals()
    print(
        f"{label}: {totals['parameters']} weights, {totals['matrices']} matrices\n"
        f"  recipe, 10 steps    {statistics.median(theirs):7.2f} s{' (taps batched)' if batched else ''}\n"
        f"  rekindle.fire()     {statistics.median(ours):7.2f} s, DfI/k ≤ {totals['residual']:.1e}\n"
        f"  ratio               {ratio:7.2f}   (bar {BARS[label]}; {floor:.2f} for the solve and its check alone)"
    )
    return ratio >= BARS[label]


def anonymous() -> int:
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def memory(blocks: int) -> None:
    """Print by how many bytes anonymous memory rises during fire(), sampled every millisecond."""
    torch.set_num_threads(1)
    fire(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)))  # what libraries allocate once for themselves
    model = gpt2(blocks)
    gc.collect()
    peak, done, base = 0, threading.Event(), anonymous()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    fire(model)
    done.set()
    watcher.join()
    print(peak - base)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=12, help="transformer blocks of GPT-2-small, 12 for the real one")
    parser.add_argument("--memory-only", action="store_true")
    options = parser.parse_args()
    if options.memory_only:
        memory(options.blocks)
        return 0
    torch.set_num_threads(1)
    fine = compare("ResNet-18", resnet18, options.rounds)
    fine &= compare("GPT-2-small", lambda: gpt2(options.blocks), options.rounds)
    command = [sys.executable, __file__, "--memory-only", "--blocks", str(options.blocks)]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(3)]
    extra = [int(run.split()[-1]) / 1e6 for run in runs]
    spread = ", ".join(f"{each:.1f}" for each in extra)
    print(f"GPT-2-small: memory beyond the model {statistics.median(extra):.1f} MB ({spread})   (bar {MEMORY_BAR:g})")
    return 0 if fine and statistics.median(extra) <= MEMORY_BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
