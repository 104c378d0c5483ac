"""What a study found: rows, a frame, a table with intervals, and one dictionary that pages and pictures are made of."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rekindle.extras import install
from rekindle.lab import metrics, tuning
from rekindle.lab.arms import Arm
from rekindle.lab.comparing import (
    NOTHING,
    REFERENCES,
    Contender,
    Rows,
    detail,
    differences,
    diverged,
    improvement,
    numbers,
    recovery,
)
from rekindle.lab.execution import store
from rekindle.lab.execution.store import Record, Row
from rekindle.lab.settings import Setting
from rekindle.lab.statistics import STREAMS_FOR_IQM, Interval, interquartile_mean, t_interval
from rekindle.lab.train import Run

if TYPE_CHECKING:
    from rekindle.lab.study import Study

FORMAT = 1
UNEQUAL = "the tasks are not equally hard: what was lost is what a fresh start gains"


@dataclass(frozen=True)
class Entry:
    """One run of the study, with what is known of it."""

    setting: Setting
    name: str
    arm: Arm
    tuned: bool
    seed: int
    identity: str
    record: Record

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
    entries: tuple[Entry, ...]
    choices: Mapping[tuple[str, str], tuning.Choice] | None = None

    @classmethod
    def of(cls, study: Study) -> Results:
        """What the study's folder holds now."""
        found = study.store
        plan = [(run, run.arm.name, False) for run in study.runs()]
        choices = study.choices()
        for setting in study.settings:
            for arm in study.arms:
                choice = choices.get((setting.name, arm.name))
                if choice is not None and choice.arm is not None:
                    name = tuning.tuned_name(arm.name)
                    plan += [(Run(setting, choice.arm, seed), name, True) for seed in study.seeds]
        return cls(
            study.to_dict(),
            tuple(
                Entry(run.setting, name, run.arm, tuned, run.seed, run.identity, found.read(run.identity))
                for run, name, tuned in plan
            ),
            choices,
        )

    @cached_property
    def settings(self) -> dict[str, Setting]:
        """The settings by name, in the study's order."""
        return {entry.setting.name: entry.setting for entry in self.entries}

    @property
    def rows(self) -> list[Row]:
        """Every task of every finished run, with its setting, arm and seed."""
        return [
            {"setting": e.setting.name, "arm": e.name, "seed": e.seed, "identity": e.identity} | row
            for e in self.entries
            if e.record.state == "finished"
            for row in e.tasks
        ]

    def frame(self) -> Any:
        """The rows as a pandas DataFrame, flat."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(f"a frame needs pandas: {install('lab')}") from error
        return pandas.DataFrame([store.flat(row) for row in self.rows]).drop(columns="kind", errors="ignore")

    def contenders(self, setting: str) -> list[Contender]:
        """The arms of a setting that have a finished run, in the study's order, tuned ones after the untuned."""
        found: dict[str, dict[int, Rows]] = {}
        about: dict[str, Entry] = {}
        for entry in self.entries:
            if entry.setting.name == setting and entry.record.state == "finished":
                found.setdefault(entry.name, {})[entry.seed] = entry.tasks
                about.setdefault(entry.name, entry)
        return [Contender(e.setting, name, e.arm, e.tuned, found[name]) for name, e in about.items()]

    def table(self, metric: str = "headline", setting: str | None = None) -> list[Row]:
        """A line an arm and setting: mean, 95 % interval, paired difference to nothing with Holm's p, and the price.

        metric: "headline", or a number of the task rows, averaged over the same last tasks.
        """
        if setting is not None and setting not in self.settings:
            raise ValueError(f"there is no setting {setting!r} in this study; there are {', '.join(self.settings)}")
        lines: list[Row] = []
        for name in self.settings if setting is None else [setting]:
            arms = self.contenders(name)
            against = differences(arms, metric)
            lines += [_line(each, metric, against[each.name], arms) for each in arms if each.values(metric)]
        return lines

    def validity(self, setting: str) -> dict[str, Any]:
        """Whether the stream can tell remedies apart: doing nothing must fall to half of its first task or below.

        `valid` is None, and `note` says why, where that cannot be told.
        """
        nothing = next((each for each in self.contenders(setting) if each.name == NOTHING), None)
        if nothing is None or not nothing.headline:
            return {"valid": None, "first": None, "last": None, "fall": None, "note": f"no finished run of {NOTHING!r}"}
        chosen, classes = self.settings[setting], self._stream(setting).get("classes")
        runs = [list(rows) for rows in nothing.runs.values()]
        firsts = [value for rows in runs if (value := metrics.first_task(rows, chosen)) is not None]
        first, last = fmean(firsts), fmean(nothing.headline.values())
        valid, fall = metrics.valid_stream(runs, chosen, classes), None
        if valid is not None:
            # A loss is judged by how far below chance it is, as `valid_stream` does.
            top, bottom = (math.log(classes or 1) - each if chosen.falling else each for each in (first, last))
            fall = (top - bottom) / top if top > 0 else None
        note = None if metrics.equally_hard(chosen) else UNEQUAL
        return {"valid": valid, "first": first, "last": last, "fall": fall, "note": note}

    def over_streams(self) -> dict[str, Any]:
        """Every arm over all settings: the interquartile mean of its score, and how often it beats doing nothing.

        A score is the headline as a share of the first task's value (for a loss the other way round), so that 1 is
        as good as new; streams whose tasks are not equally hard have none. A tuned arm is held against doing nothing
        tuned.
        """
        arms: dict[str, dict[str, Contender]] = {}
        for setting in self.settings:
            for each in self.contenders(setting):
                arms.setdefault(each.name, {})[setting] = each
        out: dict[str, Any] = {}
        for name, by_setting in arms.items():
            scores = {setting: scored for setting, each in by_setting.items() if (scored := _scores(each))}
            tuned = any(each.tuned for each in by_setting.values())
            reference = tuning.tuned_name(NOTHING) if tuned else NOTHING
            wins = [
                win
                for setting, each in by_setting.items()
                if setting in arms.get(reference, {}) and name != reference
                if (win := improvement(each.headline, arms[reference][setting].headline, each.setting.falling))
                is not None
            ]
            interval: Interval | None = None
            if len(scores) >= STREAMS_FOR_IQM:
                interval = interquartile_mean(scores)
            out[name] = {
                "streams": len(scores),
                "iqm": None if interval is None else interval.to_dict(),
                "improvement": fmean(wins) if wins else None,
            }
        few = sum(map(metrics.equally_hard, self.settings.values())) < STREAMS_FOR_IQM
        note = f"an interquartile mean needs at least {STREAMS_FOR_IQM} streams of equally hard tasks" if few else None
        return {"note": note, "arms": out}

    def to_dict(self) -> dict[str, Any]:
        """All that pages and pictures need, ready for JSON."""
        details: dict[str, list[dict[str, Any]]] = {}
        for name in self.settings:
            arms = self.contenders(name)
            against = differences(arms)
            details[name] = [detail(each, against[each.name], arms) for each in arms]
        return {
            "format": FORMAT,
            "study": dict(self.study),
            "settings": {name: setting.to_dict() | self._stream(name) for name, setting in self.settings.items()},
            "runs": [_told(entry) for entry in self.entries],
            "table": self.table(),
            "arms": details,
            "validity": {name: self.validity(name) for name in self.settings},
            "streams": self.over_streams(),
            "tuning": {f"{s}/{a}": choice.to_dict() for (s, a), choice in (self.choices or {}).items()},
            "made": {"versions": self._versions(), "platform": platform.platform()},
        }

    def __str__(self) -> str:
        """The table as text."""
        lines = [("setting", "arm", "seeds", "mean [95 %]", "− nothing [95 %]", "Holm p")]
        for row in self.table():
            difference = _ends(row["difference"], row["difference_low"], row["difference_high"], "+")
            p = "" if row["holm"] is None else f"{row['holm']:.3g}"
            mean = _ends(row["mean"], row["low"], row["high"], "")
            lines.append((row["setting"], row["arm"], str(row["seeds"]), mean, difference, p))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        text += [f"refused: {e.setting.name} {e.name}: {e.reason}" for e in self._first("refused")]
        text += [f"failed: {e.setting.name} {e.name} seed {e.seed}: {e.reason}" for e in self._first("failed")]
        waiting = sum(e.record.state in ("new", "partial") for e in self.entries)
        text += [f"{waiting} of {len(self.entries)} runs are not done yet"] if waiting else []
        return "\n".join(text)

    def _first(self, state: str) -> list[Entry]:
        """The first entry of each setting and arm in this state: the reason is the same for every seed."""
        found: dict[tuple[str, str], Entry] = {}
        for entry in self.entries:
            if entry.record.state == state:
                found.setdefault((entry.setting.name, entry.name), entry)
        return list(found.values())

    def _stream(self, setting: str) -> dict[str, Any]:
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

    def _versions(self) -> dict[str, str]:
        return next((dict(e.record.rows[0].get("versions") or {}) for e in self.entries if e.record.rows), {})


