"""Doing the runs of a study: claim a run, perform it somewhere, write its rows, try again, report.

- `store`: the files of a study, one per run, each written by the process that holds its lock;
- `local`: worker processes of this machine; `on_ray`: the same on Ray;
- `jobs`: what a worker does with a run, or with many of one setting;
- here: `Execution`, which submits runs to one of these and is the only writer.

Everything that `Execution` knows is on the disk, so it may be killed at any moment and restarted. Start reading at
`Execution.do`.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rekindle.lab.execution.jobs import LAST, TARGET, together
from rekindle.lab.execution.store import Claim, Row, RunStore
from rekindle.monitoring.sinks import Sink, send

if TYPE_CHECKING:
    from rekindle.lab.settings import Run

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
) | {"OMP_WAIT_POLICY": "PASSIVE"}
"""Two threads per run on a shared core make a step 10 to 100 times slower (measured); set before torch is loaded."""


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


class Durations:
    """How long runs take, from those that were seen: the same setting and arm, else the same setting.

    >>> seen = Durations()
    >>> seen.add("digits", "fire", 4.0); seen.add("digits", "nothing", 2.0)
    >>> seen.expected("digits", "fire"), seen.expected("digits", "redo"), seen.expected("other", "fire")
    (4.0, 3.0, None)
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], list[float]] = {}

    def add(self, setting: str, arm: str, seconds: float) -> None:
        """Note how long a run took."""
        self._seen.setdefault((setting, arm), []).append(seconds)

    def expected(self, setting: str, arm: str) -> float | None:
        """Seconds, or None while nothing like it was seen."""
        alike = [each for (name, _), values in self._seen.items() if name == setting for each in values]
        known = self._seen.get((setting, arm), alike)
        return fmean(known) if known else None

    def ordered(self, runs: Sequence[Run]) -> list[Run]:
        """Unknown and long runs first, so that none runs alone at the end; seeds in turn, for early pairs."""

        def key(run: Run) -> tuple[float, int]:
            seconds = self.expected(run.setting.name, run.arm.name)
            # To a power of two: arms of about the same length stay in the order of their seeds.
            return (-float("inf") if seconds is None else -float(2 ** round(seconds).bit_length()), run.seed)

        return sorted(runs, key=key)


