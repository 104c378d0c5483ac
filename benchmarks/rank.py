"""Does `rekindle.rank` find the checkpoint to start from, at a tenth of the cost? Against rank, dormancy and loss.

    OMP_NUM_THREADS=1 python benchmarks/rank.py run families.jsonl --seeds 60,61,62,63    # five minutes; resumable
    OMP_NUM_THREADS=1 python benchmarks/rank.py show families.jsonl

A family is a network after 0, 1, 2, 4, 6 and 8 tasks of a stream without a remedy; the next task is what all are to
learn. Full training (two orders of the batches) gives each its mean loss over the last quarter. `rank` gets a tenth of
these steps with one order, so a tenth of the cost at most. Each number is Spearman's correlation with full training; a
rival is right where more effective feature rank, fewer dormant units, less loss before the first step are better.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

import rekindle
from measuring import processor
from rekindle.advice.intervals import mean_interval
from rekindle.lab.arms import ARMS
from rekindle.lab.boundaries import quiet, reach
from rekindle.lab.settings import Setting
from rekindle.lab.train import make_optimizers

SHARE = 0.1
LOOKS = (1, 2, 4, 6, 8)
RIVALS = ("rank", "feature rank", "dormancy", "loss")
_LABELS = {"data": "digits", "count": 320, "tasks": 9, "epochs": 20}
KINDS = {
    "MLP": Setting("mlp", "random-labels", "mlp", _LABELS, {"width": [100, 100, 100]}, batch=16, lr=3e-3),
    "MLP, GELU, LayerNorm": Setting(
        *("gelu", "random-labels", "mlp", _LABELS, {"width": [64] * 3, "activation": "gelu", "norm": "layer"}),
        **{"batch": 16, "lr": 3e-3},  # type: ignore[arg-type]
    ),
    "MLP, tanh, SGD": Setting(
        *("tanh", "random-labels", "mlp", _LABELS, {"width": [64] * 3, "activation": "tanh"}),
        **{"batch": 16, "lr": 0.05, "optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},  # type: ignore[arg-type]
    ),
    "CNN": Setting("cnn", "random-labels", "cnn", _LABELS, {"width": 12, "hidden": 48}, batch=16, lr=2e-3),
    "MLP, renamed classes": Setting(
        *("names", "permuted-labels", "mlp", {**_LABELS, "epochs": 6}, {"width": [64] * 3}),
        **{"batch": 16, "lr": 3e-3},  # type: ignore[arg-type]
    ),
}


def family(kind: str, seed: int) -> dict[str, Any]:
    """Scores of every checkpoint of one family: by full training, by `rank`, by its rivals."""
    began = time.process_time()
    setting = quiet(KINDS[kind])
    boundary = reach(setting, seed, 1)
    models = {"0 tasks": copy.deepcopy(boundary.first)}
    for look in LOOKS:
        boundary = boundary.on_to(look)
        models[f"{look} tasks"] = copy.deepcopy(boundary.model)
    batches, loss, steps = boundary.batches, boundary.loss, boundary.steps
    optimizer = make_optimizers(models["0 tasks"], setting, ARMS["nothing"])[0]
    trained = time.process_time()
    full = {
        name: fmean(learned(model, setting, batches, loss, steps, order) for order in (0, 1))
        for name, model in models.items()
    }
    cost = time.process_time() - trained
    asked = time.process_time()
    options = {"optimizer": optimizer, "steps": round(SHARE * steps), "seeds": [7], "budget": "10h", "workers": 1}
    found = rekindle.rank(models, batches, loss=loss, progress=False, **options)
    spent = time.process_time() - asked
    units = {name: rekindle.health(model, batches[:8], loss=loss).units.values() for name, model in models.items()}
    scores = {
        "rank": {name: -float(place) for place, name in enumerate(found.order)},
        "feature rank": {name: _mean_of("feature_rank", own) for name, own in units.items()},
        "dormancy": {name: -_mean_of("dormant", own) for name, own in units.items()},
        "loss": {name: -level(model, batches, loss) for name, model in models.items()},
    }
    truth = {name: -value for name, value in full.items()}
    return {
        "kind": kind,
        "seed": seed,
        "full": full,
        "scores": scores,
        "spearman": {rival: spearman([(scores[rival][name], truth[name]) for name in models]) for rival in RIVALS},
        "cost": spent / (cost / 2),
        "steps": SHARE,
        "seconds": time.process_time() - began,
        "on": processor(),
    }


def _mean_of(name: str, units: Iterable[Mapping[str, float]]) -> float:
    return fmean(each[name] for each in units if name in each)


def learned(model: nn.Module, setting: Setting, batches: Sequence[Any], loss: Any, steps: int, order: int) -> float:
    """The mean loss over the last quarter of full training."""
    model = copy.deepcopy(model)
    optimizer = make_optimizers(model, setting, ARMS["nothing"])[0]
    draws, queue, losses = torch.Generator().manual_seed(100 + order), list[int](), []
    model.train()
    for _ in range(steps):
        if not queue:
            queue = torch.randperm(len(batches), generator=draws).tolist()
        found = loss(model, batches[queue.pop()])
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.detach())
    return float(torch.stack(losses[-(steps // 4) :]).mean())


def level(model: nn.Module, batches: Sequence[Any], loss: Any) -> float:
    """The loss before the first step."""
    with torch.no_grad():
        return fmean(float(loss(model, batch)) for batch in batches[:8])


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Pearson's correlation of ranks; ties share their mean rank, and no order at all gives 0."""
    ranks = torch.tensor([_ranks([pair[side] for pair in pairs]) for side in (0, 1)], dtype=torch.double)
    ranks = ranks - ranks.mean(1, keepdim=True)
    size = ranks.norm(dim=1).prod()
    return float(ranks[0] @ ranks[1] / size) if size > 0 else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def table(families: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Spearman's correlation of each rival with full training, by kind and over all families."""
    lines = [["families", "count", *(f"`{rival}`" if rival == "rank" else rival for rival in RIVALS), "cost of `rank`"]]
    for kind in [*KINDS, ""]:
        mine = [each for each in families if each["kind"] == kind or not kind]
        if mine:
            means = [mean_interval([each["spearman"][rival] for each in mine]) for rival in RIVALS]
            cells = [f"{mean:.2f}" + (f" [{ends[0]:.2f}, {ends[1]:.2f}]" if not kind else "") for mean, ends in means]
            lines.append([kind or "all", str(len(mine)), *cells, f"{fmean(each['cost'] for each in mine):.1%}"])
    return lines


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--seeds", default="60,61,62,63")
    given = parser.parse_args()
    torch.set_num_threads(1)
    families = [json.loads(line) for line in given.path.read_text("utf-8").splitlines()] if given.path.exists() else []
    if given.what == "run":
        done = {(each["kind"], each["seed"]) for each in families}
        for seed in map(int, given.seeds.split(",")):
            for kind in KINDS:
                if (kind, seed) not in done:
                    families.append(family(kind, seed))
                    with given.path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(families[-1]) + "\n")
                    print(kind, seed, families[-1]["spearman"], f"{families[-1]['seconds']:.0f} s", flush=True)
    print("\n".join("| " + " | ".join(line) + " |" for line in table(families)))


if __name__ == "__main__":
    main()
