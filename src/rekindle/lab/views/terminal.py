"""A study on a terminal: while it runs a bar with the time left and a growing table, then the tables of its result."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rekindle.lab.results.comparison import ArmComparison
from rekindle.lab.results.wording import duration, measure
from rekindle.lab.tuning import SEEDS, tuned_name
from rekindle.lab.views import ArmColumn, columns, sentences
from rekindle.report.words import printable

if TYPE_CHECKING:
    from rekindle.lab.execution import Event

_CELL, _NAME = 6, 22
_MOST_ARMS = 24
_EVERY = 30.0  # seconds between lines of a log while nothing is done
_FIRST_TO_GO = ("seeds", "first task", "recovery, steps", "p (Holm)", "remedy", "drop", "kept", "against nothing")


class Board:
    """What is known about a running study; give it every event, and rich can draw it at any moment.

    `names` says which arm a run's identity belongs to. Other runs are those of tuning: the candidates take time and
    are not shown, the chosen ones have a line of their own.
    """

    def __init__(self, title: str, names: Mapping[str, str]) -> None:
        self.title, self.names, self.arms = title, dict(names), list(dict.fromkeys(names.values()))
        self.values: dict[str, dict[str, dict[int, list[float]]]] = {}
        self.measures: dict[str, str] = {}
        self.now = ""
        self.done, self.total = 0, 0
        self.left: float | None = None
        self.notes: list[str] = []
        self._begun, self._share = time.monotonic(), 0.0

    def __call__(self, event: Event) -> None:
        """Process one event."""
        run, row = event.run, event.row
        self.done, self.total, self.left = event.done, event.total, event.left
        setting = run.setting.name
        self.measures[setting] = run.setting.headline
        if event.kind == "task":
            self.now = setting
            value = row.get(run.setting.headline)
            if value is not None and run.seed not in SEEDS:
                name = self.names.get(run.identity) or tuned_name(run.arm.name)
                arms = self.values.setdefault(setting, {})
                arms.setdefault(name, {}).setdefault(row["task"], []).append(value)
        elif event.kind in ("refused", "failed", "died"):
            why = str(row.get("refused") or row.get("error") or "").strip().splitlines()
            line = f"{event.kind}: {run.arm.name} on {setting}{': ' + why[-1] if why else ''}"
            if line not in self.notes:
                self.notes.append(line)

    def share(self) -> float:
        """How much of the time is over; it never decreases."""
        if self.left is not None:
            spent = time.monotonic() - self._begun
            self._share = max(self._share, spent / max(spent + self.left, 1e-9))
        return self._share

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """The bar, then the table of the setting of the latest event."""
        share = self.share()
        told = f"{duration(self.left)} left" if self.left is not None else "measuring the time"
        line = Table.grid(padding=(0, 2))
        line.add_row(
            Text(self.title, "bold"),
            ProgressBar(total=1.0, completed=share, width=max(16, min(40, options.max_width - 60))),
            Text(f"{share:.0%}", "dim"),
            Text(f"{self.done} of {self.total} runs, {told}"),
        )
        yield line
        if self.now in self.values:
            yield Text(f"{self.now}: {measure(self.measures[self.now]).axis}, task by task", "dim")
            yield self.table(options.max_width)
        for note in self.notes[-4:]:
            yield Text(note, "yellow", overflow="ellipsis", no_wrap=True)

    def table(self, width: int) -> Table:
        """The means so far, an arm per line and a task per column: the first and as many of the last as fit."""
        values, measured = self.values[self.now], measure(self.measures[self.now])
        tasks = sorted({task for each in values.values() for task in each})
        room = max(2, (width - _NAME) // _CELL)
        shown = tasks if len(tasks) <= room else [tasks[0], *tasks[-(room - 1) :]]
        known = [*(arm for arm in self.arms if arm in values), *(arm for arm in values if arm not in self.arms)]
        means = {arm: {task: fmean(values[arm][task]) for task in shown if values[arm].get(task)} for arm in known}
        choose = max if measured.higher else min
        best = {task: choose((m[task] for m in means.values() if task in m), default=None) for task in shown}
        table = Table(box=None)
        table.add_column("", no_wrap=True, max_width=_NAME)
        for task in shown:
            table.add_column(str(task + 1), justify="right", no_wrap=True, header_style="dim")
        for arm in known[:_MOST_ARMS]:
            cells = [Text("·", "dim")] * len(shown)
            for at, task in enumerate(shown):
                if (mean := means[arm].get(task)) is not None:
                    value = mean * measured.times
                    text = f"{value:.0f}" if abs(value) >= 10 else f"{value:.2f}"
                    cells[at] = Text(text, "bold green" if mean == best[task] else "")
            table.add_row(Text(arm, "bold" if arm == "fire" else ""), *cells)
        return table


@contextmanager
def live(board: Board) -> Iterator[Any]:
    """The board on stderr while the block runs, plain lines where that is no terminal; yields what takes the events."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Log(board)
    else:
        with Live(board, console=console, refresh_per_second=4, transient=True):
            yield board


class _Log:
    """Progress for a log: a line when a run is done, and every so often in between."""

    def __init__(self, board: Board) -> None:
        self.board, self._done, self._written, self._notes = board, -1, time.monotonic(), 0

    def __call__(self, event: Event) -> None:
        board = self.board
        board(event)
        lines, self._notes = board.notes[self._notes :], len(board.notes)
        if board.done != self._done or time.monotonic() - self._written > _EVERY:
            left = f", {duration(board.left)} left" if board.left is not None else ""
            self._done, lines = board.done, [*lines, f"{board.title}: {board.done} of {board.total} runs{left}"]
        for line in lines:
            self._written = time.monotonic()
            print(printable(line), file=sys.stderr, flush=True)


def tables(listed: Sequence[ArmComparison], width: int) -> RenderableType:
    """The result: a table per setting, and under each what the numbers mean."""
    parts: list[RenderableType] = []
    for found in listed:
        if found.ranked:
            parts += [Text(found.name, "bold"), _table(found, width)]
        parts += [Text(f"refused: {arm}: {why}", "yellow") for arm, why in found.refused.items()]
        parts += [Text(f"failed: {arm}: {why}", "red") for arm, why in found.failed.items()]
        parts += [Text(sentence) for sentence in sentences(found)]
        parts.append(Text(""))
    return Group(*parts[:-1])


def _table(found: ArmComparison, width: int) -> Table:
    shown = _fitting(columns(found), found, width)
    table = Table(box=None, pad_edge=False)
    table.add_column("arm", no_wrap=True)
    for column in shown:
        table.add_column(column.heading, justify="right", no_wrap=True, header_style="dim")
    for at, arm in enumerate(found.ranked):
        cells = []
        for column in shown:
            value = column.value(arm)
            cell = Text(column.shown(value), "bold" if at == 0 and column is shown[0] else "")
            ends = column.ends(arm) if value is not None else ""
            cells.append(cell.append(f" {ends}", "dim") if ends else cell)
        table.add_row(Text(arm, "bold" if at == 0 else ""), *cells)
    return table


def _fitting(listed: list[ArmColumn], found: ArmComparison, width: int) -> list[ArmColumn]:
    """Without the columns that a narrow terminal has no room for; the page and --json have them all."""
    kept = list(listed)
    names = max(map(len, found.ranked))
    wide = {c.heading: max(len(c.heading), *(len(c.text(arm)) for arm in found.ranked)) for c in listed}
    for heading in _FIRST_TO_GO:
        if names + sum(wide[column.heading] + 2 for column in kept) <= width:
            break
        kept = [column for column in kept if column.heading != heading]
    return kept
