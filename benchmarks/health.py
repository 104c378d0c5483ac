"""What looking costs: the monitor's share of training, and spectra against WeightWatcher.

    python benchmarks/health.py [--rounds 3]

Both sides of every ratio run in this process, alternating; the medians are compared. The monitor's share is processor
time on one thread. Spectra are compared twice: as a user meets them (all threads, the clock on the wall), and on one
thread by processor time, with the arithmetic that cannot be done without. Needs weightwatcher
(`pip install "torch-rekindle[bench]"`) for the second part.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rekindle.blocks.finding import find
from rekindle.diagnosis.examination import health
from rekindle.lab.networks import network
from rekindle.measures.spectra import eigenvalues, gram, one_blas_thread
from rekindle.monitoring.monitor import Monitor

EVERY = 100
Draw = Callable[[], tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        b, t, w = x.shape
        q, k, v = (part(x).view(b, t, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w))


class GPT(nn.Module):
    """A plain pre-norm decoder."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width), self._mlp(width)])
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    @staticmethod
    def _mlp(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids → scores."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for norm1, attention, norm2, mlp in self.layers:
            x = x + attention(norm1(x))
            x = x + mlp(norm2(x))
        return self.head(self.norm(x))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def resnet18() -> nn.Module:
    return network("resnet18", shape=(3, 224, 224), classes=1000, seed=0, stem="imagenet")


def gpt2_small() -> nn.Module:
    """The 12 layers of GPT-2-small; the vocabulary is short, since neither side is to look at the token table."""
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(vocab_size=64))


def training_step(
    model: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        x, y = batch()
        optimizer.zero_grad()
        output = model(x)
        F.cross_entropy(output.flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return optimizer, step


def overhead(name: str, model: nn.Module, batch: Draw, rounds: int) -> None:
    """In turn: steps without the monitor, steps with it that are not sampled, and one that is."""
    optimizer, step = training_step(model, batch)
    for _ in range(10):
        step()
    monitor = Monitor(model, optimizer, every=EVERY)
    monitor.detach()
    plain, waiting, sampled = [], [], []
    for _ in range(rounds):
        for _ in range(5):
            plain.append(timed(step, collect=False))
            with monitor:
                monitor.steps = 0
                waiting.append(timed(step, collect=False))
        with monitor:
            monitor.steps = EVERY - 1
            sampled.append(timed(step, collect=False))
    base, idle, full = (statistics.median(each) for each in (plain, waiting, sampled))
    share = (full - idle) / base / EVERY
    print(
        f"{name}: step {base * 1e3:.2f} ms; a sample costs {(full - idle) / base:.2f} steps, "
        f"{share:.2%} at one in {EVERY} "
        f"(bar 3 %); between samples {idle / base - 1:+.2%} (the noise of the clock)",
        flush=True,
    )


def timed(work: Callable[[], object], *, collect: bool = True, clock: Callable[[], float] = time.process_time) -> float:
    if collect:
        gc.collect()
    began = clock()
    work()
    return clock() - began


def weightwatcher(model: nn.Module) -> Callable[[], object]:
    import weightwatcher as ww

    logging.getLogger("weightwatcher").setLevel(logging.ERROR)

    def analyze() -> object:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            watcher = ww.WeightWatcher(model=model)
            layers = watcher.describe()
            same = layers[layers.layer_type != "embedding"].layer_id.tolist()
            return watcher.analyze(layers=same, plot=False)

    return analyze


def floors(model: nn.Module) -> tuple[Callable[[], object], Callable[[], object]]:
    """The arithmetic that no route through Gram matrices can do without: half of each in float64 and its eigenvalues
    (BLAS syrk and LAPACK, as fast as numpy has them), or half of each in float32."""
    read = [found for found in find(model) if found.role != "embedding"]
    matrices = [block.read(model.get_parameter(each.key).detach()) for each in read for block in each.blocks]

    def full() -> None:
        for each in matrices:
            eigenvalues(gram(each.double()))

    return full, lambda: [gram(each) for each in matrices]


def spectra(name: str, model: nn.Module, rounds: int) -> None:
    """Both look at the same weights: convolutions tap by tap; rekindle reads the fused q/k/v as three matrices."""
    matrices = sum(found.count for found in find(model) if found.blocks and found.role != "embedding")
    least, least_cheap = floors(model)
    works: dict[str, Callable[[], object]] = {
        "weightwatcher": weightwatcher(model),
        "full": lambda: health(model, mode="full"),
        "cheap": lambda: health(model, mode="cheap"),
    }
    ww, full, cheap = medians(works, rounds, time.perf_counter)
    print(
        f"{name} ({matrices} matrices), {torch.get_num_threads()} threads: WeightWatcher {ww:.2f} s; "
        f"full {full:.2f} s = {ww / full:.1f}× faster (bar 3×), cheap {cheap:.2f} s = {ww / cheap:.1f}× (bar 15×)",
        flush=True,
    )
    with one_thread():
        works |= {"least full": least, "least cheap": least_cheap}
        ww, full, cheap, floor, cheap_floor = medians(works, rounds, time.process_time)
    print(
        f"{name}, one thread: WeightWatcher {ww:.2f} s; full {full:.2f} s = {ww / full:.1f}× (its Gram matrices and "
        f"eigenvalues alone {ww / floor:.1f}×), cheap {cheap:.2f} s = {ww / cheap:.1f}× (its Gram matrices alone "
        f"{ww / cheap_floor:.1f}×)",
        flush=True,
    )


def medians(works: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> list[float]:
    times: dict[str, list[float]] = {each: [] for each in works}
    for _ in range(rounds):
        for each, work in works.items():
            times[each].append(timed(work, clock=clock))
    return [statistics.median(each) for each in times.values()]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with one_blas_thread():
        yield
    torch.set_num_threads(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-weightwatcher", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    with one_thread():
        monitoring(options.rounds)
    if not options.skip_weightwatcher:
        spectra("ResNet-18", resnet18(), options.rounds)
        spectra("GPT-2-small", gpt2_small(), options.rounds)


def monitoring(rounds: int) -> None:
    images = torch.randn(128, 784), torch.randint(0, 10, (128,))
    overhead("MLP 784-256-256-10, batch 128", mlp(), lambda: images, rounds=20 * rounds)
    ids = torch.randint(0, 65, (8, 65))
    shifted = ids[:, :-1], ids[:, 1:]
    gpt = GPT(layers=4, width=128, heads=4, vocabulary=65, context=64)
    overhead("GPT, 4 layers of width 128, 8×64 tokens", gpt, lambda: shifted, rounds=5 * rounds)


if __name__ == "__main__":
    main()
