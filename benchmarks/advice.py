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
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
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

STUDY = Path(__file__).parents[1] / "studies" / "advice.yaml"
SHARES = (0.1, 0.25, 0.5)
ARMS_TRIED = ("nothing", "fire", "fire-nearest", "dash", "full-reset", "shrink-perturb")
LOST = 0.8  # a score below this: a fifth of the progress of a fresh network is missing
RULES = {  # thresholds of the verdict, and others beside them
    "dormant_worst": (0.1, 0.25, 0.5, 0.75),
    "dormant_rise": (0.05, 0.15, 0.25, 0.5),
    "rank_fall": (1.2, 1.5, 2.0, 3.0),
    "norm_growth": (1.2, 1.5, 2.0, 3.0),
}
USUAL = "fire-nearest"  # what is chosen where trials cannot tell; the other column has nothing there
CLEAR = 0.1  # of (best − worst): the standard error of the arms' means until which they continue again
POLICIES = ("nothing", "fire", "fire-nearest", "dash", "full-reset")


def run(
    folder: Path,
    seeds: list[int],
    names: list[str] | None,
    points: int,
    times: int,
    shares: Sequence[float],
    most: int,
) -> None:
    """Every setting with every seed that is not there yet, in the order of the names."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {setting.name: setting for setting in Study.load(STUDY).settings}
    done = {(each["setting"], each["seed"]) for each in entries(folder)}
    for seed in seeds:
        for setting in [known[name] for name in names or known]:
            if (setting.name, seed) in done:
                continue
            found = entry(quiet(setting), seed, points, times, shares, most)
            with (folder / "entries.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(f"{setting.name} {seed}: {found['seconds']:.0f} s, {found.get('chosen')}", flush=True)


def entry(
    setting: Setting, seed: int, count: int = 4, times: int = 3, shares: Sequence[float] = SHARES, most: int = 8
) -> dict[str, Any]:
    """One setting with one seed: every arm learns the task at least `times` times, and until it is clear or `most`."""
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
    chosen, told, cost, found = {}, {}, {}, {}
    methods = {name: boundary.method(ARMS[name]) for name in ARMS_TRIED}
    for share in shares:
        asked = time.process_time()
        advice = boundary.advise(
            candidates=methods,
            otherwise=USUAL,
            steps=max(20, round(share * boundary.steps)),
            budget="10h",
            workers=1,
            progress=False,
        )
        chosen[str(share)], told[str(share)] = advice.chosen, advice.answer
        cost[str(share)] = time.process_time() - asked
        found[str(share)] = {
            row.name: [row.level, row.difference, *row.difference_interval, row.error] for row in advice.rows
        }
    values: dict[str, list[float | None]] = {name: [] for name in ARMS_TRIED}
    for again in range(most):
        for name in ARMS_TRIED:
            values[name].append(boundary.follow(ARMS[name], again).get(setting.headline))
        if again + 1 >= times and clear(values):
            break
    return {
        "setting": setting.name,
        "seed": seed,
        "headline": setting.headline,
        "falling": setting.falling,
        "values": values,
        "chosen": chosen,
        "answer": told,
        "cost": cost,
        "trials": found,
        "points": points,
        "seconds": time.process_time() - begun,
    }


def clear(values: dict[str, list[float | None]]) -> bool:
    """Whether the arms' means are known well beside their differences; arms without a value count for nothing."""
    known = [torch.tensor(each, dtype=torch.double) for each in values.values() if None not in each]
    if len(known) < 2 or len(known[0]) < 2:
        return True
    means = torch.stack([each.mean() for each in known])
    error = torch.stack([each.var() for each in known]).mean().sqrt() / len(known[0]) ** 0.5
    return bool(error <= CLEAR * (means.max() - means.min()))


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
        seeds=3,
        progress=False,
    )
    batches = boundary.batches[:4]
    health = rekindle.health(boundary.model, batches, loss=boundary.loss, mode="full")
    numbers = {key: value for key, value in health.whole.items() if isinstance(value, float | int)}
    first = boundary.first
    then = None if first is None else rekindle.health(first, batches, loss=boundary.loss, mode="full")
    if then is not None:
        numbers |= fallen(health, then)
    return {
        "score": found.score,
        "interval": found.interval,
        "enough": found.enough,
        "verdict": str(health.verdict),
        "against": None if then is None else str(health.against(then).verdict),
        "health": {**numbers, "readiness": readiness(boundary.model, boundary.batches[0], boundary.loss)},
    }


def fallen(now: Any, then: Any) -> dict[str, float]:
    """What the rules of the verdict look at: the worst layer's change since the first weights."""
    both = [(unit, then.units[name]) for name, unit in now.units.items() if name in then.units]
    ranks = [b["feature_rank"] / max(a["feature_rank"], 1e-9) for a, b in both if "feature_rank" in a.keys() & b.keys()]
    rises = [a["dormant"] - b["dormant"] for a, b in both if "dormant" in a.keys() & b.keys()]
    found = {"norm_growth": now.whole["weight_norm"] / then.whole["weight_norm"]}
    return found | ({"rank_fall": max(ranks)} if ranks else {}) | ({"dormant_rise": max(rises)} if rises else {})


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
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def means(each: dict[str, Any]) -> dict[str, float]:
    """The mean headline of every arm over its continuations; arms without one are left out."""
    return {name: sum(found) / len(found) for name, found in each["values"].items() if None not in found}


