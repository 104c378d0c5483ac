"""What each method costs, as a multiple of one training step measured side by side in the same run.

One application of every method, and, for those that gather statistics while training, how much longer a training
step gets (an application at the paper's period included), on a ResNet-18 of width 16 (batch 32, 32×32 images) and
a 4-layer GPT (width 128, batch 16, context 64).

    python benchmarks/methods.py [--repeats 3] [--only gpt]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rekindle import methods
from rekindle.lab.networks import network
from rekindle.methods.remedy import Remedy


class GPTBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.ln1, self.ln2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        h = self.ln1(x)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(h)
        return x + self.fc2(functional.gelu(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    """A small decoder."""

    def __init__(self, layers: int = 4, width: int = 128, vocabulary: int = 256, context: int = 64) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, 4) for _ in range(layers)))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.lm_head(self.norm(self.blocks(self.wte(x) + self.wpe(torch.arange(x.shape[1])))))


def image_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def setting(name: str) -> tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]:
    torch.manual_seed(0)
    if name == "resnet":
        model = network("resnet18", shape=(3, 32, 32), classes=10, seed=0, width=16)
        return model, (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))), image_loss
    tokens = torch.randint(0, 256, (16, 65))
    return GPT(), (tokens[:, :-1], tokens[:, 1:]), token_loss


APPLIED: dict[str, Callable[[], Remedy]] = {
    "FIRE": methods.FIRE,
    "ShrinkPerturb (init)": methods.ShrinkPerturb,
    "ShrinkPerturb (fresh)": lambda: methods.ShrinkPerturb(noise="fresh"),
    "DASH (1 batch)": methods.DASH,
    "RandomIsometry": methods.RandomIsometry,
    "Rescale": methods.Rescale,
    "FreshAtNorm": methods.FreshAtNorm,
    "FullReset": methods.FullReset,
    "HeadReset": methods.HeadReset,
    "LayerReset (last 2)": lambda: methods.LayerReset(last=2),
    "LayerNormReset": methods.LayerNormReset,
    "ReDo (1 batch)": lambda: methods.ReDo(tau=0.5),
    "ReGraMa (1 batch)": lambda: methods.ReGraMa(tau=0.5),
    "PlasticityInjection": methods.PlasticityInjection,
    "HareTortoise": methods.HareTortoise,
    "AdamRel": methods.AdamRel,
    "OptimizerReset": methods.OptimizerReset,
    "SingularClip": methods.SingularClip,
    "WeightClip, a step": methods.WeightClip,
    "NormalizeAndProject, a step": methods.NormalizeAndProject,
    "UPGD, a step": methods.UPGD,
    "L2Init, a step": methods.L2Init,
    "Parseval, a step": methods.Parseval,
    "SpectralRegularizer, a step": methods.SpectralRegularizer,
    "WeightDecay, a step": methods.WeightDecay,
    "IsometryLoss, a step": methods.IsometryLoss,
}
# Observed methods and after how many steps they are applied.
OBSERVED: dict[str, tuple[Callable[[], Remedy], int]] = {
    "ReDo": (methods.ReDo, 1000),
    "ReGraMa": (methods.ReGraMa, 1000),
    "ContinualBackprop": (methods.ContinualBackprop, 1),
    "SelfNormalizedReset": (methods.SelfNormalizedReset, 1),
    "HareTortoise": (methods.HareTortoise, 1000),
}


TASK = 1000  # steps


def timed(action: Callable[..., Any], *args: Any, **options: Any) -> float:
    start = time.perf_counter()
    action(*args, **options)
    return time.perf_counter() - start


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Any) -> None:
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()


def applications(name: str, repeats: int) -> list[tuple[str, float]]:
    """Each method's median cost over the median training step around it."""
    model, batch, loss = setting(name)
    first = copy.deepcopy(model)
    rows = []
    for label, make in APPLIED.items():
        ratios = []
        for _ in range(repeats):
            trained = copy.deepcopy(model)
            optimizer = torch.optim.Adam(trained.parameters(), lr=1e-3, fused=True)
            method = make()
            if hasattr(method, "remember"):
                method.remember(first)
            train_step(trained, optimizer, batch, loss)
            steps = [timed(train_step, trained, optimizer, batch, loss) for _ in range(2)]
            if isinstance(method, methods.HareTortoise):
                method.update(trained)
            if "a step" in label:  # what is chosen once a model is not paid at every step
                method(trained, optimizer, batches=[batch], loss=loss)
            cost = timed(method, trained, optimizer, batches=[batch], loss=loss)
            ratios.append(cost / statistics.median(steps))
        rows.append((label, statistics.median(ratios)))
    return sorted(rows, key=lambda row: row[1])


def overheads(name: str, repeats: int, steps: int = 8) -> list[tuple[str, float, float]]:
    """By how much watching lengthens a training step, and one application in steps; plain steps alternate with it."""
    rows = []
    for label, (make, period) in OBSERVED.items():
        model, batch, loss = setting(name)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        method = make()
        train_step(model, optimizer, batch, loss)
        plain, watched, applied = [], [], []
        for _ in range(repeats * steps):
            plain.append(timed(train_step, model, optimizer, batch, loss))
            with method.observe(model):  # type: ignore[attr-defined]
                watched.append(timed(train_step, model, optimizer, batch, loss))
            if period == 1:
                applied.append(timed(method, model, optimizer))
        if period > 1:
            applied.append(timed(method, model, optimizer))
        base = statistics.median(plain)
        # Differences of neighbors: the machine's own drift is in both.
        extra = statistics.median([w - p for w, p in zip(watched, plain, strict=True)])
        rows.append((label, (extra + statistics.median(applied) / period) / base, statistics.median(applied) / base))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("resnet", "gpt"))
    options = parser.parse_args()
    for name in (options.only,) if options.only else ("resnet", "gpt"):
        model, batch, loss = setting(name)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        base = statistics.median([timed(train_step, model, optimizer, batch, loss) for _ in range(5)])
        size = sum(p.numel() for p in model.parameters())
        print(f"\n{name}: {size:,} parameters, one training step {1e3 * base:.0f} ms, {torch.get_num_threads()} thread")
        print("one application, in training steps")
        once = applications(name, options.repeats)
        for label, ratio in once:
            print(f"  {label:30} {ratio:8.3f}")
        print("watching while training, share of a step (application at its period included); one application")
        watching = overheads(name, options.repeats)
        for label, share, applied in watching:
            print(f"  {label:30} {100 * share:7.1f} %   {applied:8.3f}")
        print(f"all in all, in training steps, over a task of {TASK:,} steps")
        for label, cost in sorted(over_a_task(once, watching), key=lambda row: row[1]):
            print(f"  {label:30} {cost:8.2f}")


def over_a_task(once: list[tuple[str, float]], watching: list[tuple[str, float, float]]) -> Iterator[tuple[str, float]]:
    """What acts at a boundary is paid once, what acts at every step at every one, and so is watching."""
    observed = {label for label, _, _ in watching}
    for label, ratio in once:
        if label.partition(" (")[0] not in observed:
            yield label, TASK * ratio if label.endswith("a step") else ratio
    for label, share, _ in watching:
        yield f"{label}, watching", TASK * max(share, 0.0)


if __name__ == "__main__":
    main()
