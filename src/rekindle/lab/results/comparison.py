"""The arms of one setting compared: values by seed, intervals, paired differences, costs and curves.

Every interval that a table, a page, a document or a terminal shows is computed here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any, TypeVar

from rekindle.lab.results import metrics
from rekindle.lab.results.metrics import ArmRuns, at, mean_at
from rekindle.lab.results.statistics import Difference, Interval, holm, paired, t_interval
from rekindle.lab.results.wording import Measure, measure
from rekindle.lab.settings import Setting

T = TypeVar("T")

FIRE, NOTHING, FRESH, TUNED = "fire", "nothing", "full-reset", " (tuned)"
RANDOM, BODY = "random-isometry", "-body"
UNEQUAL = "the tasks are not equally hard: what was lost is what a fresh start gains"


def references(arm: str) -> tuple[str, str, str]:
    """What an arm is compared with: the random isometry is the one that leaves the output layer if the arm does."""
    return NOTHING, FRESH, RANDOM + (BODY if arm.removesuffix(TUNED).endswith(BODY) else "")


@dataclass(frozen=True)
class ArmComparison:
    """One setting: its arms in the study's order, why others were refused or failed, and what tuning chose."""

    setting: Setting
    arms: Mapping[str, ArmRuns]
    refused: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)
    classes: int | None = None
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The setting's name."""
        return self.setting.name

    @property
    def headline(self) -> Measure:
        """What is compared."""
        return measure(self.setting.headline)

    @property
    def last(self) -> int:
        """How many of the last tasks it is averaged over."""
        longest = max((len(rows) for arm in self.arms.values() for rows in arm.runs.values()), default=1)
        return min(self.setting.last, longest)

    @property
    def seeds(self) -> list[int]:
        """All seeds that any arm has finished."""
        return sorted({seed for values in self.values.values() for seed in values})

    @cached_property
    def values(self) -> dict[str, dict[int, float]]:
        """The headline by arm and seed; an arm all of whose runs diverged has none."""
        found = {name: arm.values() for name, arm in self.arms.items()}
        return {name: values for name, values in found.items() if values}

    @cached_property
    def ranked(self) -> list[str]:
        """Arms from the best mean to the worst."""
        sign = -1 if self.headline.higher else 1
        return sorted(self.values, key=lambda arm: sign * self.interval(arm).mean)

    # Intervals and differences

    def interval(self, arm: str) -> Interval:
        """The headline's mean over seeds with its t-interval."""
        return self._once(("interval", arm), lambda: t_interval(list(self.values[arm].values())))

    def against(self, arm: str, reference: str) -> Difference | None:
        """Arm minus reference, paired by seed; a tuned arm against the tuned reference, for the budget is equal."""
        return self.differences("headline", reference).get(arm) or self._pair("headline", arm, reference)

    def differences(self, metric: str, reference: str) -> dict[str, Difference]:
        """Every arm minus a reference, with Holm's p over all of them."""

        def computed() -> dict[str, Difference]:
            found = {arm: pair for arm in self.arms if (pair := self._pair(metric, arm, reference)) is not None}
            corrected = holm({arm: pair.p for arm, pair in found.items()})
            return {arm: replace(pair, holm=corrected[arm]) for arm, pair in found.items()}

        return self._once(("differences", metric, reference), computed)

    def number(self, arm: str, name: str) -> Interval | None:
        """One of `NUMBERS`, or "recovery", with its interval over the seeds; None where it does not apply."""

        def computed() -> Interval | None:
            if name == "recovery":
                values = self._recoveries(arm)
            else:
                values = self.arms[arm].by_seed(lambda rows: NUMBERS[name](rows, self.setting))
            return t_interval(list(values.values())) if values else None

        return self._once(("number", arm, name), computed)

    def curve(self, arm: str, *path: str) -> dict[str, list[Any]] | None:
        """A number of every task, mean and interval over the seeds; None if no run has it."""

        def computed() -> dict[str, list[Any]] | None:
            runs = self.arms[arm].runs.values()
            length = max(map(len, runs), default=0)
            out: dict[str, list[Any]] = {"task": list(range(length)), "mean": [], "low": [], "high": []}
            for task in range(length):
                values = [at(rows[task], path) for rows in runs if task < len(rows)]
                known = [value for value in values if value is not None]
                interval = t_interval(known) if known else None
                for end in ("mean", "low", "high"):
                    out[end].append(None if interval is None else getattr(interval, end))
            return out if any(value is not None for value in out["mean"]) else None

        return self._once(("curve", arm, path), computed)

    # What tables and files hold

    def line(self, arm: str, metric: str = "headline") -> dict[str, Any]:
        """The row of an arm in the table of results."""
        each, values = self.arms[arm], self.arms[arm].values(metric)
        interval = self.interval(arm) if metric == "headline" else t_interval(list(values.values()))
        line: dict[str, Any] = {
            "setting": self.name,
            "arm": arm,
            "tuned": each.tuned,
            "metric": self.setting.headline if metric == "headline" else metric,
            "seeds": len(values),
            "mean": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "note": interval.note,
            "values": {str(seed): value for seed, value in sorted(values.items())},
        }
        names = ("difference", FRESH.replace("-", "_"), RANDOM.replace("-", "_"))
        for name, reference in zip(names, references(arm), strict=True):
            difference = self.differences(metric, reference).get(arm)
            for end in ("mean", "low", "high"):
                value = None if difference is None else getattr(difference, end)
                line[name if end == "mean" else f"{name}_{end}"] = value
            if reference == NOTHING:
                line["p"] = None if difference is None else difference.p
                line["holm"] = None if difference is None else difference.holm
        for name in (*NUMBERS, "recovery"):
            found = self.number(arm, name)
            line[name] = None if found is None else found.mean
        line["diverged"] = each.diverged
        if len(values) < len(each.runs):
            line["note"] = f"{len(each.runs) - len(values)} of {len(each.runs)} runs diverged and are not in the mean"
        return line

    def validity(self) -> dict[str, Any]:
        """Whether the stream can tell remedies apart: doing nothing must fall to half of its first task or below.

        `valid` is None, and `note` says why, where that cannot be decided.
        """
        values, runs = self.values.get(NOTHING), list(self.arms[NOTHING].runs.values()) if NOTHING in self.arms else []
        firsts = [value for rows in runs if (value := metrics.first_task(rows, self.setting)) is not None]
        if not values or not firsts:
            # An agent has no return of a task in whose second half no episode ended.
            missing = f"no run of {NOTHING!r} with a value for its first task"
            note = missing if values else f"no finished run of {NOTHING!r}"
            return {"valid": None, "first": None, "last": None, "fall": None, "note": note}
        fall = metrics.share_lost(runs, self.setting, self.classes)
        return {
            "valid": None if fall is None else fall >= 0.5,
            "first": fmean(firsts),
            "last": fmean(values.values()),
            "fall": fall,
            "note": None if metrics.equally_hard(self.setting) else UNEQUAL,
        }

    # Inside

    def _pair(self, metric: str, arm: str, reference: str) -> Difference | None:
        other = self._other(arm, reference)
        if other == arm or other not in self.arms or arm not in self.arms:
            return None
        if metric == "headline":
            return paired(self.values.get(arm, {}), self.values.get(other, {}))
        return paired(self.arms[arm].values(metric), self.arms[other].values(metric))

    def _other(self, arm: str, reference: str) -> str:
        tuned = arm.endswith(TUNED) or (arm in self.arms and self.arms[arm].tuned)
        return reference + TUNED if tuned and not reference.endswith(TUNED) else reference

    def _recoveries(self, arm: str) -> dict[int, float]:
        """By seed, the steps in which an arm learns a task as well as doing nothing has by its end."""
        nothing = self.arms.get(NOTHING)
        if nothing is None or arm == NOTHING:
            return {}
        both = {seed: (rows, nothing.runs[seed]) for seed, rows in self.arms[arm].runs.items() if seed in nothing.runs}
        found = {seed: metrics.recovery(rows, reference, self.setting) for seed, (rows, reference) in both.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def _once(self, key: object, computed: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = computed()
        found: T = self._known[key]
        return found


# What a table shows of a run beside its headline. remedy_seconds is for one task that had any; retention is right
# after the boundary, retention_end at the end of the task that followed.
NUMBERS: dict[str, Callable[[Any, Setting], float | None]] = {
    "first_task": metrics.first_task,
    "auc": metrics.auc,
    "drop": metrics.drop,
    "peak": metrics.peak,
    "retention": metrics.retention_after_remedy,
    "retention_end": metrics.retention,
    "function_drift": metrics.drift,
    "remedy_seconds": lambda rows, setting: mean_at(
        [row for row in rows if row.get("remedy_seconds")], "remedy_seconds"
    ),
    "seconds": lambda rows, setting: sum(row.get("seconds") or 0.0 for row in rows),
}


def choice(made: Mapping[str, Any]) -> str:
    """What tuning changed in an arm, as text."""
    if not made.get("arm"):
        return str(made.get("note") or "nothing yet")
    if made["place"] == 0:
        return "its default"
    arm = made["arm"]
    options = {**(arm.get("options") or {}), **(arm.get("optimizer_options") or {})}
    rate = [f"{arm['lr']:g} of the learning rate"] if arm.get("lr") else []
    return ", ".join([*rate, *(f"{key}={value}" for key, value in options.items())])
