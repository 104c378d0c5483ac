"""What a remedy that is left on costs: processor time of a training step with it, beside a plain step.

    python benchmarks/steps.py                  all of them
    python benchmarks/steps.py --rounds 40 upgd some of them

One DQN-sized step (MLP 4-120-84-2, batch 128, Adam, one thread). In each round every loop runs 1,000 steps, in turns
of 100, so that what comes seldom (a health sample of the weights at one step in 1,000, a replaced neuron at one in 50)
is counted as often as it comes. "median" is the median over the rounds of the ratio to the plain loop of the same
round; "least" is the ratio of the shortest turns, which leaves other processes out, and what comes seldom too.
"alone" is the method as its paper writes it, in plain torch and for this network only, without any check: what a user
would write by hand. Then the time of one `fire` call on this network, beside its projection alone. At last "units":
networks with experts, latents and codes that `revive` watches, one sample in 100 steps, each beside its own plain loop.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from measuring import processor
from rekindle.lab.evaluation import score
from rekindle.lab.networks import network as lab_network
from rekindle.methods import UPGD, ContinualBackprop, L2Init, ReDo
from rekindle.triggers import DeadAbove

BATCH, BLOCK, TURNS, NEVER = 128, 100, 10, 10**9
GOALS = {"monitor": 1.03, "redo": 1.08, "l2-init": 1.20, "upgd": 1.60, "continual-backprop": 1.45}
Step = Callable[[], None]


def network(seed: int = 0) -> nn.Sequential:
    """The Q network of CleanRL's DQN on CartPole."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 4, generator=generator), torch.randn(BATCH, 2, generator=generator)) for _ in range(BLOCK)
    ]


DATA = batches()