def regrets(each: dict[str, Any]) -> dict[str, float]:
    """Regret of every policy in one entry; empty where all arms are equal or one has no value."""
    values = means(each)
    sign = -1 if each["falling"] else 1
    best, worst = max(sign * v for v in values.values()), min(sign * v for v in values.values())
    if best == worst:
        return {}
    policies = {name: name for name in POLICIES}
    for share, name in each["chosen"].items():
        policies[f"advise {float(share):.0%}"] = "nothing" if each["answer"][share] == "cannot tell" else name
        policies[f"advise {float(share):.0%}, else {USUAL}"] = name
    return {
        policy: (best - sign * values[name]) / (best - worst) if name in values else 1.0
        for policy, name in policies.items()
    }


def show(folder: Path, plot: Path | None = None, earlier: Sequence[Path] = ()) -> None:
    """The tables, as Markdown; `plot` is where the picture goes, `earlier` folders whose points are added to it."""
    found = entries(folder)
    settings = list(dict.fromkeys(each["setting"] for each in found))
    columns = [*POLICIES, *(f"advise {share:.0%}{more}" for more in ("", f", else {USUAL}") for share in SHARES)]
    per: dict[str, dict[str, list[float]]] = {s: {c: [] for c in columns} for s in settings}
    for each in found:
        for policy, value in regrets(each).items():
            per[each["setting"]][policy].append(value)
    seeds = {s: sum(e["setting"] == s for e in found) for s in settings}
    spent = sum(each["seconds"] for each in found) / 60
    print(f"{len(settings)} settings, {len(found)} entries, {spent:.0f} minutes of one core\n")
    print("| setting | seeds | " + " | ".join(columns) + " |\n|---|---|" + "---|" * len(columns))
    known = {s: {c: sum(v) / len(v) for c, v in per[s].items() if v} for s in settings}
    for s in settings:
        cells = [f"{known[s][c]:.2f}" if c in known[s] else "" for c in columns]
        print(f"| {s} | {seeds[s]} | " + " | ".join(cells) + " |")
    print(
        "| **mean over settings** | | "
        + " | ".join(_around([k[c] for k in known.values() if c in k]) for c in columns)
        + " |"
    )
    print("\n| paired over settings | settings | difference of regret |\n|---|---|---|")
    for c in columns[len(POLICIES) :]:
        for other in POLICIES:
            both = [k[c] - k[other] for k in known.values() if c in k]
            if both:
                print(f"| {c} − {other} | {len(both)} | {_around(both, '+')} |")
    print("\nAnswers: " + ", ".join(_answers(found)) + "\n")
    _against_nothing(found)
    runs = [_points(each) for each in found] + [_points(each) for other in earlier for each in entries(other)]
    _correlations(runs)
    _verdicts(runs)
    if plot is not None:
        plot.write_text(picture([point for points in runs for point in points]), "utf-8")


def _around(values: Sequence[float], sign: str = "") -> str:
    mean, (low, high) = mean_interval(values)
    return f"{mean:{sign}.2f}" + (f" [{low:{sign}.2f}, {high:{sign}.2f}]" if math.isfinite(low) else "")


def _against_nothing(found: list[dict[str, Any]]) -> None:
    """Where the advice acted: what it brought against doing nothing, with the interval over continuations."""
    print("| setting | seed | trials | chosen | headline − nothing's | 95 % over continuations |")
    print("|---|---|---|---|---|---|")
    for each in found:
        sign = -1 if each["falling"] else 1
        for share, name in each["chosen"].items():
            pairs = zip(each["values"][name], each["values"]["nothing"], strict=True)
            gains = [sign * (a - b) for a, b in pairs if a is not None and b is not None]
            if name != "nothing" and gains:
                mean, (low, high) = mean_interval(gains)
                worse = " (worse)" if high < 0 else ""
                cells = f"{each['setting']} | {each['seed']} | {float(share):.0%} | {name}"
                print(f"| {cells} | {mean:+.3g} | [{low:+.2g}, {high:+.2g}]{worse} |")
    print()


def _points(each: dict[str, Any]) -> list[dict[str, Any]]:
    """Where the probe could tell."""
    return [p for p in each["points"] if p["enough"] and p["score"] is not None and math.isfinite(p["score"])]


def _answers(found: list[dict[str, Any]]) -> list[str]:
    counted: dict[str, int] = {}
    for each in found:
        for share, answer in each["answer"].items():
            key = f"{float(share):.0%}: {answer}"
            counted[key] = counted.get(key, 0) + 1
    return [f"{key} × {count}" for key, count in sorted(counted.items())]


