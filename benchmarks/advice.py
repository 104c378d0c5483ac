"""Is the advice right, and what does it cost? On the settings of studies/advice.yaml.

    python benchmarks/advice.py run /tmp/advice --seeds 940          # resumable: one line per setting and seed
    python benchmarks/advice.py show /tmp/advice/entries.jsonl       # regret, price and safe depths, as Markdown

One entry: a network learns the setting's tasks without any remedy up to the last boundary. There `advise` is asked with
its own candidates and the whole next task as the horizon; then every candidate learns that task from the same state in
other orders, and its headline is the truth. The regret of a choice is (best − chosen) ÷ (best − worst) over the
candidates. The price is the processor time of the advice, in trainings of one network over the horizon. All trials also
go on to the end without a race: that shows what one that drops earlier or later would have chosen.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from measuring import processor
from rekindle.advice import advising, racing
from rekindle.advice.candidates import Candidate, candidates_for
from rekindle.advice.executors import Trials
from rekindle.advice.intervals import mean_interval
from rekindle.advice.trials import Trace
from rekindle.lab import arms
from rekindle.lab.arms import ARMS, Arm
from rekindle.lab.boundaries import quiet, reach
from rekindle.lab.settings import Setting, read_source
from rekindle.lab.study import Study
from rekindle.methods import LearningRate

STUDY = Path(__file__).parents[1] / "studies" / "advice.yaml"
DEPTHS = (0.0625, 0.125, 0.25, 0.5, 2.0)  # where a race may begin to drop; never
SEEDS = (0, 1, 2)


class Replay:
    """An executor whose trials have been run: it shows as much of them as was asked for."""

    workers = 1

    def __init__(self, traces: Mapping[int, Trace]) -> None:
        self._whole, self._taken, self.steps = traces, dict.fromkeys(traces, 0), 0

    def advance(self, numbers: Sequence[int], steps: int, horizon: float) -> dict[int, Trace]:
        """The first steps of these trials."""
        found = {}
        for number in numbers:
            self._taken[number] += steps
            self.steps += steps
            trace, end = self._whole[number], self._taken[number]
            looks = [(at, value) for at, value in trace.looks if at <= end]
            found[number] = replace(trace, losses=trace.losses[:end], looks=looks)
        return found

    def drop(self, numbers: Iterable[int]) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to stop."""


def entry(setting: Setting, seed: int, times: int, keep: Callable[[object], object]) -> dict[str, Any]:
    """One setting with one seed: the advice, its price, and every candidate's truth over `times` continuations."""
    begun = time.process_time()
    if setting.source is not None:
        read_source(setting.source)
    boundary = reach(setting, seed)
    candidates = candidates_for(boundary.model, boundary.batches[:4])
    tried = {one.name: one.method for one in candidates}

    def asked(**options: Any) -> tuple[Any, float]:
        start = time.process_time()
        given = {"candidates": copy.deepcopy(tried), "seeds": SEEDS, "budget": "10h", "workers": 1, "progress": False}
        return boundary.advise(**{**given, **options}), time.process_time() - start

    asked(steps=20)  # what is done once per process is not the price
    advice, spent = asked()
    alone = min(_timed(lambda: boundary.follow(ARMS["nothing"])) for _ in range(3))
    found: dict[str, Any] = {"answer": advice.answer, "chosen": advice.chosen, "sentence": advice.sentence}
    found |= {"price": spent / alone, "seconds_alone": alone, "horizon": advice.horizon}
    found["rows"] = {
        row.name: [row.share, row.level, row.difference, *row.difference_interval, row.error] for row in advice.rows
    }
    if not setting.agents:
        found["races"], traces = raced(candidates, advice.horizon, asked)
        keep(traces)
    values: dict[str, list[float | None]] = {}
    for one in candidates:
        if not found["rows"][one.name][-1]:
            made = arm(one)
            values[one.name] = [boundary.follow(made, again).get(setting.headline) for again in range(1, times + 1)]
    about = {"setting": setting.name, "seed": seed, "headline": setting.headline, "falling": setting.falling}
    return about | found | {"values": values, "seconds": time.process_time() - begun, "on": processor()}


def _timed(do: Callable[[], object]) -> float:
    start = time.process_time()
    do()
    return time.process_time() - start


def raced(candidates: Sequence[Candidate], horizon: int, asked: Any) -> tuple[dict[str, Any], object]:
    """What races that begin to drop at other depths would have chosen, and their steps in trainings of one."""
    traces: dict[int, Trace] = {}

    def whole(question: Any, tried: Any, seeds: Any, **_: Any) -> Replay:
        if not traces:
            trials = Trials(question, tried, seeds)
            numbers, taken = range(trials.count), 0
            for goal in (1, 5, *(round(part * horizon / 16) for part in range(1, 17))):  # looks need several
                if goal > taken:
                    traces.update(trials.advance(numbers, goal - taken, horizon))
                    taken = goal
        replays.append(Replay(traces))
        return replays[-1]

    replays: list[Replay] = []
    found = {}
    for depth in DEPTHS:
        with patch.object(advising, "executor", whole), patch.object(racing, "SAFE", depth):
            advice, _ = asked()
        steps = replays[-1].steps / horizon
        found[str(depth)] = {"answer": advice.answer, "chosen": advice.chosen, "steps": steps}
    with patch.object(advising, "executor", whole):
        found["else fire"] = {"chosen": asked(otherwise="fire")[0].chosen}
    return found, ([one.name for one in candidates], traces)


