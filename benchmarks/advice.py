"""Is the advice right, and does a probe agree with health? On the settings of studies/advice.yaml.

    python benchmarks/advice.py run /tmp/advice --seeds 700,701      # resumable: one line per setting and seed
    python benchmarks/advice.py show /tmp/advice                     # regret and correlations, as Markdown

One entry: a network learns the setting's tasks without any remedy up to the last boundary. There `advise` is asked,
with trials of a tenth, a quarter and a half of the next task; then every fixed arm learns that task from the same
state, and its headline is the truth. The regret of a choice is (best − chosen) ÷ (best − worst) over the fixed arms.
On the way the plasticity score of `probe`, the measures of health and optimization readiness are taken at up to four
boundaries (`--points`). An entry takes 15 seconds (MLPs) to four minutes (ResNet) of one core. Killed and started
again, it goes on after the last whole entry.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rekindle
from rekindle.advice.intervals import mean_interval
from rekindle.isolation import isolated
from rekindle.lab.arms import ARMS
from rekindle.lab.boundaries import Boundary, quiet, reach
from rekindle.lab.settings import Setting, read_source
from rekindle.lab.study import Study
from rekindle.methods import DASH, FIRE, FullReset, ShrinkPerturb

STUDY = Path(__file__).parents[1] / "studies" / "advice.yaml"
SHARES = (0.1, 0.25, 0.5)
ARMS_TRIED: dict[str, Any] = {
    "nothing": None,
    "fire": FIRE(),
    "fire-nearest": FIRE(scale="nearest"),
    "dash": DASH(),
    "full-reset": FullReset(),
    "shrink-perturb": ShrinkPerturb(),
}
POLICIES = ("nothing", "fire", "fire-nearest", "dash", "full-reset")


def run(folder: Path, seeds: list[int], names: list[str] | None, points: int) -> None:
    """Every setting with every seed that is not there yet, in the order of the names."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {setting.name: setting for setting in Study.load(STUDY).settings}
    done = {(each["setting"], each["seed"]) for each in entries(folder)}
    for seed in seeds:
        for setting in [known[name] for name in names or known]:
            if (setting.name, seed) in done:
                continue
            found = entry(quiet(setting), seed, points)
            with (folder / "entries.jsonl").open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(f"{setting.name} {seed}: {found['seconds']:.0f} s, {found.get('chosen')}", flush=True)


def entry(setting: Setting, seed: int, count: int = 4) -> dict[str, Any]:
    """One setting with one seed."""
    begun = time.process_time()
    if setting.source is not None:
        read_source(setting.source)
    points = []
    stream: Any = setting.make_agent_stream(seed) if setting.agents else setting.make_stream(seed)
    last = len(stream) - 1
    spread = {round(1 + part * (last - 1) / max(count - 1, 1)) for part in range(count)}
    looks = [last] if setting.agents or count < 2 else sorted(spread)
    boundary = reach(setting, seed, looks[0])
    for index in looks:
        boundary = boundary.on_to(index)
        points.append({"index": index, **measured(boundary)})
    chosen, told, cost = {}, {}, {}
    for share in SHARES:
        asked = time.process_time()
        advice = rekindle.advise(
            boundary.model,
            boundary.batches,
            held_out=boundary.held_out,
            loss=boundary.loss,
            optimizer=boundary.optimizer,
            candidates=ARMS_TRIED,
            steps=max(20, round(share * boundary.steps)),
            budget="10h",
            workers=1,
            progress=False,
        )
        chosen[str(share)], told[str(share)] = advice.chosen, advice.answer
        cost[str(share)] = time.process_time() - asked
    values = {name: boundary.follow(ARMS[name]).get(setting.headline) for name in ARMS_TRIED}
    return {
        "setting": setting.name,
        "seed": seed,
        "headline": setting.headline,
        "falling": setting.falling,
        "values": values,
        "chosen": chosen,
        "answer": told,
        "cost": cost,
        "points": points,
        "seconds": time.process_time() - begun,
    }


def measured(boundary: Boundary) -> dict[str, Any]:
    """The probe's score, health and readiness of the network at a boundary."""
    steps = max(100, min(640, boundary.steps))
    found = rekindle.probe(
        boundary.model,
        boundary.batches,
        loss=boundary.loss,
        optimizer=boundary.optimizer,
        fresh=boundary.fresh,
        steps=steps,
        seeds=2,
        progress=False,
    )
    batches = boundary.batches[:4]
    health = rekindle.health(boundary.model, batches, loss=boundary.loss, mode="full")
    numbers = {key: value for key, value in health.whole.items() if isinstance(value, float | int)}
    return {
        "score": found.score,
        "enough": found.enough,
        "verdict": health.verdict.name if hasattr(health.verdict, "name") else str(health.verdict),
        "health": {**numbers, "readiness": readiness(boundary.model, boundary.batches[0], boundary.loss)},
    }


def readiness(model: nn.Module, batch: Any, loss: Any, parts: int = 4) -> float:
    """Gradient strength × reliability on one batch: ‖mean g‖ · ‖mean g‖² ÷ mean ‖g‖² over parts of the batch."""
    rows = len(batch[0]) if isinstance(batch, tuple) else len(next(iter(batch.values())))
    gradients = []
    parameters = [p for p in model.parameters() if p.requires_grad]
    with isolated(model, training=True):
        for index in torch.arange(rows).chunk(parts):
            part = (
                tuple(each[index] for each in batch)
                if isinstance(batch, tuple)
                else {name: each[index] for name, each in batch.items()}
            )
            found = torch.autograd.grad(loss(model, part), parameters, allow_unused=True)
            gradients.append(torch.cat([g.flatten() for g in found if g is not None]))
    stack = torch.stack(gradients)
    strength = float(stack.mean(0).norm())
    return strength * strength**2 / max(float(stack.square().sum(1).mean()), 1e-30)


