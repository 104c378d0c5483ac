"""What the laboratory's loop costs, and what training many networks as one gains.

    OMP_NUM_THREADS=1 python benchmarks/lab.py

First samples per second of the loop and of a bare torch loop, timed alternately in one run. Both train the same network
on the same data with fused Adam and count right answers on the way; the goal is 0.95 of the bare loop. Then
network-steps per second of whole runs, evaluations included: many runs as one stack (each with its own seed) against
one run by itself. The data are random: only the cost is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from measuring import interleaved
from rekindle.lab import together, train
from rekindle.lab.arms import ARMS
from rekindle.lab.settings import Setting
from rekindle.lab.sources import Examples, Stream, Task, Text
from rekindle.lab.streams import register
from rekindle.lab.train import Learner, Run

BAR = 0.95
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"width": [128, 128, 128]},
    "resnet18": {"width": 8},
    "gpt": {"layers": 2, "width": 64, "heads": 4, "tied": False},
}
BATCH = {"mlp": 32, "resnet18": 128, "gpt": 16}
STEPS = {"mlp": 400, "resnet18": 8, "gpt": 30}


MANY: list[tuple[str, Setting, int, float]] = [
    (f"{name}, {count} networks", Setting(name, "many", network, {}, options, batch=batch, health=False), count, goal)
    for name, network, options, batch, count, goal in (
        ("MLP width 64, batch 16", "mlp", {"width": [64, 64]}, 16, 64, 5.0),
        ("MLP width 64, batch 16", "mlp", {"width": [64, 64]}, 16, 32, 5.0),
        ("MLP width 128, batch 32", "mlp", {"width": [128, 128]}, 32, 32, 2.0),
        ("small CNN, batch 20", "cnn", {"width": 8, "depth": 2, "hidden": 32}, 20, 16, 1.4),
        ("small CNN with BatchNorm", "cnn", {"width": 8, "depth": 2, "hidden": 32, "norm": "batch"}, 20, 16, 1.4),
    )
]


@register("many")
def small(seed: int) -> Stream:
    """One task of small random images."""
    draws = torch.Generator().manual_seed(seed)
    data = Examples(torch.randn(640, 1, 8, 8, generator=draws), torch.randint(10, (640,), generator=draws))
    return Stream("many", 10, (1, 8, 8), 1, lambda _: Task("task", data, epochs=4))


@register("benchmark")
def made_up(seed: int, *, network: str) -> Stream:
    """One task of random data in the shape that the network is used with."""
    draws = torch.Generator().manual_seed(seed)
    if network == "gpt":
        text = Text(torch.randint(65, (20_000,), generator=draws), context=32)
        return Stream("benchmark", 65, (32,), 1, lambda _: Task("task", text, steps=STEPS[network]))
    shape = (1, 28, 28) if network == "mlp" else (3, 16, 16)
    x = torch.randn(1600, *shape, generator=draws)
    data = Examples(x, torch.randint(10, (1600,), generator=draws))
    return Stream("benchmark", 10, shape, 1, lambda _: Task("task", data, steps=STEPS[network]))


def in_the_lab(setting: Setting) -> Callable[[], object]:
    """The training loop of `rekindle.lab`, without evaluations."""
    stream = setting.make_stream(0)
    learner, task = Learner(Run(setting, ARMS["nothing"], 0), stream), stream[0]

    def train() -> None:
        with learner:
            for _ in learner.learn(0, task):
                pass

    return train


def bare(setting: Setting) -> Callable[[], object]:
    """What one writes by hand."""
    stream = setting.make_stream(0)
    model, source = setting.make_network(stream, 0), stream[0].train
    draws = torch.Generator().manual_seed(0)

    def batches() -> Any:
        if isinstance(source, Text):
            reach = torch.arange(source.context + 1)
            for _ in range(STEPS["gpt"]):
                start = torch.randint(len(source.tokens) - source.context, (setting.batch, 1), generator=draws)
                window = source.tokens[start + reach]
                yield window[:, :-1], window[:, 1:]
            return
        left = STEPS[setting.network]
        while True:
            for index in torch.randperm(len(source.y), generator=draws).split(setting.batch):
                yield source.x[index], source.y[index]
                left -= 1
                if not left:
                    return

    def train() -> Tensor:
        optimizer = torch.optim.Adam(model.parameters(), lr=setting.lr, fused=True)
        right = torch.zeros((), dtype=torch.long)
        for x, y in batches():
            answers = model(x)
            loss = cross_entropy(answers.flatten(0, -2), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (answers.argmax(-1) == y).sum()
        return right

    return train


def gain(setting: Setting, count: int, rounds: int) -> tuple[float, float]:
    """Network-steps per second: of many runs as one, and of one by itself."""
    runs = [Run(setting, ARMS["nothing"], seed) for seed in range(count)]
    steps = setting.make_stream(0)[0].length(setting.batch)
    seconds = interleaved(
        {"many": lambda: list(together.execute(runs)), "one": lambda: list(train.execute(runs[0]))}, rounds
    )
    return count * steps / seconds["many"], steps / seconds["one"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=list(NETWORKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"samples a second of process time, median of {options.rounds} rounds in turns, one thread")
    missed = []
    for name in [options.only] if options.only else NETWORKS:
        setting = Setting(name, "benchmark", name, {"network": name}, NETWORKS[name], batch=BATCH[name])
        seconds = interleaved({"lab": in_the_lab(setting), "bare": bare(setting)}, options.rounds)
        count = BATCH[name] * STEPS[name]
        ratio = seconds["bare"] / seconds["lab"]
        print(f"  {name:10} lab {count / seconds['lab']:10.0f}   bare {count / seconds['bare']:10.0f}   {ratio:.3f}×")
        missed += [name] if ratio < BAR else []
    if not options.only:
        print("network-steps per second of process time: many runs as one, one by itself")
        for name, setting, networks, goal in MANY:
            many, one = gain(setting, networks, max(3, options.rounds // 5))
            print(f"  {name:38} {many:8.0f} {one:8.0f}   {many / one:.2f}× (goal {goal})")
            missed += [name] if many < goal * one else []
    print("goals: " + (f"missed by {', '.join(missed)}" if missed else "met"))


if __name__ == "__main__":
    main()
