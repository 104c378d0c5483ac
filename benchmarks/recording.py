"""What a recorded pass costs, in forward passes of the same model on the same batch, measured alternately.

python benchmarks/recording.py
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rekindle.recording import facts_of, record


def seconds(run: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main(rounds: int = 5) -> None:
    """Print the ratios of medians."""
    layer = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(384, 10)).eval()
    batch = torch.randn(4, 128, 384)
    forward, recorded, facts = [], [], []
    with torch.no_grad():
        model(batch)
        for _ in range(rounds):
            forward.append(seconds(lambda: model(batch)))
            recorded.append(seconds(lambda: record(model, batch)))
            graph = record(model, batch)
            facts.append(seconds(lambda: facts_of(graph)))  # noqa: B023
    once = statistics.median(forward)
    noting, following = (statistics.median(times) / once for times in (recorded, facts))
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")
    print(f"forward {once:.3f} s; recording {noting:.1f} and facts {following:.1f} forward passes")


if __name__ == "__main__":
    main()
