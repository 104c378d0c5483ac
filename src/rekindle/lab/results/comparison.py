"""The arms of one setting compared: values by seed, intervals, paired differences, costs and curves.

Every interval that a table, a page, a document or a terminal shows is computed here, once. An `ArmComparison` is made
from the runs of a study or from the dictionary that `Results.to_dict` gave, so that a page can be made from a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from statistics import fmean
from typing import Any, TypeVar

from rekindle.lab.results import metrics
from rekindle.lab.results.metrics import ArmRuns, Rows, at, mean_at, mean_of_known
from rekindle.lab.results.statistics import (
    Difference,
    Interval,
    holm,
    paired,
    t_interval,
)
from rekindle.lab.results.wording import Measure, measure
from rekindle.lab.settings import Setting

T = TypeVar("T")

FIRE, NOTHING, FRESH, TUNED = "fire", "nothing", "full-reset", " (tuned)"
RANDOM, HEADS = "random-isometry", "-heads"
CURVES = tuple(f"{when}_{what}" for when in ("online", "train", "test", "old") for what in ("accuracy", "loss"))
CURVES += ("return", "online_return")
UNEQUAL = "the tasks are not equally hard: what was lost is what a fresh start gains"


def references(arm: str) -> tuple[str, str, str]:
    """What an arm is compared with: the random isometry is the one that touches the output layer if the arm does.

    >>> references("fire")[-1], references("fire-nearest-heads (tuned)")[-1]
    ('random-isometry', 'random-isometry-heads')
    """
    return NOTHING, FRESH, RANDOM + (HEADS if arm.removesuffix(TUNED).endswith(HEADS) else "")


@dataclass(frozen=True)
class Pair:
    """One measure of one setting: arm − other over the seeds that both have."""

    setting: str
    what: str
    measured: Measure
    difference: Difference

    def cells(self) -> tuple[str, str, str, str]:
        """Setting, measure, difference with its interval, and who is better: "–" where it may be chance."""
        found = self.difference
        shown = f"{self.measured.difference(found.mean)} {self.measured.difference_ends(found)}".strip()
        sure = found.holm is not None and found.holm < 0.05
        gain = (found.mean > 0) == self.measured.higher
        verdict = ("better" if gain else "worse") if sure else "–"
        return self.setting, f"{self.what}, {self.measured.step}".removesuffix(", "), shown, verdict


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

    def pairs(self, arm: str, other: str) -> list[Pair]:
        """Two arms in everything that is measured, with Holm's p over the measures of this setting."""
        old = measure("old_loss" if self.setting.falling else "old_accuracy")
        cost = replace(old, higher=False)
        asked = [("headline", self.headline, self.values.get(arm, {}), self.values.get(other, {}))]
        for what, measured, name in (
            ("old tasks right after the remedy", old, "retention"),
            ("old tasks at the end", old, "retention_end"),
            ("drop of the task just learned", cost, "drop"),
            ("change of the function (KL)", measure("function_drift"), "function_drift"),
        ):
            ours, theirs = (
                self.arms[each].by_seed(lambda rows, name=name: NUMBERS[name](rows, self.setting))  # type: ignore[misc]
                for each in (arm, other)
            )
            asked.append((what, measured, ours, theirs))
        if NOTHING in self.arms:
            steps = Measure("steps", "steps", higher=False)
            asked.append(
                (
                    "until learned as well as by doing nothing",
                    steps,
                    self._recoveries(arm, True),
                    self._recoveries(other, True),
                )
            )
        found = [
            Pair(self.name, what, measured, difference)
            for what, measured, ours, theirs in asked
            if (difference := paired(ours, theirs)) is not None
        ]
        return with_holm(found)

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

    def detail(self, arm: str) -> dict[str, Any]:
        """Everything about an arm, ready for JSON."""
        each, values = self.arms[arm], self.values.get(arm)
        kind = "loss" if self.setting.falling else "accuracy"
        health = sorted({name for rows in each.runs.values() for row in rows for name in row.get("health") or {}})
        before = t_interval_of(each.by_seed(lambda rows: mean_at(rows, "remedy", f"old_{kind}_before")))
        return {
            "name": arm,
            "arm": dict(each.arm),
            "tuned": each.tuned,
            "seeds": sorted(each.runs),
            "headline": self.interval(arm).to_dict() if values else None,
            "differences": {
                reference: None if (d := self.differences("headline", reference).get(arm)) is None else d.to_dict()
                for reference in references(arm)
            },
            **{name: as_dict(self.number(arm, name)) for name in (*NUMBERS, "recovery")},
            "diverged": each.diverged,
            "retained": {
                "before": as_dict(before),
                "after": as_dict(self.number(arm, "retention")),
                "end": as_dict(self.number(arm, "retention_end")),
            },
            "curves": {name: curve for name in CURVES if (curve := self.curve(arm, name)) is not None},
            "health": {name: curve for name in health if (curve := self.curve(arm, "health", name)) is not None},
            "learning": each.learning() if each.runs else None,
        }

    def validity(self) -> dict[str, Any]:
        """Whether the stream can tell remedies apart: doing nothing must fall to half of its first task or below.

        `valid` is None, and `note` says why, where that cannot be decided.
        """
        values, runs = self.values.get(NOTHING), list(self.arms[NOTHING].runs.values()) if NOTHING in self.arms else []
        firsts = [value for rows in runs if (value := metrics.first_task(rows, self.setting)) is not None]
        if not values or not firsts:
            # An agent has no return of a task in whose second half no episode ended.
            missing = (
                f"no run of {NOTHING!r} with a value for its first task"
                if values
                else f"no finished run of {NOTHING!r}"
            )
            return {"valid": None, "first": None, "last": None, "fall": None, "note": missing}
        first, last = fmean(firsts), fmean(values.values())
        valid, fall = metrics.valid_stream(runs, self.setting, self.classes), None
        if valid is not None:
            # A loss is judged by how far below chance it is, as `valid_stream` does.
            chance = math.log(self.classes or 1)
            low = mean_of_known([metrics.chance_return(rows) for rows in runs]) or 0.0
            top, bottom = (chance - each if self.setting.falling else each - low for each in (first, last))
            fall = (top - bottom) / top if top > 0 else None
        note = None if metrics.equally_hard(self.setting) else UNEQUAL
        return {"valid": valid, "first": first, "last": last, "fall": fall, "note": note}

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

    def _recoveries(self, arm: str, itself: bool = False) -> dict[int, float]:
        """By seed, the steps in which an arm learns a task as well as doing nothing has by its end."""
        nothing = self.arms.get(NOTHING)
        if nothing is None or (arm == NOTHING and not itself):
            return {}
        both = {seed: (rows, nothing.runs[seed]) for seed, rows in self.arms[arm].runs.items() if seed in nothing.runs}
        found = {seed: metrics.recovery(rows, reference, self.setting) for seed, (rows, reference) in both.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def _once(self, key: Any, computed: Callable[[], T]) -> T:
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
    "peak": lambda rows, setting: metrics.peak(rows),
    "retention": metrics.retention_after_remedy,
    "retention_end": metrics.retention,
    "function_drift": lambda rows, setting: metrics.drift(rows),
    "remedy_seconds": lambda rows, setting: mean_at(
        [row for row in rows if row.get("remedy_seconds")], "remedy_seconds"
    ),
    "seconds": lambda rows, setting: sum(row.get("seconds") or 0.0 for row in rows),
}


