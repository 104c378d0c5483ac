"""Doing the runs of a study: claim, perform, write, try again, tell whoever watches.

Only this process writes results, and only for runs whose lock it holds. Everything it knows is on the disk, so it may
be killed at any moment and begun again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from rekindle.lab.execution.local import LAST, Executor
from rekindle.lab.execution.schedule import Clock, Expectation, choose, order, start_group, time_left
from rekindle.lab.execution.store import Claim, Row, Store
from rekindle.monitoring.sinks import Sink, send

if TYPE_CHECKING:
    from rekindle.lab.runs import Run

DEATHS = 3
"""How often a run's worker may be lost before the run counts as failed."""

POLL = 0.5


@dataclass(frozen=True)
class Event:
    """News for whoever watches a study.

    kind: "started", "progress", "task", "finished", "refused", "failed", "died" (its worker was lost; the run is tried
    again) or "elsewhere" (another process did it, or it was done before). `row` is the run's row, if there is one.
    `done` of `total` runs are over; `left` is the estimate of the seconds to go, None while there is none.
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
class _Flight:
    run: Run
    claim: Claim
    clock: Clock
    tasks: int = 0
    past_first: bool = False


class Conductor:
    """Does runs until none is left; `conduct` may be called once.

    behind, ahead: runs of the same study that others did before or will do after, for counting only.
    """

    def __init__(
        self,
        store: Store,
        runs: Sequence[Run],
        executor: Executor,
        *,
        watch: Watcher | None = None,
        sinks: Iterable[Sink] = (),
        behind: int = 0,
        ahead: int = 0,
    ) -> None:
        self.store, self.executor = store, executor
        self.watch, self.sinks = watch, list(sinks)
        self.known = Expectation()
        unique = {run.identity: run for run in runs}
        self.total, self.done = behind + len(unique) + ahead, behind
        self.waiting = self._todo(list(unique.values()))
        self.groups = {run.identity: start_group(run) for run in self.waiting}
        self.flights: dict[str, _Flight] = {}
        self.deaths: Counter[str] = Counter()
        self.outcome = Outcome()

    def conduct(self) -> Outcome:
        """Do all runs; on any exception, Ctrl-C included, locks are let go of and what is written stays."""
        try:
            while self.waiting or self.flights:
                blocked = self._launch()
                if self.flights:
                    for identity, row in self.executor.events(POLL):
                        if identity in self.flights:
                            self._take(identity, row)
                elif blocked:
                    time.sleep(POLL)
        finally:
            for flight in self.flights.values():
                flight.claim.release()
        return self.outcome

    def _todo(self, runs: list[Run]) -> list[Run]:
        out = []
        for run in runs:
            record = self.store.read(run.identity)
            if record.state == "finished":
                self.known.learn(run.setting.name, run.arm.name, float(record.rows[-1].get("seconds", 0.0)))
            if record.done:
                self.done += 1
            else:
                out.append(run)
        return order(out, self.known)

    def _launch(self) -> bool:
        """Fill the free slots; tells whether what waits is in the hands of another process."""
        making = {self.groups[f.run.identity] for f in self.flights.values() if not f.past_first}
        candidates = list(self.waiting)
        while candidates and len(self.flights) < self.executor.slots:
            run = choose(candidates, self.groups, making)
            candidates.remove(run)
            claim = self.store.claim(run.identity)
            if claim is None:
                continue
            self.waiting.remove(run)
            if claim.record.done:
                claim.release()
                self.done += 1
                self.outcome.counts["elsewhere"] += 1
                self._tell("elsewhere", run, claim.record.rows[-1])
                continue
            self.flights[run.identity] = _Flight(run, claim, Clock(self.known.seconds(run.setting.name, run.arm.name)))
            making.add(self.groups[run.identity])
            self.executor.submit(run.identity, run.to_dict())
            self._tell("started", run, {})
        return bool(self.waiting) and not self.flights

    def _take(self, identity: str, row: Row) -> None:
        flight = self.flights[identity]
        run, kind = flight.run, row["kind"]
        if kind == "died":
            self._died(identity, row)
            return
        flight.claim.append(row)
        self._mark(flight, row)
        if kind not in LAST:
            if kind != "start":
                self._tell(kind, run, row)
            return
        if kind == "end" and not row.get("refused"):
            self.known.learn(run.setting.name, run.arm.name, float(row.get("seconds", 0.0)))
        self._close(identity, "failed" if kind == "failed" else "refused" if row.get("refused") else "finished", row)

    def _close(self, identity: str, kind: str, row: Row) -> None:
        flight = self.flights.pop(identity)
        flight.claim.release()
        self.done += 1
        self.outcome.counts[kind] += 1
        if kind == "failed":
            self.outcome.errors[identity] = str(row.get("error", ""))
        if kind == "finished" and self.sinks:
            self._send(flight.run)
        self._tell(kind, flight.run, row | {"reason": row["refused"]} if kind == "refused" else row)

    def _died(self, identity: str, row: Row) -> None:
        flight = self.flights[identity]
        self.deaths[identity] += 1
        if self.deaths[identity] >= DEATHS:
            failed = {"kind": "failed", "error": f"lost {DEATHS} workers in a row: {row.get('error', '')}"}
            flight.claim.append(failed)
            self._close(identity, "failed", failed)
            return
        self.flights.pop(identity).claim.release()
        self.waiting.insert(0, flight.run)
        self._tell("died", flight.run, row)

    @staticmethod
    def _mark(flight: _Flight, row: Row) -> None:
        """Note how far the run is; the number of tasks is in the start row."""
        if row["kind"] == "start":
            flight.clock.begun = time.monotonic()
            flight.tasks = int(row.get("stream", {}).get("tasks", 0))
        if row["kind"] == "progress" and row.get("tasks"):  # from Ray, where the start comes with the end
            flight.tasks = int(row["tasks"])
        flight.past_first |= row["kind"] == "task" or row.get("task", 0) > 0
        if flight.tasks and row["kind"] == "task":
            flight.clock.share = (row["task"] + 1) / flight.tasks
        elif flight.tasks and row["kind"] == "progress":
            flight.clock.share = (row["task"] + row["step"] / max(1, row["steps"])) / flight.tasks

    def _tell(self, kind: str, run: Run, row: Row) -> None:
        if self.watch is None:
            return
        waiting = [self.known.seconds(r.setting.name, r.arm.name) for r in self.waiting]
        left = time_left([f.clock for f in self.flights.values()], waiting, self.executor.slots)
        self.watch(Event(kind, run, row, self.done, self.total, len(self.flights), left))

    def _send(self, run: Run) -> None:
        """A finished run's numbers, all at once: a run that was begun twice is sent once."""
        prefix = f"{run.setting.name}/{run.arm.name}/seed-{run.seed}"
        for row in self.store.read(run.identity).rows:
            if row["kind"] == "task":
                send(self.sinks, row["task"], dict(numbers(row, prefix)))


def numbers(row: Row, prefix: str) -> Iterable[tuple[str, float]]:
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
    left = "" if event.left is None else f", about {_short(event.left)} left"
    why: Any = event.row.get("error") or event.row.get("refused")
    return f"[{event.done}/{event.total}{left}] {event.kind}: {where}" + (f": {why}" if why else "")


def _short(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
