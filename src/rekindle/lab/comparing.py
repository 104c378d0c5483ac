"""One arm in one setting as numbers: its headline, its differences to the references, its price, and its curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from rekindle.lab import metrics
from rekindle.lab.arms import Arm
from rekindle.lab.execution.store import Row
from rekindle.lab.settings import Setting
from rekindle.lab.statistics import (
    Difference,
    Interval,
    bootstrap_interval,
    holm,
    paired,
    probability_of_improvement,
    t_interval,
)

NOTHING = "nothing"
REFERENCES = (NOTHING, "full-reset", "random-isometry")
CURVES = (
    "online_accuracy",
    "online_loss",
    "train_accuracy",
    "train_loss",
    "test_accuracy",
    "test_loss",
    "old_accuracy",
    "old_loss",
)
Rows = Sequence[Row]


@dataclass(frozen=True)
class Contender:
    """The finished runs of one arm in one setting: `runs[seed]` are the rows of tasks.

    `name` is what tables show; `arm` is the configuration, which for a tuned arm is the chosen one.
    """

    setting: Setting
    name: str
    arm: Arm
    tuned: bool
    runs: Mapping[int, Rows]

    @cached_property
    def headline(self) -> dict[int, float]:
        """The headline by seed."""
        return self.values("headline")

    def values(self, metric: str) -> dict[int, float]:
        """A number a seed: the headline, or another number of the task rows ("remedy.loss_after"), meaned alike."""
        found = {}
        for seed, rows in self.runs.items():
            if metric == "headline":
                value = metrics.headline(rows, self.setting)
            else:
                value = mean_at(rows[-self.setting.last :], *metric.split("."))
            if value is not None:
                found[seed] = value
        return found

    def over_seeds(self, number: Callable[[Rows], float | None]) -> Interval | None:
        """The interval of a number that each run has (or None where it does not apply)."""
        values = [value for rows in self.runs.values() if (value := number(rows)) is not None]
        return t_interval(values) if values else None

    def curve(self, *path: str) -> dict[str, list[Any]] | None:
        """A number of every task, mean and interval over the seeds; None if no run has it."""
        length = max((len(rows) for rows in self.runs.values()), default=0)
        out: dict[str, list[Any]] = {"task": list(range(length)), "mean": [], "low": [], "high": []}
        for task in range(length):
            values = [at(rows[task], path) for rows in self.runs.values() if task < len(rows)]
            known = [value for value in values if value is not None]
            interval = t_interval(known) if known else None
            for end in ("mean", "low", "high"):
                out[end].append(None if interval is None else getattr(interval, end))
        return out if any(value is not None for value in out["mean"]) else None

    def learning(self) -> dict[str, list[Any]]:
        """The fine curve over the whole stream, mean over the seeds whose points agree with the first seed's."""
        lines = [_joined(rows) for rows in self.runs.values()]
        lines = [line for line in lines if [p[0] for p in line] == [p[0] for p in lines[0]]]
        points = list(zip(*lines, strict=True))
        return {
            "step": [each[0][0] for each in points],
            "accuracy": [_mean([p[1] for p in each]) for each in points],
            "loss": [_mean([p[2] for p in each]) for each in points],
        }


def differences(contenders: Sequence[Contender], metric: str = "headline") -> dict[str, dict[str, Difference | None]]:
    """By arm and reference: the paired difference, with Holm's p over all arms that are held against that reference.

    A tuned arm is held against the tuned reference: the budget is the same on both sides.
    """
    values = {each.name: each.values(metric) for each in contenders}
    out: dict[str, dict[str, Difference | None]] = {each.name: {} for each in contenders}
    for reference in REFERENCES:
        found: dict[str, Difference | None] = {}
        for each in contenders:
            other = f"{reference} (tuned)" if each.tuned else reference
            known = other in values and other != each.name
            found[each.name] = paired(values[each.name], values[other]) if known else None
        corrected = holm({name: None if d is None else d.p for name, d in found.items()})
        for name, difference in found.items():
            out[name][reference] = None if difference is None else replace(difference, holm=corrected[name])
    return out


