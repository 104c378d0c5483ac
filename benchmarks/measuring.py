"""How the benchmarks measure: in turns within one process, so that a busy machine slows all alike."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def processor() -> str:
    """The CPU that figures were measured on, as tables name it: its model and what torch uses of it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    model = facts.get("model name", "an unknown CPU")
    kind = f" (family {facts['cpu family']}, model {facts['model']})" if "cpu family" in facts else ""
    return f"{model}{kind}, {torch.backends.cpu.get_cpu_capability()}"


def interleaved(rivals: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median process time of each rival, run one after the other in every round, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(rounds + 1):
        for name, run in rivals.items():
            start = time.process_time()
            run()
            if turn:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def anonymous() -> int:
    """Bytes of anonymous memory that this process holds."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def growth(run: Callable[[], object]) -> int:
    """By how many bytes anonymous memory rises at its peak during a call, sampled every half millisecond."""
    before, peak, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return max(0, peak[0] - before)
