"""From a run's rows to one number per metric. Rows are those of `rekindle.lab.execute`; only tasks count.

A number that was not measured is None, never 0. Where the setting's headline is a loss, so is everything else here,
and less is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rekindle.lab.evaluation import mean
from rekindle.lab.settings import Setting

Row = Mapping[str, Any]
Rows = Sequence[Row]

_UNEQUAL = {"warm-start", "continual", "class-incremental", "drift", "domains"}
_UNEQUAL |= {"games", "dynamics", "midpoint", "replay-ratio"}


def tasks(rows: Iterable[Row]) -> list[Row]:
    """The rows of tasks, in order."""
    return sorted((row for row in rows if row.get("kind", "task") == "task"), key=lambda row: int(row["task"]))


def headline(rows: Iterable[Row], setting: Setting) -> float | None:
    """The setting's metric, averaged over its last tasks."""
    return final(rows, setting.headline, setting.last)


def final(rows: Iterable[Row], metric: str, last: int) -> float | None:
    """Any metric of the rows, averaged over the last tasks; None if one of them lacks it (it diverged)."""
    return mean(row.get(metric) for row in tasks(rows)[-last:])


def first_task(rows: Iterable[Row], setting: Setting) -> float | None:
    """The setting's metric in the first task: what the network can do before it could lose anything."""
    found = tasks(rows)
    return found[0].get(setting.headline) if found else None


def auc(rows: Iterable[Row], setting: Setting) -> float | None:
    """The area under the learning curve of the whole stream: the online metric, averaged over all steps."""
    metric = "online_return" if setting.agents else "online_loss" if setting.falling else "online_accuracy"
    found = tasks(rows)
    steps: int = sum(row["steps"] for row in found)
    if not steps or any(row.get(metric) is None for row in found):
        return None
    return math.fsum(row["steps"] * row[metric] for row in found) / steps


def drop(rows: Iterable[Row], setting: Setting) -> float | None:
    """What the remedy costs at once: the mean fall of accuracy (or rise of loss) on the task just learned.

    None for an arm that does nothing at boundaries.
    """
    name, sign = ("loss", -1) if setting.falling else ("accuracy", 1)
    pairs = [(r[f"{name}_before"], r[f"{name}_after"]) for r in _remedies(rows) if f"{name}_before" in r]
    return mean(None if before is None or after is None else sign * (before - after) for before, after in pairs)


def recovery(rows: Iterable[Row], reference: Iterable[Row], setting: Setting) -> float | None:
    """The mean number of steps in which a task is learned as well as the reference has learned it by its end.

    Read from the curves, so to a twentieth of a task. A task that never reaches it counts with all its steps, so
    that the mean is a lower bound then. The first task, before any boundary, does not count.
    """
    place, sign = (2, -1) if setting.falling else (1, 1)
    wanted = {row["task"]: row["curve"][-1][place] for row in tasks(reference) if row.get("curve")}
    counts = []
    for row in tasks(rows):
        goal = wanted.get(row["task"])
        if row["task"] and goal is not None:
            points = [(point[0], point[place]) for point in row.get("curve") or ()]
            reached = (step for step, value in points if value is not None and sign * (value - goal) >= 0)
            counts.append(float(next(reached, row["steps"])))
    return mean(counts)


def peak(rows: Iterable[Row], setting: Setting) -> float | None:
    """The highest loss in the first 20 steps after a boundary, the mean over boundaries: the spike, if there is one."""
    return mean(row.get("peak_loss") for row in _later(rows))


def retention(rows: Iterable[Row], setting: Setting) -> float | None:
    """How well up to five earlier tasks are still done at the end of a later one, averaged over the last tasks."""
    return mean(row.get("old_loss" if setting.falling else "old_accuracy") for row in _later(rows)[-setting.last :])


def retention_after_remedy(rows: Iterable[Row], setting: Setting) -> float | None:
    """The same right after the boundary, before anything new is learned: what the remedy left of the old knowledge.

    For an arm that does nothing it is what there was.
    """
    return mean(row.get("old_loss_start" if setting.falling else "old_accuracy_start") for row in _later(rows))


def drift(rows: Iterable[Row], setting: Setting) -> float | None:
    """How far the remedy moved the network's function, in nats; the mean over boundaries."""
    return mean(remedy.get("function_drift") for remedy in _remedies(rows))


def equally_hard(setting: Setting) -> bool:
    """Whether each task is as hard as the first, so that doing worse than there means that something was lost.

    More data, more classes, another text, or old data mixed in make other tasks: what was lost there is what a fresh
    start gains on the same task.
    """
    return setting.stream not in _UNEQUAL and not setting.replay


def share_lost(runs: Sequence[Sequence[Row]], setting: Setting, classes: int | None = None) -> float | None:
    """Which share of what it could do in the first task an arm has lost in its last tasks, over all seeds.

    A loss is counted from chance, ln(classes), downwards, a return from that of random actions. None where that cannot
    be told: tasks that are not equally hard, an unknown chance, a first task in which nothing was learned.
    """
    first = mean(first_task(rows, setting) for rows in runs)
    last = mean(headline(rows, setting) for rows in runs)
    if first is None or last is None or (setting.falling and classes is None) or not equally_hard(setting):
        return None
    low: float | None = 0.0
    if setting.falling:
        first, last = math.log(classes or 1) - first, math.log(classes or 1) - last
    elif setting.agents:
        low = mean(tasks(rows)[0].get("chance_return", 0.0) for rows in runs)
    return None if low is None or first <= low else (first - last) / (first - low)


def _remedies(rows: Iterable[Row]) -> list[Row]:
    return [row["remedy"] for row in tasks(rows) if row.get("remedy")]


def _later(rows: Iterable[Row]) -> list[Row]:
    return [row for row in tasks(rows) if row["task"] > 0]


@dataclass(frozen=True)
class ArmRuns:
    """The finished runs of one arm in one setting: `runs[seed]` are the rows of its tasks.

    `name` is what tables show; `arm` is the configuration, which for a tuned arm is the chosen one.
    """

    setting: Setting
    name: str
    arm: Mapping[str, Any]
    tuned: bool
    runs: Mapping[int, Rows]

    def values(self, metric: str = "headline") -> dict[int, float]:
        """A number per seed: the headline, or another number of the last tasks' rows ("remedy.loss_after")."""
        if metric == "headline":
            return self.by_seed(lambda rows: headline(rows, self.setting))
        return self.by_seed(lambda rows: mean_at(rows[-self.setting.last :], *metric.split(".")))

    def by_seed(self, number: Callable[[Rows], float | None]) -> dict[int, float]:
        """A number of each run that has it."""
        return {seed: value for seed, rows in self.runs.items() if (value := number(rows)) is not None}

    @property
    def diverged(self) -> int:
        """How many runs had a loss that was not finite."""
        return sum(any(row.get("diverged") for row in rows) for rows in self.runs.values())


def mean_at(rows: Iterable[Row], *path: str) -> float | None:
    """The mean over the tasks that have this number, None if none has."""
    known = [value for row in rows if (value := at(row, path)) is not None]
    return fmean(known) if known else None


def at(row: Row, path: Sequence[str]) -> float | None:
    """The number at a path in a row, or None."""
    found: object = row
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None