def comparisons(data: Mapping[str, Any]) -> list[ArmComparison]:
    """A comparison for each setting of what `Results.to_dict` gave, in its order.

    >>> comparisons({"settings": {}, "runs": []})
    []
    """
    known = {each.name for each in fields(Setting)}
    found = []
    for name, about in data["settings"].items():
        setting = Setting(**{key: value for key, value in about.items() if key in known})
        details = {each["name"]: each for each in (data.get("arms") or {}).get(name, ())}
        runs: dict[str, dict[int, Rows]] = {}
        tuned: dict[str, bool] = {}
        reasons: dict[str, dict[str, str]] = {"refused": {}, "failed": {}}
        for run in data["runs"]:
            if run["setting"] != name:
                continue
            if run["state"] == "finished":
                runs.setdefault(run["arm"], {})[int(run["seed"])] = run["tasks"]
                tuned[run["arm"]] = bool(run.get("tuned"))
            elif run["state"] in reasons:
                reasons[run["state"]][run["arm"]] = run.get("reason") or ""
        arms = {
            arm: ArmRuns(setting, arm, (details.get(arm) or {}).get("arm") or {}, tuned[arm], seeds)
            for arm, seeds in runs.items()
        }
        prefix = f"{name}/"
        chosen = {
            key.removeprefix(prefix): choice(made)
            for key, made in (data.get("tuning") or {}).items()
            if key.startswith(prefix)
        }
        found.append(ArmComparison(setting, arms, chosen=chosen, classes=about.get("classes"), **reasons))
    return found


def choice(made: Mapping[str, Any]) -> str:
    """What tuning changed in an arm, as text.

    >>> choice({"place": 1, "arm": {"lr": 0.5, "options": {"scale": "nearest"}}})
    '0.5 of the learning rate, scale=nearest'
    >>> choice({"place": 0, "arm": {"options": {"tau": 0.1}}}), choice({"arm": None, "note": "none ran"})
    ('its default', 'none ran')
    """
    if not made.get("arm"):
        return str(made.get("note") or "nothing yet")
    if made["place"] == 0:
        return "its default"
    arm = made["arm"]
    options = {**(arm.get("options") or {}), **(arm.get("optimizer_options") or {})}
    rate = [f"{arm['lr']:g} of the learning rate"] if arm.get("lr") else []
    return ", ".join([*rate, *(f"{key}={value}" for key, value in options.items())])


def with_holm(pairs: Sequence[Pair]) -> list[Pair]:
    """The same with Holm's p over all of them."""
    corrected = holm({str(place): pair.difference.p for place, pair in enumerate(pairs)})
    return [
        replace(pair, difference=replace(pair.difference, holm=corrected[str(place)]))
        for place, pair in enumerate(pairs)
    ]


def t_interval_of(values: Mapping[int, float]) -> Interval | None:
    """The interval of values by seed; None without any.

    >>> t_interval_of({}) is None
    True
    """
    return t_interval(list(values.values())) if values else None


def as_dict(interval: Interval | None) -> dict[str, Any] | None:
    """An interval for JSON."""
    return None if interval is None else interval.to_dict()
