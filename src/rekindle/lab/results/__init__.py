"""The results of a study: numbers per run, intervals over seeds, arms compared, and all of it as `Results`.

- `metrics`: one number per run, from its rows;
- `statistics`: intervals, paired differences, Holm's correction;
- `wording`: what measures are called, their units, and how numbers are written;
- `comparison`: the arms of one setting, the one place where intervals are computed;
- here: `Results`, every setting of a study as rows, table, frame and dictionary; `planned` comparisons.

Imports settings and the store, never a view. Start with `comparison`.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from rekindle.extras import require
from rekindle.lab.arms import Arm
from rekindle.lab.execution.store import Row, RunRecord
from rekindle.lab.results.comparison import ArmComparison, choice
from rekindle.lab.results.metrics import ArmRuns, Rows, final
from rekindle.lab.results.statistics import Difference, holm, paired, scipy_stats
from rekindle.lab.results.wording import measure
from rekindle.lab.settings import Setting
from rekindle.lab.tuning import TunedChoice

__all__ = ["ArmComparison", "ArmRuns", "PlannedComparison", "Results", "RunEntry", "planned", "values"]

FORMAT = 1
LEVEL = 0.05
_FIRST = ("setting", "arm", "seed", "identity", "arm_lr", "arm_options", "task", "name")


@dataclass(frozen=True)
class RunEntry:
    """One run of the study, with what is known of it."""

    setting: Setting
    name: str
    arm: Arm
    tuned: bool
    seed: int
    identity: str
    record: RunRecord
    code: str | None = None
    """The code that would make it today (`Run.code`); None where that is not known."""

    @property
    def tasks(self) -> Rows:
        """The rows of its tasks."""
        return [row for row in self.record.rows if row["kind"] == "task"]

    @property
    def reason(self) -> str | None:
        """Why it was refused or failed."""
        last = self.record.rows[-1] if self.record.rows else {}
        if self.record.state == "refused":
            return str(last.get("refused"))
        return str(last.get("error")) if self.record.state == "failed" else None


@dataclass(frozen=True)
class Results:
    """The runs of a study and what follows from them.

    >>> Results({"name": "empty"}, ()).table()
    []
    """

    study: Mapping[str, Any]
    entries: tuple[RunEntry, ...]
    choices: Mapping[tuple[str, str], TunedChoice] | None = None

    @cached_property
    def settings(self) -> dict[str, Setting]:
        """The settings by name, in the study's order."""
        return {entry.setting.name: entry.setting for entry in self.entries}

    @property
    def rows(self) -> list[Row]:
        """Every task of every finished run, with its setting, arm and seed."""
        return [
            {"setting": e.setting.name, "arm": e.name, "seed": e.seed, "identity": e.identity, **row}
            for e in self.entries
            if e.record.state == "finished"
            for row in e.tasks
        ]

    def frame(self) -> object:
        """The rows as a pandas DataFrame without nesting: groups become dotted names, lists JSON text."""
        pandas = require("pandas", "lab", "a frame")
        lines = []
        for entry in self.entries:
            if entry.record.state == "finished":
                rate, options = entry.arm.lr, json.dumps(dict(entry.arm.options), sort_keys=True)
                head = {"setting": entry.setting.name, "arm": entry.name, "seed": entry.seed}
                head |= {"identity": entry.identity, "arm_lr": rate, "arm_options": options}
                lines += [head | _unnested(row) for row in entry.tasks]
        columns = [*_FIRST, *sorted({name for line in lines for name in line} - {*_FIRST, "kind"})]
        table = pandas.DataFrame(lines, columns=columns).astype({"arm_lr": "float64"})
        return table.sort_values(["setting", "arm", "seed", "identity", "task"], kind="stable", ignore_index=True)

    @cached_property
    def comparisons(self) -> dict[str, ArmComparison]:
        """The arms of each setting that have a finished run, in the study's order, tuned ones after the untuned."""
        found = {}
        for name, setting in self.settings.items():
            entries = [entry for entry in self.entries if entry.setting.name == name]
            finished = [entry for entry in entries if entry.record.state == "finished"]
            arms = {
                entry.name: ArmRuns(
                    setting,
                    entry.name,
                    entry.arm.to_dict(),
                    entry.tuned,
                    {each.seed: each.tasks for each in finished if each.name == entry.name},
                )
                for entry in finished
            }
            reasons: dict[str, dict[str, str]] = {"refused": {}, "failed": {}}
            for entry in entries:
                if entry.record.state in reasons:
                    reasons[entry.record.state].setdefault(entry.name, entry.reason or "")
            chosen = {a: choice(made.to_dict()) for (s, a), made in (self.choices or {}).items() if s == name}
            found[name] = ArmComparison(
                setting, arms, chosen=chosen, classes=self._stream_facts(name).get("classes"), **reasons
            )
        return found

    def table(self, metric: str = "headline", setting: str | None = None) -> list[Row]:
        """A row per arm and setting: mean, 95 % interval, paired difference to nothing with Holm's p, and the cost.

        metric: "headline", or a number of the task rows, averaged over the same last tasks.
        """
        if setting is not None and setting not in self.settings:
            raise ValueError(f"there is no setting {setting!r} in this study; there are {', '.join(self.settings)}")
        return [
            comparison.line(arm, metric)
            for name, comparison in self.comparisons.items()
            if setting in (None, name)
            for arm, runs in comparison.arms.items()
            if runs.values(metric)
        ]

    def validity(self, setting: str) -> dict[str, Any]:
        """Whether the stream can tell remedies apart: doing nothing must fall to half of its first task or below."""
        return self.comparisons[setting].validity()

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "format": FORMAT,
            "study": dict(self.study),
            "settings": {name: setting.to_dict() | self._stream_facts(name) for name, setting in self.settings.items()},
            "runs": [_entry_dict(entry) for entry in self.entries],
            "table": self.table(),
            "validity": {name: self.validity(name) for name in self.settings},
            "tuning": {f"{s}/{a}": choice.to_dict() for (s, a), choice in (self.choices or {}).items()},
            "made": {"versions": self.versions(), "platform": platform.platform(), "code": self.provenance()},
        }

    def __str__(self) -> str:
        """The table as text."""
        lines = [("setting", "arm", "seeds", "mean [95 %]", "− nothing [95 %]", "Holm p")]
        for row in self.table():
            difference = _interval_text(row["difference"], row["difference_low"], row["difference_high"], "+")
            p = "" if row["holm"] is None else f"{row['holm']:.3g}"
            mean = _interval_text(row["mean"], row["low"], row["high"], "")
            lines.append((row["setting"], row["arm"], str(row["seeds"]), mean, difference, p))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        text += [f"refused: {e.setting.name} {e.name}: {e.reason}" for e in self._first("refused")]
        text += [f"failed: {e.setting.name} {e.name} seed {e.seed}: {e.reason}" for e in self._first("failed")]
        waiting = sum(e.record.state in ("new", "partial") for e in self.entries)
        text += [f"{waiting} of {len(self.entries)} runs are not done yet"] if waiting else []
        said = self.provenance()
        text += [said] if said else []
        return "\n".join(text)

    def provenance(self) -> str | None:
        """A note about the code that made the finished runs; None if it is this code for all."""
        done = [entry for entry in self.entries if entry.record.state == "finished"]
        other = sum(entry.code is not None and entry.record.code != entry.code for entry in done)
        told = f"{other} of {len(done)} runs were made by other code than this: run the study to renew them"
        return told if other else None

    def _first(self, state: str) -> list[RunEntry]:
        """The first entry of each setting, arm and reason in this state: most reasons are the same for every seed."""
        found: dict[tuple[str, str, str | None], RunEntry] = {}
        for entry in self.entries:
            if entry.record.state == state:
                found.setdefault((entry.setting.name, entry.name, entry.reason), entry)
        return list(found.values())

    def _stream_facts(self, setting: str) -> dict[str, Any]:
        """What the runs say of the stream: how many tasks, classes, and their names."""
        for entry in self.entries:
            if entry.setting.name == setting and entry.record.state == "finished":
                about = entry.record.rows[0].get("stream") or {}
                return {
                    "classes": about.get("classes"),
                    "tasks": about.get("tasks", len(entry.tasks)),
                    "task_names": [row.get("name") for row in entry.tasks],
                    "parameters": entry.record.rows[0].get("parameters"),
                }
        return {}

    def versions(self) -> dict[str, str]:
        """What the runs were made with."""
        return next((dict(e.record.rows[0].get("versions") or {}) for e in self.entries if e.record.rows), {})