def training(method: object = None, **options: object) -> Step:
    """A block of steps, with a method attached if there is one."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4)
    remedy = None if method is None else rekindle.attach(model, optimizer, method, **options)  # type: ignore[arg-type]

    def block() -> None:
        for x, y in DATA:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if remedy is not None:
                remedy.step()

    return block


def l2_init_alone(coefficient: float = 1e-3) -> Step:
    """The penalty as a term of the loss (Kumar et al., 2023)."""
    model = network()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4)

    def block() -> None:
        for x, y in DATA:
            loss = F.mse_loss(model(x), y)
            for parameter, first in zip(model.parameters(), start, strict=True):
                loss = loss + coefficient * (parameter - first).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return block


class PlainUPGD(torch.optim.Optimizer):
    """First-order global UPGD, an optimizer of its own as in the paper (Elsayed & Mahmood, 2024, algorithm 1)."""

    def __init__(self, parameters: object, lr: float = 2.5e-4, beta: float = 0.999, sigma: float = 0.001) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "sigma": sigma})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Utilities and their largest first, then the gated step."""
        largest = -torch.inf
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["utility"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["utility"].mul_(group["beta"]).add_(-p.grad * p, alpha=1 - group["beta"])
                largest = max(largest, state["utility"].max())
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                corrected = state["utility"] / (1 - group["beta"] ** state["step"])
                gate = 1 - torch.sigmoid(corrected / largest)
                p.add_((p.grad + torch.randn_like(p) * group["sigma"]) * gate, alpha=-group["lr"])


def upgd_alone() -> Step:
    """UPGD with its own optimizer: there is no Adam."""
    model = network()
    optimizer = PlainUPGD(model.parameters())

    def block() -> None:
        for x, y in DATA:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return block


def continual_backprop_alone(rate: float = 1e-4, decay: float = 0.99, maturity: int = 100) -> Step:
    """Generate and test after each step (Dohare et al., 2024, algorithm 1), for this chain of layers."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    hidden = list(pairwise(layers))
    utility = [torch.zeros(a.out_features) for a, _ in hidden]
    mean = [torch.zeros(a.out_features) for a, _ in hidden]
    age = [torch.zeros(a.out_features) for a, _ in hidden]
    due = [0.0 for _ in hidden]

    @torch.no_grad()
    def generate_and_test(features: list[Tensor]) -> None:
        for i, ((maker, reader), h) in enumerate(zip(hidden, features, strict=True)):
            age[i] += 1
            contribution = reader.weight.abs().mean(0) * h.abs().mean(0)
            utility[i].mul_(decay).add_(contribution, alpha=1 - decay)
            mean[i].mul_(decay).add_(h.mean(0), alpha=1 - decay)
            eligible = torch.where(age[i] > maturity)[0]
            if not len(eligible):
                continue
            due[i] += rate * len(eligible)
            number = int(due[i])
            if not number:
                continue
            due[i] -= number
            correction = 1 - decay ** age[i]
            out = eligible[(utility[i] / correction)[eligible].topk(number, largest=False).indices]
            reader.bias += reader.weight[:, out] @ (mean[i] / correction)[out]
            bound = maker.in_features**-0.5
            maker.weight[out] = torch.empty(number, maker.in_features).uniform_(-bound, bound)
            maker.bias[out] = 0
            reader.weight[:, out] = 0
            utility[i][out] = mean[i][out] = age[i][out] = 0
            for parameter, place in ((maker.weight, out), (maker.bias, out), (reader.weight, (slice(None), out))):
                for slot in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[parameter][slot][place] = 0

    def block() -> None:
        for x, y in DATA:
            a = F.relu(layers[0](x))
            b = F.relu(layers[1](a))
            loss = F.mse_loss(layers[2](b), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            generate_and_test([a.detach(), b.detach()])

    return block


LOOPS: dict[str, Callable[[], Step]] = {
    "idle": lambda: training("fire", at=NEVER),
    "monitor": lambda: training("fire", at=NEVER, monitor=100),
    "redo": lambda: training(ReDo(), every=NEVER),
    "l2-init": lambda: training(L2Init(1e-3)),
    "l2-init decoupled": lambda: training(L2Init(1e-3, decoupled=True)),
    "l2-init alone": l2_init_alone,
    "upgd": lambda: training(UPGD()),
    "upgd alone": upgd_alone,
    "continual-backprop": lambda: training(ContinualBackprop()),
    "continual-backprop alone": continual_backprop_alone,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*", metavar="LOOP", help=", ".join(LOOPS))
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wanted = {name: make for name, make in LOOPS.items() if not options.loops or name.startswith(tuple(options.loops))}
    steps = {"plain": training(), **{name: make() for name, make in wanted.items()}}
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for block in steps.values():  # plans are made and states are allocated in the first steps
        for _ in range(TURNS):
            block()
    for _ in range(options.rounds * TURNS):
        for name, block in steps.items():
            began = time.process_time()
            block()
            turns[name].append((time.process_time() - began) / BLOCK)
    rounds = {name: [sum(each[i : i + TURNS]) for i in range(0, len(each), TURNS)] for name, each in turns.items()}
    plain = min(turns["plain"])
    print(f"{processor()}, torch {torch.__version__}, one thread; {options.rounds} rounds of {TURNS * BLOCK} steps")
    print(f"{'':26}{'ms a step':>10}{'median':>10}{'least':>10}{'goal':>8}")
    for name, each in rounds.items():
        ratio = statistics.median(a / b for a, b in zip(each, rounds["plain"], strict=True))
        least, goal = min(turns[name]) / plain, GOALS.get(name)
        text = "" if goal is None else f"{100 * (goal - 1):+.0f}%"
        print(f"{name:26}{1e3 * plain * least:>10.3f}{100 * (ratio - 1):>+9.1f}%{100 * (least - 1):>+9.1f}%{text:>8}")
    if not options.loops or "fire".startswith(tuple(options.loops)):
        fire_call()
    for kind in UNITS:
        if not options.loops or f"units-{kind}".startswith(tuple(options.loops)):
            units(kind, min(options.rounds, 10))


UNITS = {
    "experts": ("expert-gpt", lambda: torch.randint(60, (16, 64)), {}),
    "latents": ("autoencoder", lambda: torch.randn(16, 32, 384), {"latents": 768}),
    "codes": ("vq-vae", lambda: torch.randn(64, 1, 28, 28), {}),
}


def units(kind: str, rounds: int) -> None:
    """A network that `revive` watches beside the same network alone, in turns of 100 steps."""
    name, draw, settings = UNITS[kind]
    data = [draw() for _ in range(4)]
    loops = []
    for watched in (False, True):
        model = lab_network(name, shape=tuple(data[0].shape[1:]), classes=60, seed=0, **settings)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        # The trigger never fires: what is measured is the watching.
        options = {"when": DeadAbove(1.0), "monitor": 100}
        remedy = rekindle.attach(model, optimizer, "revive", **options) if watched else None
        loops.append((model, optimizer, remedy))
    turns: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for mine, (model, optimizer, remedy) in zip(turns, loops, strict=True):
            began = time.process_time()
            for step in range(BLOCK):
                optimizer.zero_grad()
                score(model, data[step % 4], data[step % 4])[1].backward()
                optimizer.step()
                if remedy is not None:
                    remedy.step()
            if turn:  # the first allocates
                mine.append((time.process_time() - began) / BLOCK)
    ratio, least = statistics.median(b / a for a, b in zip(*turns, strict=True)), min(turns[1]) / min(turns[0])
    cost = f"{100 * (ratio - 1):>+9.1f}%{100 * (least - 1):>+9.1f}%{'+3%':>8}"
    print(f"{'units-' + kind:26}{1e3 * min(turns[1]):>10.3f}{cost}", flush=True)


def fire_call(calls: int = 300) -> None:
    """One call of `fire` with Adam's state there, the second and later ones, and the three polar factors alone."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4)
    whole, alone = [], []
    for x, y in (*DATA, *DATA, *DATA)[:calls]:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        began = time.process_time()
        rekindle.fire(model, optimizer)
        whole.append(time.process_time() - began)
        began = time.process_time()
        for layer in (model[0], model[2]):
            rekindle.polar(layer.weight.detach())
        alone.append(time.process_time() - began)
    for name, each, goal in (("fire", whole, "2"), ("its two polar factors", alone, "")):
        print(f"{name:26}{1e3 * min(each):>10.3f} ms at least, {1e3 * statistics.median(each):.3f} median {goal:>8}")


if __name__ == "__main__":
    main()