def _line(each: Contender, metric: str, against: Mapping[str, Any], all_of: Sequence[Contender]) -> Row:
    values = each.values(metric)
    interval = t_interval(list(values.values()))
    line: Row = {
        "setting": each.setting.name,
        "arm": each.name,
        "tuned": each.tuned,
        "metric": each.setting.headline if metric == "headline" else metric,
        "seeds": len(values),
        "mean": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "note": interval.note,
        "values": {str(seed): value for seed, value in sorted(values.items())},
    }
    for reference in REFERENCES:
        difference = against[reference]
        name = "difference" if reference == NOTHING else reference.replace("-", "_")
        for end in ("mean", "low", "high"):
            value = None if difference is None else getattr(difference, end)
            line[name if end == "mean" else f"{name}_{end}"] = value
        if reference == NOTHING:
            line["p"] = None if difference is None else difference.p
            line["holm"] = None if difference is None else difference.holm
    for name, number in numbers(each.setting).items():
        found = each.over_seeds(number)
        line[name] = None if found is None else found.mean
    steps = recovery(each, all_of)
    line["recovery"], line["diverged"] = None if steps is None else steps.mean, diverged(each)
    if len(values) < len(each.runs):
        line["note"] = f"{len(each.runs) - len(values)} of {len(each.runs)} runs diverged and are not in the mean"
    return line


def _scores(each: Contender) -> list[float]:
    out: list[float] = []
    if not metrics.equally_hard(each.setting):
        return out
    for seed, value in each.headline.items():
        first = metrics.first_task(each.runs[seed], each.setting)
        top, bottom = (first, value) if each.setting.falling else (value, first)
        if top is not None and bottom:
            out.append(top / bottom)
    return out


def _told(entry: Entry) -> dict[str, Any]:
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


def _ends(mean: float | None, low: float | None, high: float | None, sign: str) -> str:
    if mean is None:
        return ""
    text = f"{mean:{sign}.4f}"
    return text if low is None or high is None else f"{text} [{low:{sign}.4f}, {high:{sign}.4f}]"