def _entry_dict(entry: RunEntry) -> dict[str, Any]:
    return {
        "setting": entry.setting.name,
        "arm": entry.name,
        "seed": entry.seed,
        "tuned": entry.tuned,
        "identity": entry.identity,
        "state": entry.record.state,
        "reason": entry.reason,
        "tasks": [{name: value for name, value in row.items() if name != "kind"} for row in entry.tasks],
    }


def _unnested(row: Mapping[str, Any], prefix: str = "") -> Row:
    out: Row = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            out.update(_unnested(value, f"{prefix}{name}."))
        elif isinstance(value, list | tuple):
            out[prefix + name] = json.dumps(value)
        elif value is not None:
            out[prefix + name] = value
    return out


def _interval_text(mean: float | None, low: float | None, high: float | None, sign: str) -> str:
    if mean is None:
        return ""
    text = f"{mean:{sign}.4f}"
    return text if low is None or high is None else f"{text} [{low:{sign}.4f}, {high:{sign}.4f}]"


# The comparisons that a study wrote down before its first run, and nothing else


@dataclass(frozen=True)
class PlannedComparison:
    """One comparison in one setting: arm − other of the headline, paired by seed.

    `p` is of a difference, or of the lack of one larger than `same`; `holm` the same corrected over all claims of the
    study; `end` is the difference of the last tasks' accuracy at their end, where the headline is while learning.
    """

    setting: str
    about: str
    arm: str
    minus: str
    difference: Difference
    same: float | None
    higher: bool
    p: float | None
    holm: float | None = None
    end: Difference | None = None

    @property
    def verdict(self) -> str:
        """ "better", "worse", "the same", or "open" where the runs do not decide."""
        if self.holm is None or self.holm >= LEVEL:
            return "open"
        if self.same is not None:
            return "the same"
        return "better" if (self.difference.mean > 0) == self.higher else "worse"

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return {**asdict(self), "verdict": self.verdict}

    def __str__(self) -> str:
        return f"{self.setting}: {self.arm} − {self.minus} = {self.difference}, {self.verdict}"