def _correlations(runs: list[list[dict[str, Any]]]) -> None:
    """Spearman's rank correlation of the probe's score with each measure, with a bootstrap interval over runs."""
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
    print("\n".join(line for _, line in sorted(lines)) + "\n")


def _verdicts(runs: list[list[dict[str, Any]]]) -> None:
    """How the probe scores networks by what the verdict calls them, and what other thresholds of one rule would do."""
    points = [point for each in runs for point in each]
    print(f"| verdict | networks | lowest score | median | highest | score below {LOST:g} |\n|---|---|---|---|---|---|")
    for reference, key in (("no reference", "verdict"), ("first weights", "against")):
        for verdict in ("healthy", "watch", "act"):
            scores = sorted(p["score"] for p in points if p.get(key) == verdict)
            if scores:
                lost = sum(score < LOST for score in scores)
                cells = f"{scores[0]:.2f} | {median(scores):.2f} | {scores[-1]:.2f} | {lost} of {len(scores)}"
                print(f"| `{verdict}`, {reference} | {len(scores)} | {cells} |")
    print("\n| rule | fires on lost | fires on others |\n|---|---|---|")
    for name, bounds in RULES.items():
        known = [p for p in points if p["health"].get(name) is not None]
        lost, others = ([p for p in known if (p["score"] < LOST) is side] for side in (True, False))
        for bound in bounds:
            fires = [sum(p["health"][name] >= bound for p in each) for each in (lost, others)]
            if known:
                print(f"| {name} ≥ {bound:g} | {fires[0]} of {len(lost)} | {fires[1]} of {len(others)} |")
    print()


def picture(points: Sequence[dict[str, Any]]) -> str:
    """The probe's score against the dormant share of the worst layer, by verdict, with the two thresholds."""
    from rekindle.lab.views.svg import Picture, label, labeled, rule, ticks
    from rekindle.report.markup import element, joined

    shown = [(p["health"]["dormant_worst"], p["score"], p["verdict"]) for p in points if "dormant_worst" in p["health"]]
    left, right, top, bottom = 56.0, 840.0, 14.0, 400.0
    heights = ticks(0.0, max(score for _, score, _ in shown))

    def across(share: float) -> float:
        return left + share * (right - left)

    def down(score: float) -> float:
        return bottom - score / heights[-1] * (bottom - top)

    marks = []
    for value, text in zip(heights, labeled(heights), strict=True):
        marks += [rule(left, down(value), right, down(value), "grid"), label(text, left - 8, down(value) + 4, "end")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        kind = "zero" if share in (0.25, 0.5) else "grid"
        marks += [
            rule(across(share), top, across(share), bottom, kind),
            label(f"{share:.0%}", across(share), 418, "middle"),
        ]
    marks.append(rule(left, down(1.0), right, down(1.0), "zero"))
    marks += [label("watch from here", across(0.25) + 6, 28), label("act from here", across(0.5) + 6, 28)]
    marks.append(label("dormant neurons of the worst layer (no reference)", (left + right) / 2, 440, "middle", "said"))
    marks.append(label("score of the probe", 16, (top + bottom) / 2, "middle", "said", turn=True))
    inks = {"healthy": "k3", "watch": "k5", "act": "k8"}
    for share, score, verdict in shown:
        told = element("title", f"{verdict}: {share:.0%} dormant, score {score:.2f}")
        ink = f"dot {inks.get(verdict, 'rest')}"
        marks.append(element("circle", told, class_=ink, cx=across(share), cy=down(score), r=5.0))
    for place, (verdict, ink) in enumerate(inks.items()):
        marks.append(element("circle", class_=f"dot {ink}", cx=right - 240 + 84 * place, cy=452.0, r=5.0))
        marks.append(label(verdict, right - 232 + 84 * place, 456, kind=f"name {ink}"))
    title = "Does the verdict agree with the probe?"
    described = f"{title} {len(shown)} networks: score of the probe against the share of dormant neurons."
    return Picture(title, described, 860, 470, joined(marks)).file()


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
    parser.add_argument("--seeds", default="820,821")
    parser.add_argument("--points", type=int, default=4, help="boundaries where the probe is compared with health")
    parser.add_argument(
        "--times", type=int, default=3, help="how often each arm learns the task at least; its value is the mean"
    )
    parser.add_argument("--most", type=int, default=8, help="how often at most, where arms are near each other")
    parser.add_argument("--shares", default="0.1,0.25,0.5", help="of the next task, that trials last")
    parser.add_argument("--settings", default=None, help="names with commas; all without it")
    parser.add_argument("--plot", type=Path, default=None, help="of show: where the picture goes")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="of show: folders whose points are added")
    given = parser.parse_args()
    if given.what == "run":
        shares = [float(share) for share in given.shares.split(",")]
        names = given.settings.split(",") if given.settings else None
        run(
            given.folder,
            [int(seed) for seed in given.seeds.split(",")],
            names,
            given.points,
            given.times,
            shares,
            given.most,
        )
    else:
        show(given.folder, given.plot, given.earlier)


if __name__ == "__main__":
    main()