def arm(one: Candidate) -> Arm:
    """The candidate as the laboratory trains with it."""
    if one.method is None:
        return ARMS["nothing"]
    if isinstance(one.method, LearningRate):
        return Arm(one.name, lr=one.method.factor)
    name = f"advice {one.name}"
    arms.register(name)(lambda: copy.deepcopy(one.method))
    return ARMS.pop(name)


def run(folder: Path, seeds: Sequence[int], names: Sequence[str] | None, times: int) -> None:
    """Every setting with every seed that is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "entries.jsonl"
    known = {setting.name: setting for setting in Study.load(STUDY).settings}
    done = {(each["setting"], each["seed"]) for each in (read(path) if path.exists() else ())}
    for seed in seeds:
        for name in names or known:
            if (name, seed) not in done:
                keep = partial(_keep, folder / f"{name}-{seed}.pkl")
                found = entry(quiet(known[name]), seed, times, keep)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
                print(
                    f"{name} {seed}: {found['seconds']:.0f} s, price {found['price']:.1f}, {found['sentence']}",
                    flush=True,
                )


def _keep(path: Path, traces: object) -> None:
    path.write_bytes(pickle.dumps(traces))


def read(path: Path) -> list[dict[str, Any]]:
    """The entries of a file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def means(each: Mapping[str, Any]) -> dict[str, float]:
    """The mean headline of every candidate over its continuations, more is better."""
    sign = -1 if each["falling"] else 1
    return {name: sign * sum(found) / len(found) for name, found in each["values"].items() if None not in found}


def regrets(each: Mapping[str, Any], *, spare_worst: bool = False) -> dict[str, float]:
    """Regret of every policy in one entry; `spare_worst` leaves the worst candidate out of the denominator."""
    values = means(each)
    ordered = sorted(values.values())
    best, worst = ordered[-1], ordered[1 if spare_worst else 0]
    if best == worst:
        return {}
    policies = {name: name for name in values}
    policies["advise"] = each["chosen"]
    for depth, found in each.get("races", {}).items():
        policies["advise, else fire" if depth == "else fire" else f"race {depth}"] = found["chosen"]
    return {
        policy: (best - values[name]) / (best - worst) if name in values else 1.0 for policy, name in policies.items()
    }


def per_setting(entries: Sequence[Mapping[str, Any]], **options: bool) -> dict[str, dict[str, float]]:
    """By policy and setting the mean regret over seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    for each in entries:
        for policy, value in regrets(each, **options).items():
            found.setdefault(policy, {}).setdefault(each["setting"], []).append(value)
    return {policy: {s: sum(v) / len(v) for s, v in settings.items()} for policy, settings in found.items()}


def around(values: Sequence[float], sign: str = "", digits: int = 2) -> str:
    """A mean with its 95% interval."""
    mean, (low, high) = mean_interval(values)
    ends = f" [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]" if math.isfinite(low) else ""
    return f"{mean:{sign}.{digits}f}{ends}"


def table(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Each policy: mean regret over settings, without the worst arm in the denominator, and the paired difference."""
    whole, spared = per_setting(entries), per_setting(entries, spare_worst=True)
    lines = [["policy", "settings", "mean regret", "without the worst arm", "minus advise, paired"]]
    fixed = [name for name in whole if not name.startswith(("race", "advise"))]
    for policy in [
        *(name for name in whole if name.startswith("advise")),
        *sorted(fixed, key=lambda name: sum(whole[name].values()) / len(whole[name])),
    ]:
        own = whole[policy]
        paired = [own[setting] - whole["advise"][setting] for setting in own]
        said = "" if policy == "advise" else around(paired, "+")
        lines.append([policy, str(len(own)), around([*own.values()]), around([*spared[policy].values()]), said])
    return lines


def against_nothing(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """What was chosen in each entry, and its gain over doing nothing with the interval over continuations."""
    lines = [["setting", "seed", "chosen", "best", "regret", "gain over nothing", "price"]]
    for each in entries:
        values, sign = means(each), -1 if each["falling"] else 1
        chosen, best = each["chosen"], max(values, key=lambda name: values[name])
        gains = [sign * (a - b) for a, b in zip(each["values"][chosen], each["values"]["nothing"], strict=True)]
        gained = around(gains, "+", 3) if chosen != "nothing" else "–"
        regret = f"{regrets(each).get('advise', 0.0):.2f}"
        lines.append([each["setting"], str(each["seed"]), chosen, best, regret, gained, f"{each['price']:.1f}"])
    return lines


def depths(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Mean regret and steps of races that begin to drop at other depths."""
    lines = [["drops from", "settings", "mean regret", "steps, in trainings of one (median)"]]
    whole = per_setting(entries)
    for depth in DEPTHS:
        steps = [each["races"][str(depth)]["steps"] for each in entries if "races" in each]
        said = f"{depth:.1%}" if depth <= 1 else "never"
        own = whole[f"race {depth}"]
        lines.append([said, str(len(own)), around([*own.values()]), f"{median(steps):.1f}"])
    return lines


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Rows as a table."""
    head, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rest, ""])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--seeds", default="940")
    parser.add_argument("--times", type=int, default=3, help="how often each candidate learns the task")
    parser.add_argument("--settings", default=None, help="names with commas; all without it")
    given = parser.parse_args()
    if given.what == "run":
        names = given.settings.split(",") if given.settings else None
        run(given.path, [int(seed) for seed in given.seeds.split(",")], names, given.times)
        return
    entries = read(given.path)
    for lines in (table(entries), against_nothing(entries), depths(entries)):
        print(markdown(lines))
    print(f"price, median: {median(each['price'] for each in entries):.1f} trainings of one")


if __name__ == "__main__":
    main()
