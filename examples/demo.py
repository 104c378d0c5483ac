"""A network loses its plasticity on real images, and rekindle gives it back: what `make demo` runs.

One MLP learns scikit-learn's 1,797 handwritten digits with random labels, over and over: each task draws new labels,
so it is as hard as the one before, and only the network's ability to learn can change. Three arms get the same data in
the same order: do nothing, start afresh at every task, or call `rekindle.fire(model, optimizer)` at every task.

    python examples/demo.py                                          # one seed, about a minute
    python examples/demo.py --seeds 5 --picture docs/images/demo.svg # the picture in the README
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import rekindle

TASKS, EPOCHS, BATCH, RATE, WIDTH = 12, 12, 32, 2e-3, 100
ARMS = ("nothing", "fresh start", "fire")


def digits() -> Tensor:
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().data, dtype=torch.float32)
    return (images - images.mean()) / images.std()


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    into = 64
    for _ in range(3):
        layers += [nn.Linear(into, WIDTH), nn.ReLU()]
        into = WIDTH
    return nn.Sequential(*layers, nn.Linear(into, 10))


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), RATE, fused=True)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, g: torch.Generator) -> float:
    """Train on one task; the share of answers that were right while learning."""
    right = 0
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x), generator=g).split(BATCH):
            answers = model(x[batch])
            optimizer.zero_grad()
            nn.functional.cross_entropy(answers, y[batch]).backward()
            optimizer.step()
            right += int((answers.argmax(1) == y[batch]).sum())
    return right / (EPOCHS * len(x))


def run(arm: str, x: Tensor, seed: int, tick: Callable[[], None]) -> tuple[list[float], nn.Module]:
    """The accuracy of each task in turn, and the network at the end."""
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    model = network()
    optimizer = adam(model)
    accuracies = []
    for task in range(TASKS):
        labels = torch.randint(10, (len(x),), generator=g)
        if task and arm == "fire":
            rekindle.fire(model, optimizer)
        elif task and arm == "fresh start":
            model = network()
            optimizer = adam(model)
        accuracies.append(learn(model, optimizer, x, labels, g))
        tick()
    return accuracies, model


def show(results: dict[str, list[list[float]]]) -> None:
    print("\nshare of right answers while learning a task (chance is .10)")
    print("task        " + "".join(f"{task + 1:>6}" for task in range(TASKS)))
    for arm, runs in results.items():
        means = [statistics.mean(task) for task in zip(*runs, strict=True)]
        print(f"{arm:<12}" + "".join(f"{value:6.2f}" for value in means))


def picture(results: dict[str, list[list[float]]], path: Path) -> None:
    import matplotlib
    from scipy.stats import t

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "rekindle"
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    for (arm, runs), colour in zip(results.items(), ("#9a9a9a", "#3b76af", "#d9480f"), strict=True):
        values = torch.tensor(runs)
        mean, tasks = values.mean(0), range(1, TASKS + 1)
        axes.plot(tasks, mean, color=colour, lw=2.2, label=arm)
        if len(runs) > 1:
            half = float(t.ppf(0.975, len(runs) - 1)) * values.std(0) / len(runs) ** 0.5
            axes.fill_between(tasks, mean - half, mean + half, color=colour, alpha=0.2, lw=0)
        axes.annotate(f" {arm}", (TASKS, float(mean[-1])), color=colour, va="center", fontsize=11)
    axes.axhline(0.1, color="#bbbbbb", lw=1, ls=":")
    axes.set(xlabel="task (new random labels each time)", ylabel="accuracy while learning", ylim=(0, None))
    axes.set_xlim(1, TASKS + 1.6)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1, help="runs of every arm")
    parser.add_argument("--picture", type=Path, help="write the curves to this SVG or PNG file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # on small networks a second thread only gets in the way
    x = digits()
    start, done, total = time.perf_counter(), 0, len(ARMS) * arguments.seeds * TASKS

    def tick() -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            left = (time.perf_counter() - start) / done * (total - done)
            print(f"\r{done} of {total} tasks, {left:3.0f} s left ", end="", file=sys.stderr, flush=True)

    results: dict[str, list[list[float]]] = {}
    tired: nn.Module = network()
    for arm in ARMS:
        runs = [run(arm, x, seed, tick) for seed in range(arguments.seeds)]
        results[arm] = [accuracies for accuracies, _ in runs]
        tired = runs[0][1] if arm == "nothing" else tired
    show(results)

    print("\nrekindle.health(), on the network that nothing was done for:")
    print(rekindle.health(tired, [x]))
    print("\nrekindle.fire(), and what it changed:")
    print(rekindle.fire(tired))
    nothing, fire = (statistics.mean(runs[-1] for runs in results[arm]) for arm in ("nothing", "fire"))
    print(
        f"\nOn the last task the network learned {nothing:.0%} of the labels when nothing was done, {fire:.0%} with "
        f"FIRE between the tasks ({arguments.seeds} seed{'s' if arguments.seeds > 1 else ''}; chance is 10%)."
    )
    if arguments.picture:
        picture(results, arguments.picture)
        print(f"picture: {arguments.picture}")


if __name__ == "__main__":
    main()
