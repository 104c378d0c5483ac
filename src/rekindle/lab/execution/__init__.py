"""Doing the runs of a study: claim a run, perform it somewhere, write its rows, try again, report.

- `store`: the files of a study, one per run, each written by the process that holds its lock;
- `workers`: what a worker does with a run, or with many of one setting, and the worker processes of this machine;
- `on_ray`: the same on Ray;
- here: `Execution`, which submits runs to one of these and is the only writer.

Everything that `Execution` knows is on the disk, so it may be killed at any moment and restarted. Start reading at
`Execution.do`.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rekindle.lab.execution.store import Claim, Row, RunStore
from rekindle.lab.execution.workers import LAST, TARGET, together

if TYPE_CHECKING:
    from rekindle.lab.settings import Run

MOST_LOSSES = 3
"""How often a run's worker may be lost before the run counts as failed."""

POLL = 0.5


@dataclass(frozen=True)
class Event:
    """An event of a study, for its watchers.

    kind: "started", "progress", "task", "finished", "refused", "failed", "died" (its worker was lost; the run is tried
    again) or "elsewhere" (another process did it). `row` is the run's row, if there is one. `done` of `total` runs are
    over; `left` is the estimate of the seconds to go, None while there is none.
    """

    kind: str
    run: Run
    row: Row
    done: int
    total: int
    running: int
    left: float | None


Watcher: TypeAlias = Callable[[Event], object]