@dataclass
class Running:
    """One run that is being performed, and how far it is."""

    run: Run
    claim: Claim
    expected: float | None = None
    begun: float = field(default_factory=time.monotonic)
    tasks: int = 0
    share: float = 0.0
    past_first: bool = False

    def left(self) -> float | None:
        """Seconds that remain: from its own speed once a tenth is done, before that as expected."""
        spent = time.monotonic() - self.begun
        if self.share >= 0.1:
            return spent * (1.0 - self.share) / self.share
        return None if self.expected is None else max(0.0, self.expected - spent)

    def advance(self, row: Row) -> None:
        """Note how far the run is; the number of tasks is in the start row, on Ray in the progress."""
        if row["kind"] == "start":
            self.begun = time.monotonic()
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
        self,
        store: RunStore,
        executor: Executor,
        *,
        watch: Watcher | None = None,
        sinks: Iterable[Sink] = (),
        batched: bool = True,
    ) -> None:
        self.store, self.executor = store, executor
        self.watch, self.sinks = watch, list(sinks)
        self.batched = batched and getattr(executor, "target", None) == TARGET
        self.jobs: dict[str, set[str]] = {}  # what was submitted; its runs where it has many
        self.alone: set[str] = set()  # runs that failed or died among others
        self.durations, self.outcome = Durations(), Outcome()
        self.waiting: list[Run] = []
        self.running: dict[str, Running] = {}
        self.losses: Counter[str] = Counter()
        self.total = self.done = 0

    def do(self, runs: Iterable[Run], *, later: int = 0) -> Outcome:
        """Do all of these that are not done, `later` more being expected afterwards.

        On any exception, Ctrl-C included, locks are released and what is written stays.
        """
        unique = {run.identity: run for run in runs}
        self.total = self.done + len(unique) + later
        self.waiting = self._unsettled(unique.values())
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

    def _unsettled(self, runs: Iterable[Run]) -> list[Run]:
        left = []
        for run in runs:
            record = self.store.read(run.identity)
            if record.state == "finished":
                self.durations.add(run.setting.name, run.arm.name, float(record.rows[-1].get("seconds", 0.0)))
            if record.settles(run.code):
                self.done += 1
            else:
                left.append(run)
        return self.durations.ordered(left)

    def _fill(self) -> None:
        """Fill the free slots; runs that could share a first task that is still running come after others."""
        making = {each.run.first_task_key for each in self.running.values() if not each.past_first}
        candidates = list(self.waiting)
        while candidates and len(self.jobs) < self.executor.slots:
            run = next((each for each in candidates if each.first_task_key not in making), candidates[0])
            chosen = self._among(run, candidates)
            taken = {each.identity for each in chosen}
            candidates = [each for each in candidates if each.identity not in taken]
            begun = [each for each in chosen if self._begin(each)]
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
        alike = [each for each in candidates if each.setting == run.setting and self._stackable(each)]
        from rekindle.lab.together import MOST

        rest = [each for each in alike if each.identity != run.identity]
        return [run, *rest][: min(MOST, -(-len(alike) // self.executor.slots))]

    def _stackable(self, run: Run) -> bool:
        if not self.batched or run.identity in self.alone:
            return False
        from rekindle.lab.together import stackable

        return stackable(run)

    def _begin(self, run: Run) -> bool:
        """Claim it; False if another process has it or had it."""
        claim = self.store.claim(run.identity)
        if claim is None:
            return False
        self.waiting.remove(run)
        if claim.record.settles(run.code):
            claim.release()
            self._over("elsewhere", run, claim.record.rows[-1])
            return False
        expected = self.durations.expected(run.setting.name, run.arm.name)
        self.running[run.identity] = Running(run, claim, expected)
        return True

    def _receive(self, key: str, row: Row) -> None:
        """A row of a job: of its run, or of one of its runs; the last one closes the job."""
        over, members = row["kind"] in (*LAST, "died"), self.jobs[key]
        if over:
            del self.jobs[key]
        if not members:  # a run by itself
            self._take(key, row)
        elif row["kind"] == "member":
            if row["identity"] in self.running:
                self._take(row["identity"], row["row"])
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

    def _take(self, identity: str, row: Row) -> None:
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
        if kind == "finished":
            self.durations.add(each.run.setting.name, each.run.arm.name, float(row.get("seconds", 0.0)))
            self._send(each.run)
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
            waiting = [self.durations.expected(each.setting.name, each.arm.name) for each in self.waiting]
            left = time_left([each.left() for each in self.running.values()], waiting, self.executor.slots)
            self.watch(Event(kind, run, row, self.done, self.total, len(self.running), left))

    def _send(self, run: Run) -> None:
        """A finished run's numbers to the sinks, all at once: a run that was begun twice is sent once."""
        if self.sinks:
            prefix = f"{run.setting.name}/{run.arm.name}/seed-{run.seed}"
            for row in self.store.read(run.identity).rows:
                if row["kind"] == "task":
                    send(self.sinks, row["task"], dict(numbers(row, prefix)))


def time_left(running: Sequence[float | None], waiting: Sequence[float | None], slots: int) -> float | None:
    """Seconds until all is done, from the seconds that each run needs; None while there is no estimate.

    What is unknown is taken as the mean of the rest.

    >>> time_left([], [10.0, 10.0, None, 10.0], 2)
    20.0
    """
    parts = [*running, *waiting]
    known = [part for part in parts if part is not None]
    if not parts:
        return 0.0
    if not known:
        return None
    total = sum(known) + (len(parts) - len(known)) * fmean(known)
    return max(total / slots, *(part for part in running if part is not None), 0.0)


def numbers(row: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, float]]:
    """The numbers in a row, groups included, under a prefix.

    >>> list(numbers({"kind": "task", "task": 3, "test_loss": 0.5, "remedy": {"seconds": 1.0}}, "digits/fire"))
    [('digits/fire/test_loss', 0.5), ('digits/fire/remedy/seconds', 1.0)]
    """
    for name, value in row.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}/{name}")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "task":
            yield f"{prefix}/{name}", float(value)


def described(event: Event) -> str:
    """One line for a terminal."""
    where = f"{event.run.setting.name} · {event.run.arm.name} · seed {event.run.seed}"
    seconds = event.left
    short = "" if seconds is None else f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    left = f", about {short} left" if short else ""
    why: Any = event.row.get("error") or event.row.get("refused")
    return f"[{event.done}/{event.total}{left}] {event.kind}: {where}" + (f": {why}" if why else "")
