"""The table of a contest: which columns it has, for the terminal, the page and the documents alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.lab.comparing import NOTHING
from rekindle.lab.contest import Contest
from rekindle.lab.wording import Measure, chance, duration, measure

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A heading, what it means, the number that it is sorted by, how that is written, and its interval."""

    heading: str
    meaning: str
    value: Callable[[Row], float | None]
    shown: Callable[[float | None], str]
    ends: Callable[[Row], str] = lambda row: ""

    def text(self, row: Row) -> str:
        """The whole cell.

        >>> Column("x", "", lambda row: row["x"], str, lambda row: "[1, 3]").text({"x": 2})
        '2 [1, 3]'
        """
        value = self.value(row)
        ends = self.ends(row) if value is not None else ""
        return f"{self.shown(value)} {ends}".strip()


def columns(contest: Contest) -> list[Column]:
    """The columns that at least one arm fills."""
    measured = contest.headline
    old = measure("old_accuracy" if measured.unit == "%" else "old_loss")
    span = "the last task" if contest.last == 1 else f"the last {contest.last} tasks"
    sign = "" if measured.higher else "; a minus is a gain"
    listed = [
        Column(
            f"{measured.name}{_unit(measured)}",
            f"mean over {span} and the seeds, with its 95 % interval",
            _get("mean"),
            measured.number,
            lambda row: measured.interval(row.get("low"), row.get("high")),
        ),
        Column(
            f"against {NOTHING}",
            f"paired difference, seed by seed, with its 95 % interval{sign}",
            lambda row: None if row["arm"] == NOTHING else _number(row.get("difference")),
            measured.difference,
            lambda row: measured.differences(row.get("difference_low"), row.get("difference_high")),
        ),
        Column(
            "p (Holm)", "how often chance alone gives such a difference, corrected for all arms", _get("holm"), chance
        ),
        _plain("first task", "the same measure on the first task", "first_task", measured),
        Column(
            "drop",
            f"what the remedy costs at once: how much worse the previous task is right after it, in {old.step}",
            _get("drop"),
            old.number,
        ),
        Column(
            "recovery, steps",
            "training steps in which a task is learned as well as doing nothing learns it by its end; a task in which "
            "that never happens counts with all its steps",
            _get("recovery"),
            _count,
        ),
        *(
            [_plain("peak", "the highest loss in the first 20 steps after a boundary, its mean", "peak", old)]
            if old.unit == "nats"
            else []
        ),
        _plain(
            "kept",
            f"{old.name} right after the remedy{_unit(old)}: up to five, the one just learned among them, "
            "mean over all boundaries",
            "retention",
            old,
        ),
        Column("remedy", "time that the remedy takes in a task", _get("remedy_seconds"), duration),
        Column("seeds", "runs that the mean is over", _get("seeds"), _count),
    ]
    return [column for column in listed if any(column.value(row) is not None for row in contest.table)]


def _plain(heading: str, meaning: str, key: str, measured: Measure) -> Column:
    return Column(heading, meaning, _get(key), measured.number)


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _unit(measured: Measure) -> str:
    return f", {measured.unit}" if measured.unit else ""


def _get(key: str) -> Callable[[Row], float | None]:
    return lambda row: _number(row.get(key))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