@dataclass
class Outcome:
    """How many runs ended in which way, and the errors of those that failed."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass
class Running:
    """One run that is being performed, and which share of it is over."""

    run: Run
    claim: Claim
    tasks: int = 0
    share: float = 0.0
    past_first: bool = False

    def advance(self, row: Row) -> None:
        """Note how far the run is; the number of tasks is in its start row."""
        self.tasks = int(row.get("stream", row).get("tasks") or self.tasks)
        self.past_first |= row["kind"] == "task" or row.get("task", 0) > 0
        if self.tasks and row["kind"] in ("task", "progress"):
            inside = 1.0 if row["kind"] == "task" else row["step"] / max(1, row["steps"])
            self.share = (row["task"] + inside) / self.tasks


class Executor(Protocol):
    """Something that performs runs: this pool, or Ray. One whose `target` is ours also gets many runs as one job."""

    slots: int

    def submit(self, identity: str, job: dict[str, Any]) -> None:
        """Begin a run; there must be a free slot."""

    def events(self, timeout: float) -> list[tuple[str, Row]]:
        """The rows that came in, waiting at most `timeout` seconds for the first.

        The last row of a run has the kind "end", "failed", or "died" (its worker was lost: try again).
        """

    def close(self) -> None:
        """End everything at once."""


class Execution:
    """Does runs with an executor until none is left; `do` may be called again with more."""

    def __init__(
        self, store: RunStore, executor: Executor, *, watch: Watcher | None = None, batched: bool = True
    ) -> None:
        self.store, self.executor, self.watch = store, executor, watch
        self.batched = batched and getattr(executor, "target", None) == TARGET
        self.jobs: dict[str, set[str]] = {}  # what was submitted; its runs where it has many
        self.alone: set[str] = set()  # runs that failed or died among others
        self.outcome = Outcome()
        self.waiting: list[Run] = []
        self.running: dict[str, Running] = {}
        self.losses: Counter[str] = Counter()
        self.total = self.done = self.known = 0  # known: done before, by whoever it was
        self.begun = time.monotonic()

    def do(self, runs: Iterable[Run], *, later: int = 0) -> Outcome:
        """Do all of these that are not done, `later` more being expected afterwards; seeds in turn, for early pairs.

        On any exception, Ctrl-C included, locks are released and what is written stays.
        """
        unique = {run.identity: run for run in runs}
        self.total = self.done + len(unique) + later
        self.waiting = [run for run in unique.values() if not self.store.read(run.identity).settles(run.code)]
        self.waiting.sort(key=lambda run: run.seed)
        self.done += len(unique) - len(self.waiting)
        self.known += len(unique) - len(self.waiting)
        try:
            while self.waiting or self.jobs:
                self._fill()
                if self.jobs:
                    for key, row in self.executor.events(POLL):
                        if key in self.jobs:
                            self._receive(key, row)
                elif self.waiting:  # all of them locked by another process
                    time.sleep(POLL)
        finally:
            for each in self.running.values():
                each.claim.release()
        return self.outcome

    @property
    def left(self) -> float | None:
        """Seconds to go if what is left takes as long as what is over; None while nothing is."""
        over = self.done - self.known + sum(each.share for each in self.running.values())
        spent = time.monotonic() - self.begun
        return spent * (self.total - self.known - over) / over if over else None

    def _fill(self) -> None:
        """Fill the free slots; runs that could share a first task that is still running come after others."""
        making = {each.run.first_task_key for each in self.running.values() if not each.past_first}
        candidates = list(self.waiting)
        while candidates and len(self.jobs) < self.executor.slots:
            run = next((each for each in candidates if each.first_task_key not in making), candidates[0])
            chosen = self._among(run, candidates)
            taken = {each.identity for each in chosen}
            candidates = [each for each in candidates if each.identity not in taken]
            begun = [each for each in chosen if self._claim(each)]
            making |= {each.first_task_key for each in begun}
            if not begun:
                continue
            key = begun[0].identity
            self.jobs[key] = {each.identity for each in begun} if len(begun) > 1 else set()
            self.executor.submit(key, begun[0].to_dict() if len(begun) == 1 else together(begun))
            for each in begun:
                self._report("started", each, {})

    def _among(self, run: Run, candidates: Sequence[Run]) -> list[Run]:
        """The run with others of its setting that can be trained as one, shared evenly among the slots."""
        if not self._stackable(run):
            return [run]
        from rekindle.lab.together import MOST

        alike = [each for each in candidates if each.setting == run.setting and self._stackable(each)]
        rest = [each for each in alike if each.identity != run.identity]
        return [run, *rest][: min(MOST, -(-len(alike) // self.executor.slots))]

    def _stackable(self, run: Run) -> bool:
        if not self.batched or run.identity in self.alone:
            return False
        from rekindle.lab.together import stackable

        return stackable(run)

    def _claim(self, run: Run) -> bool:
        """Claim it; False if another process has it or had it."""
        claim = self.store.claim(run.identity)
        if claim is None:
            return False
        self.waiting.remove(run)
        if claim.record.settles(run.code):
            claim.release()
            self._over("elsewhere", run, claim.record.rows[-1])
            return False
        self.running[run.identity] = Running(run, claim)
        return True

    def _receive(self, key: str, row: Row) -> None:
        """A row of a job: of its run, or of one of its runs; the last one closes the job."""
        over, members = row["kind"] in (*LAST, "died"), self.jobs[key]
        if over:
            del self.jobs[key]
        if not members:  # a run by itself
            self._store_row(key, row)
        elif row["kind"] == "member":
            if row["identity"] in self.running:
                self._store_row(row["identity"], row["row"])
        elif over:
            self._return(members & self.running.keys(), row)

    def _return(self, members: set[str], row: Row) -> None:
        """What a batch leaves undone is done again: after an error each run by itself, which then has its own."""
        for identity in members:
            if row["kind"] == "died":
                self._lost(self.running[identity], row)
                continue
            each = self.running.pop(identity)
            each.claim.release()
            self.alone.add(identity)
            self.waiting.insert(0, each.run)

    def _store_row(self, identity: str, row: Row) -> None:
        each = self.running[identity]
        run, kind = each.run, row["kind"]
        if kind == "printed":
            # Through sys.stderr, so that it appears above a live table and not inside it.
            print(f"{run.setting.name} · {run.arm.name} · seed {run.seed}: {row['text']}", file=sys.stderr)
        elif kind == "died":
            self._lost(each, row)
        else:
            each.claim.append({"code": run.code, **row} if kind == "start" else row)
            each.advance(row)
            if kind in LAST:
                self._close(
                    each, "failed" if kind == "failed" else "refused" if row.get("refused") else "finished", row
                )
            elif kind != "start":
                self._report(kind, run, row)

    def _close(self, each: Running, kind: str, row: Row) -> None:
        del self.running[each.run.identity]
        each.claim.release()
        if kind == "failed":
            self.outcome.errors[each.run.identity] = str(row.get("error", ""))
        self._over(kind, each.run, row)

    def _lost(self, each: Running, row: Row) -> None:
        self.losses[each.run.identity] += 1
        if self.losses[each.run.identity] >= MOST_LOSSES:
            failed = {"kind": "failed", "error": f"lost {MOST_LOSSES} workers in a row: {row.get('error', '')}"}
            each.claim.append(failed)
            self._close(each, "failed", failed)
            return
        self.running.pop(each.run.identity).claim.release()
        if self.losses[each.run.identity] > 1:
            self.alone.add(each.run.identity)
        self.waiting.insert(0, each.run)
        self._report("died", each.run, row)

    def _over(self, kind: str, run: Run, row: Row) -> None:
        self.done += 1
        self.outcome.counts[kind] += 1
        self._report(kind, run, row)

    def _report(self, kind: str, run: Run, row: Row) -> None:
        if self.watch is not None:
            self.watch(Event(kind, run, row, self.done, self.total, len(self.running), self.left))
