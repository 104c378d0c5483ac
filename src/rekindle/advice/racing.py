"""The race: all candidates advance together, and at certain depths those that are clearly behind are dropped.

Early orders mislead: a remedy that takes the network back to its beginning is behind at first, and ahead later. Nobody
is dropped before the depth `SAFE`, at which few of those that were clearly behind the best ended up ahead of it
(docs/evidence/instruments.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter

from rekindle.advice.candidates import NOTHING, Candidate
from rekindle.advice.executors import TrialExecutor
from rekindle.advice.judging import LEAST, Measure, against, levels, ranked, typical_spread, unlearned
from rekindle.advice.progress import Progress
from rekindle.advice.trials import RUNGS, Trace

SAFE = 0.25  # of the horizon
_LEAST = 20  # steps of the shortest horizon
_FIRST_STEPS = 4  # at least, of a first round
_ROUNDS = 16  # looks at the clock per horizon


class Race:
    """All trials, advanced together from depth to depth."""

    def __init__(
        self,
        where: TrialExecutor,
        candidates: Sequence[Candidate],
        seeds: Sequence[int],
        until: tuple[float, float],
        progress: bool | None,
        first_steps: int,
        otherwise: str = NOTHING,
        measure: Measure = "loss",
    ) -> None:
        """`until` is when the time began and how many seconds it has."""
        self._first_steps, self._otherwise, self._measure = first_steps, otherwise, measure
        self._where, self._seconds, self._end = where, until[1], sum(until)
        self._seeds = len(seeds)
        self._progress = Progress(progress)
        self.names = [candidate.name for candidate in candidates]
        self.traces: dict[str, list[Trace]] = {}
        self.running = list(self.names)
        self.ranks: dict[str, list[int]] = {name: [] for name in self.names}
        self.steps = 0
        self._horizon = math.inf
        self._rounds: list[tuple[int, float]] = []  # steps and seconds
        self._per_step = 0.0  # of all that are running, as the last rounds were

    def to_the_end(self, steps: int | None) -> int:
        """Advance from depth to depth, until one candidate is left; the horizon in steps."""
        self._horizon = max(steps, _LEAST) if steps else math.inf
        self._begin()
        first = min(self._first_steps, self._horizon - 1)
        while self.steps <= first and perf_counter() < self._end:
            piece = max(1, min(_FIRST_STEPS, first), min(first // _ROUNDS, self.steps))
            self._advance(int(min(piece, first + 1 - self.steps)))
        if not steps and perf_counter() < self._end:
            self._advance(2 * _FIRST_STEPS)  # by now those that can learn together do, which takes less time
        # All go to a quarter, about half of them to a half, a quarter of them to the end.
        allowed = int((self._end - perf_counter()) / max(self._per_step, 1e-9) / (0.25 + 0.125 + 0.125))
        self._horizon = horizon = max(steps or allowed, _LEAST)
        for share in RUNGS:
            goal = round(share * horizon)
            while self.steps < goal and self._advance_in_time(goal, horizon):
                self._say(horizon)
            for name, rank in ranked(self.traces, self.running, horizon).items():
                self.ranks[name].append(rank)
            if self.steps < goal:
                break
            if SAFE <= share < 1 and not self._undecidable():
                self._drop(behind(self.traces, self.running))
                if len(self.running) == 1 and share >= LEAST:
                    break
        self._progress.close()
        # If no horizon was given, it is what was reached: fewer candidates were dropped than expected.
        return horizon if steps is not None else max(self.steps, _LEAST)

    def _begin(self) -> None:
        """The first step, in which the remedies are applied. Who has not begun when the time is over is not tried.

        Doing nothing and what is chosen where trials cannot tell begin in any case.
        """
        began, first = perf_counter(), dict.fromkeys([NOTHING, self._otherwise])
        waiting = [name for name in self.names if name not in first]
        self.running = self._tried(list(first), 1)
        together = max(1, -(-self._where.workers // self._seeds))
        while waiting:
            turn, waiting = waiting[:together], waiting[together:]
            if perf_counter() < self._end:
                self.running += self._tried(turn, 1)
                continue
            for name in turn:
                self.traces[name] = [Trace(error="the budget was over before its turn")] * self._seeds
        self.steps, self._per_step = 1, perf_counter() - began
        self._rounds.append((1, self._per_step))

    def _advance_in_time(self, goal: int, horizon: int) -> bool:
        """One round of a sixteenth of the horizon or of the time; False if that time is not left."""
        fitting = int(self._seconds / _ROUNDS / max(self._per_step, 1e-9))
        steps = max(min(goal - self.steps, horizon // _ROUNDS, fitting), 1)
        if perf_counter() + steps * self._per_step > self._end:
            return False
        self._advance(steps)
        return True

    def _advance(self, steps: int) -> None:
        began = perf_counter()
        self.running = self._tried(self.running, steps)
        self.steps += steps
        self._rounds.append((steps, perf_counter() - began))
        # An on-policy agent trains after many steps: the time of a step is that over as many.
        taken, passed = 0, 0.0
        for count, seconds in reversed(self._rounds):
            taken, passed = taken + count, passed + seconds
            if taken >= self._first_steps:
                break
        self._per_step = passed / taken

    def _tried(self, names: Sequence[str], steps: int) -> list[str]:
        """Advance these candidates; those of them that can go on."""
        numbers = [s * len(self.names) + self.names.index(name) for s in range(self._seeds) for name in names]
        for number, trace in self._where.advance(numbers, steps, self._horizon).items():
            name, seed = self.names[number % len(self.names)], number // len(self.names)
            self.traces.setdefault(name, [Trace() for _ in range(self._seeds)])[seed] = trace
        return [name for name in names if not any(trace.error for trace in self.traces[name])]

    def _drop(self, names: Sequence[str]) -> None:
        if names:
            self.running = [name for name in self.running if name not in names]
            numbers = [s * len(self.names) + self.names.index(name) for s in range(self._seeds) for name in names]
            self._where.drop(numbers)

    def _undecidable(self) -> bool:
        """Whether nobody has learned yet; of several tasks the last one counts."""
        several = self.traces[NOTHING][0].tasks > 1
        return several or bool(unlearned(self.traces, self.judged, self._measure))

    @property
    def judged(self) -> list[str]:
        """Those that could be tried, dropped ones too: what they have learned, the data can teach."""
        return [name for name in self.names if not any(trace.error for trace in self.traces[name])]

    def _say(self, horizon: int) -> None:
        text = f"advise: {len(self.running)} candidates, step {self.steps} of {horizon}"
        self._progress.show(text, self.steps / horizon)


def behind(traces: Mapping[str, Sequence[Trace]], running: Sequence[str]) -> list[str]:
    """Those that are clearly worse than the best: the interval of the difference, seed by seed, lies above zero.

    >>> traces = {name: [Trace(losses=[level + 0.01 * seed] * 4) for seed in range(3)] for name, level in
    ...     {"nothing": 1.0, "fire": 0.5, "lr:3": 0.505}.items()}
    >>> behind(traces, list(traces))
    ['nothing', 'lr:3']
    """
    reached = {name: levels(traces[name]) for name in running}
    best = min(running, key=lambda name: sum(reached[name]))
    typical = typical_spread({name: traces[name] for name in running}, best)
    out = []
    for name in running:
        _, (low, _) = against(traces[name], traces[best], typical)
        if name != best and (low > 0 or not all(map(math.isfinite, reached[name]))):
            out.append(name)
    return out
