"""Does the verdict turn to `act` before plasticity is gone, and stay quiet where nothing is lost?

    OMP_NUM_THREADS=1 python benchmarks/verdict.py streams runs.jsonl --first-seed 20   # half an hour; resumable
    OMP_NUM_THREADS=1 python benchmarks/verdict.py fresh fresh.jsonl                    # two minutes

streams: random labels (one MLP, every task new labels for the same images, a new Adam each task): without a remedy the
network stops learning, with L2-init it does not. The reference is the Health at the end of task 1, and the verdict is
asked at the end of each later task; `alone` is that of the last without a reference. The same on digits with other
activations. What is lost is decided by accuracy, never by the measures.

fresh: untrained networks of twenty shapes, without a reference; every sign is a false alarm.

studies/evidence.py makes the tables of docs/evidence/instruments.md from the runs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measuring import processor
from rekindle.diagnosis.examination import Health, health
from rekindle.lab.networks import network

FASHION = Path("/usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz")
Run = dict[str, Any]


def fashion(count: int, seed: int) -> Tensor:
    """`count` Fashion-MNIST images as rows, from Debian's package dataset-fashion-mnist."""
    with gzip.open(FASHION) as file:
        pixels = np.frombuffer(file.read(), dtype=np.uint8, offset=16).reshape(-1, 784)
    chosen = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))[:count]
    return _standardized(torch.from_numpy(pixels[chosen.numpy()]).float())


def digits(count: int | None = None) -> tuple[Tensor, Tensor]:
    """scikit-learn's 8×8 digits, as rows, and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return _standardized(torch.tensor(found.data).float())[:count], torch.tensor(found.target)[:count]


def _standardized(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std()


def mlp(inputs: int, width: int, seed: int, depth: int = 3, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """A network with `depth` hidden layers and ten outputs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for fan in [inputs] + [width] * (depth - 1):
            layers += [nn.Linear(fan, width), activation()]
        return nn.Sequential(*layers, nn.Linear(width, 10))


@dataclass(frozen=True)
class Task:
    """One task of a stream: online accuracy while it was learned, and the Health at its end."""

    accuracy: float
    health: Health


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def learn(
    model: nn.Module,
    tasks: Iterator[tuple[Tensor, Tensor]],
    *,
    epochs: int,
    seed: int,
    batch: int = 32,
    lr: float = 1e-3,
    l2_init: float = 0.0,
    rows: int = 512,
) -> Iterator[Task]:
    """Learn one task after another; the first one's Health is the reference of the others."""
    weights = list(model.parameters())
    start = [p.detach().clone() for p in weights]
    generator = torch.Generator().manual_seed(seed)
    reference: Health | None = None
    for x, y in tasks:
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
        hits = 0
        for _ in range(epochs):
            for rows_ in torch.randperm(len(x), generator=generator).split(batch):
                output = model(x[rows_])
                hits += int((output.argmax(1) == y[rows_]).sum())
                loss = F.cross_entropy(output, y[rows_])
                optimizer.zero_grad()
                loss.backward()
                if l2_init:
                    grads, now = [p.grad for p in weights], [p.detach() for p in weights]
                    torch._foreach_add_(grads, torch._foreach_sub(now, start), alpha=2 * l2_init)
                optimizer.step()
        found = health(model, [(x[:rows], y[:rows])], loss=cross_entropy, reference=reference)
        reference = reference or found
        yield Task(hits / len(x) / epochs, found)