def detail(each: Contender, against: Mapping[str, Difference | None], all_of: Sequence[Contender]) -> dict[str, Any]:
    """Everything about an arm in a setting, ready for JSON."""
    setting, headline = each.setting, each.headline
    others = {other.name: other.headline for other in all_of}
    kind = "loss" if setting.falling else "accuracy"
    return {
        "name": each.name,
        "arm": each.arm.to_dict(),
        "tuned": each.tuned,
        "seeds": sorted(each.runs),
        "headline": t_interval(list(headline.values())).to_dict() if headline else None,
        "bootstrap": bootstrap_interval(list(headline.values())).to_dict() if headline else None,
        "differences": {name: None if d is None else d.to_dict() for name, d in against.items()},
        "improvement": {
            name: improvement(headline, others.get(f"{name} (tuned)" if each.tuned else name), setting.falling)
            for name in REFERENCES
        },
        **{name: told(each.over_seeds(number)) for name, number in numbers(setting).items()},
        "recovery": told(recovery(each, all_of)),
        "diverged": diverged(each),
        "retained": {
            "before": told(each.over_seeds(lambda rows: mean_at(rows, "remedy", f"old_{kind}_before"))),
            "after": told(each.over_seeds(lambda rows: metrics.retention_after_remedy(rows, setting))),
            "end": told(each.over_seeds(lambda rows: metrics.retention(rows, setting))),
        },
        "curves": {name: curve for name in CURVES if (curve := each.curve(name)) is not None},
        "health": {name: curve for name in health_names(each) if (curve := each.curve("health", name)) is not None},
        "learning": each.learning() if each.runs else None,
    }


def numbers(setting: Setting) -> dict[str, Callable[[Rows], float | None]]:
    """What a table says of a run beside its headline, as functions of its rows.

    remedy_seconds is for one task that had any; retention is right after the boundary, retention_end at the end of
    the task that followed.
    """
    return {
        "first_task": lambda rows: metrics.first_task(rows, setting),
        "auc": lambda rows: metrics.auc(rows, setting),
        "drop": lambda rows: metrics.drop(rows, setting),
        "peak": metrics.peak,
        "retention": lambda rows: metrics.retention_after_remedy(rows, setting),
        "retention_end": lambda rows: metrics.retention(rows, setting),
        "function_drift": metrics.drift,
        "remedy_seconds": lambda rows: mean_at([row for row in rows if row.get("remedy_seconds")], "remedy_seconds"),
        "seconds": lambda rows: sum(row.get("seconds") or 0.0 for row in rows),
    }


def improvement(arm: Mapping[int, float], reference: Mapping[int, float] | None, falling: bool) -> float | None:
    """The share of seeds on which the arm is better, whichever way better is.

    >>> improvement({0: 1.0, 1: 2.0}, {0: 1.5, 1: 1.5}, falling=True)
    0.5
    """
    if reference is None:
        return None
    return probability_of_improvement(reference, arm) if falling else probability_of_improvement(arm, reference)


def recovery(each: Contender, all_of: Sequence[Contender]) -> Interval | None:
    """The interval of `recoveries`; None for doing nothing itself."""
    nothing = next((other for other in all_of if other.name == NOTHING), None)
    found = {} if nothing is None or each.name == NOTHING else recoveries(each, nothing)
    return t_interval(list(found.values())) if found else None


def recoveries(each: Contender, nothing: Contender) -> dict[int, float]:
    """By seed, the steps in which an arm learns a task as well as doing nothing has by its end."""
    both = {seed: (rows, nothing.runs[seed]) for seed, rows in each.runs.items() if seed in nothing.runs}
    found = {seed: metrics.recovery(rows, reference, each.setting) for seed, (rows, reference) in both.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def diverged(each: Contender) -> int:
    """How many runs met a loss that was not finite."""
    return sum(any(row.get("diverged") for row in rows) for rows in each.runs.values())


def health_names(each: Contender) -> list[str]:
    """The measures of health that any task has."""
    return sorted({name for rows in each.runs.values() for row in rows for name in row.get("health") or {}})


def mean_at(rows: Rows, *path: str) -> float | None:
    """The mean over the tasks that have this number.

    >>> mean_at([{"a": {"b": 1.0}}, {"a": None}, {"a": {"b": 2.0}}], "a", "b")
    1.5
    """
    return _mean([at(row, path) for row in rows])


def at(row: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """The number at a path in a row, or None.

    >>> at({"remedy": {"seconds": 2}}, ("remedy", "seconds")), at({"remedy": None}, ("remedy", "seconds"))
    (2.0, None)
    """
    found: Any = row
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def told(interval: Interval | None) -> dict[str, Any] | None:
    """An interval for JSON."""
    return None if interval is None else interval.to_dict()


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _joined(rows: Rows) -> list[tuple[int, float | None, float | None]]:
    out, before = [], 0
    for row in rows:
        out += [(before + int(step), accuracy, loss) for step, accuracy, loss in row.get("curve") or ()]
        before += int(row.get("steps") or 0)
    return out