def entries(folder: Path) -> list[dict[str, Any]]:
    """The whole entries of a folder; a line that was cut off is left out."""
    path = folder / "entries.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def regrets(each: dict[str, Any]) -> dict[str, float]:
    """Regret of every policy in one entry; empty where all arms are equal or one has no value."""
    values = {name: value for name, value in each["values"].items() if value is not None}
    sign = -1 if each["falling"] else 1
    best, worst = max(sign * v for v in values.values()), min(sign * v for v in values.values())
    if best == worst:
        return {}
    policies = {name: name for name in POLICIES} | {
        f"advise {float(s):.0%}": name for s, name in each["chosen"].items()
    }
    return {
        policy: (best - sign * values[name]) / (best - worst) if name in values else 1.0
        for policy, name in policies.items()
    }


def show(folder: Path) -> None:
    """The tables, as Markdown."""
    found = entries(folder)
    settings = list(dict.fromkeys(each["setting"] for each in found))
    columns = [*POLICIES, *(f"advise {share:.0%}" for share in SHARES)]
    per: dict[str, dict[str, list[float]]] = {s: {c: [] for c in columns} for s in settings}
    for each in found:
        for policy, value in regrets(each).items():
            per[each["setting"]][policy].append(value)
    seeds = {s: sum(e["setting"] == s for e in found) for s in settings}
    print(f"{len(settings)} settings, {len(found)} entries; {platform.processor() or platform.machine()}\n")
    print("| setting | seeds | " + " | ".join(columns) + " |\n|---|---|" + "---|" * len(columns))
    for s in settings:
        cells = [f"{sum(v) / len(v):.2f}" if (v := per[s][c]) else "" for c in columns]
        print(f"| {s} | {seeds[s]} | " + " | ".join(cells) + " |")
    means = {}
    for c in columns:
        values = [sum(v) / len(v) for s in settings if (v := per[s][c])]
        means[c] = mean_interval(values)
    print(
        "| **mean over settings** | | "
        + " | ".join(f"{m:.2f} [{lo:.2f}, {hi:.2f}]" for m, (lo, hi) in means.values())
        + " |"
    )
    print("\nAnswers: " + ", ".join(_answers(found)) + "\n")
    _correlations(found)


def _answers(found: list[dict[str, Any]]) -> list[str]:
    counted: dict[str, int] = {}
    for each in found:
        for share, answer in each["answer"].items():
            key = f"{float(share):.0%}: {answer}"
            counted[key] = counted.get(key, 0) + 1
    return [f"{key} × {count}" for key, count in sorted(counted.items())]


def _correlations(found: list[dict[str, Any]]) -> None:
    """Spearman's rank correlation of the probe's score with each measure, with a bootstrap interval over runs."""
    runs = [[p for p in each["points"] if p["enough"] and math.isfinite(p["score"])] for each in found]
    names = sorted({name for points in runs for p in points for name in p["health"]})
    drawn = torch.Generator().manual_seed(0)
    print("| measure | points | Spearman with the probe's score | 95 % over runs |\n|---|---|---|---|")
    lines = []
    for name in names:
        pairs = [
            [(p["health"][name], p["score"]) for p in points if p["health"].get(name) is not None] for points in runs
        ]
        pairs = [each for each in pairs if each]
        flat = [pair for each in pairs for pair in each]
        if len(flat) < 8 or len({a for a, _ in flat}) < 3:
            continue
        value = spearman(flat)
        again = []
        for _ in range(500):
            picked = torch.randint(len(pairs), (len(pairs),), generator=drawn).tolist()
            again.append(spearman([pair for i in picked for pair in pairs[i]]))
        again.sort()
        lines.append((-abs(value), f"| {name} | {len(flat)} | {value:+.2f} | [{again[12]:+.2f}, {again[487]:+.2f}] |"))
    print("\n".join(line for _, line in sorted(lines)))


def spearman(pairs: list[tuple[float, float]]) -> float:
    """Pearson's correlation of ranks; ties share their mean rank."""
    ranks = [_ranks([pair[side] for pair in pairs]) for side in (0, 1)]
    both = torch.tensor(ranks, dtype=torch.double)
    both = both - both.mean(1, keepdim=True)
    size = both.norm(dim=1).prod()
    return float(both[0] @ both[1] / size) if size > 0 else 0.0


def _ranks(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = [0.0] * len(values)
    start = 0
    for place in range(1, len(order) + 1):
        if place == len(order) or values[order[place]] != values[order[start]]:
            for i in order[start:place]:
                found[i] = (start + place - 1) / 2
            start = place
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", default="700,701,702")
    parser.add_argument("--points", type=int, default=4, help="boundaries where the probe is compared with health")
    parser.add_argument("--settings", default=None, help="names with commas; all without it")
    given = parser.parse_args()
    if given.what == "run":
        names = given.settings.split(",") if given.settings else None
        run(given.folder, [int(seed) for seed in given.seeds.split(",")], names, given.points)
    else:
        show(given.folder)


if __name__ == "__main__":
    main()