def random_labels(x: Tensor, tasks: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same images with new random labels in each task."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for _ in range(tasks):
        yield x, torch.randint(0, 10, (len(x),), generator=generator)


ACTIVATIONS = {
    "ReLU": (nn.ReLU, 4e-3),
    "GELU": (nn.GELU, 4e-3),
    "LeakyReLU": (nn.LeakyReLU, 4e-3),
    "Tanh": (nn.Tanh, 1e-2),
}
ARMS = {"nothing": 0.0, "L2-init": 1e-3}
STREAM_TASKS, DIGIT_TASKS = 20, 12


def streams(seed: int, done: set[tuple[str, ...]]) -> Iterator[Run]:
    """Every run of one seed that is not in `done`."""
    if FASHION.exists():
        x = fashion(1600, seed)
        for arm, strength in ARMS.items():
            if ("stream", "ReLU", arm, str(seed)) not in done:
                stream = random_labels(x, STREAM_TASKS, seed)
                yield _run("stream", "ReLU", arm, seed, mlp(784, 128, seed), stream, epochs=30, l2_init=strength)
    x, _ = digits(300)
    for kind, (activation, lr) in ACTIVATIONS.items():
        for arm, strength in ARMS.items():
            if ("activation", kind, arm, str(seed)) not in done:
                model, stream = mlp(64, 64, seed, activation=activation), random_labels(x, DIGIT_TASKS, seed)
                settings = {"epochs": 30, "batch": 16, "lr": lr, "l2_init": strength}
                yield _run("activation", kind, arm, seed, model, stream, **settings)


def _run(
    part: str,
    kind: str,
    arm: str,
    seed: int,
    model: nn.Module,
    stream: Iterator[tuple[Tensor, Tensor]],
    **settings: Any,
) -> Run:
    """One network through one stream: accuracies, verdicts, and the verdict that has no reference."""
    began = time.process_time()
    images, labels = next(stream)
    found = list(learn(model, _again((images, labels), stream), seed=seed, **settings))
    return {
        "part": part,
        "kind": kind,
        "arm": arm,
        "seed": seed,
        "accuracy": [round(task.accuracy, 4) for task in found],
        "verdicts": [str(task.health.verdict) for task in found],
        "alone": str(health(model, [(images[:512], labels[:512])], loss=cross_entropy).verdict),
        "act": next((at for at, task in enumerate(found[1:], 2) if task.health.verdict == "act"), None),
        "halved": next((at for at, each in enumerate(found, 1) if each.accuracy <= found[0].accuracy / 2), None),
        **_conditions(began),
    }


def _again(first: tuple[Tensor, Tensor], rest: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    yield first
    yield from rest


def _conditions(began: float) -> dict[str, Any]:
    return {"seconds": round(time.process_time() - began, 2), "on": processor(), "torch": torch.__version__}


def outcome(run: Run) -> str:
    """What the verdict did in one run on random labels, in a word."""
    act, half = run["act"], run["halved"]
    if half is not None:
        return "in time" if act is not None and act < half else "late"
    if act is None:
        return "quiet"
    # Not halved: acting was right where much was lost all the same.
    return "lost" if kept(run) < 0.75 else "false alarm"


def kept(run: Run) -> float:
    """The accuracy of the last three tasks as a share of the first's."""
    last: list[float] = run["accuracy"][-3:]
    return sum(last) / len(last) / float(run["accuracy"][0])


class Recurrent(nn.Module):
    """Rows of an 8×8 image through an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(8, 48, 2, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        return self.head(self.body(x.view(-1, 8, 8))[0][:, -1])  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """Rows of an 8×8 image as eight tokens, through torch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.position = nn.Parameter(torch.randn(8, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        return self.head(self.body(self.embed(x.view(-1, 8, 8)) + self.position).mean(1))  # type: ignore[no-any-return]


def _made(kind: str, **options: Any) -> Callable[[int], nn.Module]:
    shape, classes = ((32,), 64) if kind == "gpt" else ((1, 8, 8), 10)
    return lambda seed: network(kind, shape=shape, classes=classes, seed=seed, **options)


def _seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    def made(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return build()

    return made


def _agent(kind: str, world: str) -> Callable[[int], nn.Module]:
    def made(seed: int) -> nn.Module:
        import stable_baselines3

        from rekindle.integrations import sb3

        agent = getattr(stable_baselines3, kind)("MlpPolicy", world, seed=seed, device="cpu")
        return sb3.trained(agent)[0]

    return made


SHAPES: dict[str, Callable[[int], nn.Module]] = {
    "MLP 100-100": _made("mlp", width=[100, 100]),
    "MLP 32": _made("mlp", width=[32]),
    "MLP 256-256-256": _made("mlp", width=[256, 256, 256]),
    "MLP 64, six layers": _made("mlp", width=[64] * 6),
    "MLP 16-16": _made("mlp", width=[16, 16]),
    "MLP GELU": _made("mlp", width=[64] * 3, activation="gelu"),
    "MLP tanh": _made("mlp", width=[64] * 3, activation="tanh"),
    "MLP LayerNorm": _made("mlp", width=[64] * 3, norm="layer"),
    "MLP BatchNorm": _made("mlp", width=[64] * 3, norm="batch"),
    "CNN": _made("cnn"),
    "CNN BatchNorm": _made("cnn", norm="batch"),
    "CNN of torch": _seeded(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
        )
    ),
    "ResNet-18, width 8": _made("resnet18", width=8),
    "ViT": _made("vit", patch=2, layers=3, width=48, heads=4),
    "GPT": _made("gpt", layers=2, width=64, heads=4, tied=False),
    "torch's transformer": _seeded(Tokens),
    "LSTM": _seeded(Recurrent),
    "DQN": _agent("DQN", "CartPole-v1"),
    "SAC": _agent("SAC", "Pendulum-v1"),
    "PPO": _agent("PPO", "CartPole-v1"),
}
WORLDS = {"DQN": "CartPole-v1", "SAC": "Pendulum-v1", "PPO": "CartPole-v1"}


def data(shape: str, seed: int) -> tuple[list[Any], Callable[[nn.Module, Any], Tensor] | None]:
    """Four batches as such a network sees them, and its loss; those of an agent are a random walk."""
    draws = torch.Generator().manual_seed(seed)
    if shape in WORLDS:
        import gymnasium

        world = gymnasium.make(WORLDS[shape])
        world.action_space.seed(seed)
        seen, actions = [world.reset(seed=seed)[0]], [world.action_space.sample()]
        while len(seen) < 512:
            now, _, ended, cut, _ = world.step(actions[-1])
            seen.append(world.reset()[0] if ended or cut else now)
            actions.append(world.action_space.sample())
        rows, acted = torch.tensor(np.stack(seen)).float(), torch.tensor(np.stack(actions))
        return [{"observations": a, "actions": b} for a, b in zip(rows.split(128), acted.split(128), strict=True)], None
    if shape == "GPT":
        from rekindle.lab.data.text import byte_tokenizer, corpus

        tokens = byte_tokenizer().encode(corpus("python")[:200_000]) % 64
        starts = torch.randint(len(tokens) - 33, (4, 32), generator=draws)
        rows = [torch.stack([tokens[i : i + 33] for i in each.tolist()]) for each in starts]
        return [(each[:, :-1], each[:, 1:]) for each in rows], lambda model, batch: F.cross_entropy(
            model(batch[0]).flatten(0, 1), batch[1].flatten()
        )
    x, y = digits()
    order = torch.randperm(len(x), generator=draws)[:512]
    return [(x[part].view(-1, 1, 8, 8), y[part]) for part in order.split(128)], cross_entropy


def fresh(seed: int, done: set[tuple[str, ...]]) -> Iterator[Run]:
    """The verdict on one untrained network of every shape."""
    for shape, build in SHAPES.items():
        if ("fresh", shape, "", str(seed)) not in done:
            began = time.process_time()
            batches, loss = data(shape, seed)
            found = health(build(seed), batches, loss=loss)
            signs = sorted({finding.sign for finding in found.verdict.findings})
            about = {"verdict": str(found.verdict), "signs": signs, "drawn": found.fresh is not None}
            yield {"part": "fresh", "kind": shape, "arm": "", "seed": seed, **about, **_conditions(began)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["streams", "fresh"])
    parser.add_argument("runs", type=Path, help="every run goes here; those that are there already are skipped")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=20, help="0 to 4 were looked at when thresholds were chosen")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = options.runs.read_text("utf-8").splitlines() if options.runs.exists() else []
    done = {tuple(str(json.loads(line)[each]) for each in ("part", "kind", "arm", "seed")) for line in known}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for run in {"streams": streams, "fresh": fresh}[options.what](seed, done):
            print(json.dumps(run), flush=True)
            with options.runs.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")


if __name__ == "__main__":
    main()