def planned(results: Results) -> list[PlannedComparison]:
    """Every comparison of the study, in every setting that has finished both arms."""
    found = []
    for setting in results.study["settings"]:
        for wanted in results.study.get("comparisons", ()):
            if setting["name"] in wanted.get("settings", [setting["name"]]):
                claim = _claim(results, setting, wanted)
                found += [] if claim is None else [claim]
    corrected = holm({str(place): claim.p for place, claim in enumerate(found)})
    return [replace(claim, holm=corrected[str(place)]) for place, claim in enumerate(found)]


def _claim(results: Results, setting: Mapping[str, Any], wanted: Mapping[str, Any]) -> PlannedComparison | None:
    name, metric = setting["name"], setting["headline"]
    first, second = names = [_best(results, setting, wanted[key]) for key in ("arm", "minus")]
    arm, other = (values(results, name, each, metric) for each in names)
    difference = paired(arm, other)
    if difference is None:
        return None
    same = wanted.get("same")
    p = difference.p if same is None else equivalence(arm, other, float(same))
    end = None
    if metric.startswith("online"):
        after = metric.replace("online", "train")
        end = paired(*(values(results, name, each, after) for each in names))
    about = wanted.get("about", "")
    higher = measure(metric).higher
    return PlannedComparison(name, about, first, second, difference, same, higher, p, end=end)


def _best(results: Results, setting: Mapping[str, Any], names: str | Sequence[str]) -> str:
    """The arm; of several the one whose chosen configuration did best on the seeds of tuning."""
    if isinstance(names, str):
        return names
    sign = 1.0 if measure(setting["headline"]).higher else -1.0

    def tuned(name: str) -> float:
        choice = (results.choices or {}).get((setting["name"], name))
        known = [] if choice is None else [sign * value for value in choice.values if value is not None]
        return max(known, default=-math.inf)

    return max(names, key=tuned)


def values(results: Results, setting: str, arm: str, metric: str) -> dict[int, float]:
    """A metric of the last tasks, by seed, of the finished runs of an arm."""
    entries = [each for each in results.entries if each.setting.name == setting and each.name == arm]
    found = {e.seed: final(e.record.rows, metric, e.setting.last) for e in entries if e.record.state == "finished"}
    return {seed: value for seed, value in found.items() if value is not None}


def equivalence(arm: Mapping[int, float], other: Mapping[int, float], margin: float) -> float | None:
    """The p-value of "they differ by the margin or more": the larger one of two one-sided paired t-tests."""
    gaps = [arm[seed] - other[seed] for seed in arm.keys() & other.keys()]
    if len(gaps) < 2:
        return None
    error = stdev(gaps) / math.sqrt(len(gaps))
    if error == 0:
        return 0.0 if abs(fmean(gaps)) < margin else 1.0
    distance = (margin - abs(fmean(gaps))) / error
    return float(scipy_stats().t.sf(distance, len(gaps) - 1))
