"""What a study found: rows, a frame, a table with intervals, and one dictionary that pages and pictures are made of."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rekindle.extras import require
from rekindle.lab import tuning
from rekindle.lab.arms import Arm
from rekindle.lab.execution.store import Row, RunRecord, flat
from rekindle.lab.results.comparison import ArmComparison, choice
from rekindle.lab.results.metrics import ArmRuns, Rows
from rekindle.lab.settings import Setting

FORMAT = 1


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
    choices: Mapping[tuple[str, str], tuning.TunedChoice] | None = None

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

    def frame(self) -> Any:
        """The rows as a pandas DataFrame, flat."""
        pandas = require("pandas", "lab", "a frame")
        return pandas.DataFrame([flat(row) for row in self.rows]).drop(columns="kind", errors="ignore")

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
                setting, arms, chosen=chosen, classes=self._stream(name).get("classes"), **reasons
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
        """All that pages and pictures need, ready for JSON."""
        return {
            "format": FORMAT,
            "study": dict(self.study),
            "settings": {name: setting.to_dict() | self._stream(name) for name, setting in self.settings.items()},
            "runs": [_as_dict(entry) for entry in self.entries],
            "table": self.table(),
            "arms": {name: [each.detail(arm) for arm in each.arms] for name, each in self.comparisons.items()},
            "validity": {name: self.validity(name) for name in self.settings},
            "tuning": {f"{s}/{a}": choice.to_dict() for (s, a), choice in (self.choices or {}).items()},
            "made": {"versions": self._versions(), "platform": platform.platform(), "code": self.provenance()},
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
        said = self.provenance()
        text += [said] if said else []
        return "\n".join(text)

    def provenance(self) -> str | None:
        """A note about the code that made the finished runs; None if it is this code for all."""
        done = [entry for entry in self.entries if entry.record.state == "finished"]
        unknown = sum(entry.record.code is None for entry in done)
        other = sum(entry.code is not None and entry.record.code not in (None, entry.code) for entry in done)
        said = []
        if other:
            said.append(f"{other} of {len(done)} runs were made by other code than this: run the study to renew them")
        if unknown:
            said.append(f"{unknown} of {len(done)} runs were made by a version that did not record its code")
        return "; ".join(said) or None

    def _first(self, state: str) -> list[RunEntry]:
        """The first entry of each setting and arm in this state: the reason is the same for every seed."""
        found: dict[tuple[str, str], RunEntry] = {}
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


def _as_dict(entry: RunEntry) -> dict[str, Any]:
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
