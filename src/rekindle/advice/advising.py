"""advise(): which remedy, for this model and this data? Candidates are tried on copies, and the best is named.

Trials share their seeds, so candidates are compared pairwise. All run for a quarter of the horizon; then those that
are clearly behind are dropped, and the rest goes on to a half and to the whole. Short horizons mislead, so nothing is
dropped earlier, and ranks are shown for each horizon.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import nn

from rekindle.advice.candidates import NOTHING, Candidate, candidates_for, given_candidates, layer_groups
from rekindle.advice.intervals import Interval, mean_interval
from rekindle.advice.tasks import default_loss
from rekindle.advice.trials import Question, Trace, TrialExecutor, executor
from rekindle.blocks.names import unwrapped
from rekindle.isolation import Batch, Loss
from rekindle.projection.method import Method
from rekindle.projection.receipt import Receipt
from rekindle.tables import table, terminal_width

HORIZONS = (0.25, 0.5, 1.0)
Answer = Literal["apply", "do nothing", "do not", "cannot tell"]
_FIRST_STEPS = 5  # trained before the time of a step is measured
_SMALL = 0.02  # of the loss: differences whose interval lies within this are no reason to act


@dataclass(frozen=True)
class Row:
    """One candidate: what it did right away, how it learned, and against doing nothing.

    `level` is the mean loss over the last quarter of the horizon that it reached (`share` of the whole), `difference`
    is level − that of nothing with a 95 % interval, `expected` the level extrapolated to the whole horizon with the
    error of the fit. `rise` is the change of the loss on the new data right after the remedy, `old_rise` and `old_end`
    the change on the old data right after it and at the end; `drift` how far the function moved.
    """

    name: str
    call: str
    share: float
    level: float
    interval: Interval
    difference: float
    difference_interval: Interval
    expected: float
    expected_error: float
    rise: float
    old_rise: float
    old_end: float
    drift: float
    ranks: tuple[int, ...]
    error: str | None = None


@dataclass(frozen=True)
class Advice:
    """What was found. `choice` is the method to apply, None for doing nothing; prints itself."""

    answer: Answer
    sentence: str
    choice: Method | None
    rows: tuple[Row, ...]
    steps: int
    horizon: int
    seeds: int
    seconds: float
    candidates: tuple[Candidate, ...] = field(repr=False, default=())

    @property
    def chosen(self) -> str:
        """The name of the chosen candidate."""
        return next((one.name for one in self.candidates if one.method is self.choice), NOTHING)

    @property
    def call(self) -> str:
        """The exact call to make."""
        return next(row.call for row in self.rows if row.name == self.chosen)

    def apply(self, model: nn.Module, optimizer: Any = None, **arguments: Any) -> Receipt:
        """Do it: apply the chosen method to the model itself. Doing nothing gives an empty receipt."""
        if self.choice is None:
            return Receipt(NOTHING)
        return self.choice(model, optimizer, **arguments)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for the page."""
        about = ("answer", "sentence", "chosen", "call", "steps", "horizon", "seeds", "seconds")
        return {**{name: getattr(self, name) for name in about}, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        heads = ["candidate", "loss", "− nothing", "95 % interval", "ranks", "right after", "old data", "drift"]
        lines = [heads]
        for row in self.rows:
            if row.error:
                lines.append([row.name, f"not tried: {row.error}"])
                continue
            low, high = row.difference_interval
            lines.append(
                [
                    row.name,
                    f"{row.level:.4g}" + ("" if row.share >= 1 else f" ({row.share:.0%})"),
                    "" if row.name == NOTHING else f"{row.difference:+.3g}",
                    "" if row.name == NOTHING else f"[{low:+.3g}, {high:+.3g}]",
                    "/".join(map(str, row.ranks)),
                    f"{row.rise:+.3g}",
                    "" if math.isnan(row.old_end) else f"{row.old_rise:+.3g}, {row.old_end:+.3g}",
                    "" if math.isnan(row.drift) else f"{row.drift:.2g}",
                ]
            )
        shown = table(lines[0], lines[1:], terminal_width(), left=(0, 1))
        reached = f"{self.steps} of {self.horizon} steps" if self.steps < self.horizon else f"{self.steps} steps"
        notes = [
            f"{reached}, {self.seeds} seeds, {self.seconds:.0f} s; loss: mean over the last quarter of the steps;",
            "ranks: at a quarter, a half and the whole; old data: change right after, and at the end",
        ]
        return "\n".join([self.sentence, self.call, "", *shown, "", *notes])


def advise(
    model: nn.Module,
    new_batches: Iterable[Batch],
    *,
    loss: Loss | None = None,
    old_batches: Iterable[Batch] = (),
    optimizer: Any = None,
    candidates: Mapping[str, Method | None] | Iterable[Method] | None = None,
    layers: bool = False,
    budget: float | str = "2m",
    steps: int | None = None,
    seeds: int | Sequence[int] = 3,
    copy: Callable[[], nn.Module] | None = None,
    workers: int | None = None,
    on: str | None = None,
    progress: bool | None = None,
) -> Advice:
    """Try remedies on copies of the model and say which to apply, if any. The model itself is not changed.

    new_batches, old_batches: what is to be learned now, and (optional) what should not be forgotten.
    loss: `loss(model, batch)`; without it cross entropy of (inputs, labels), or the model's own `.loss`.
    candidates: methods, or a mapping of names to methods; without it those of `candidates_for(model)`.
    layers: also FIRE on each third of the layers alone.
    budget: seconds, or a text such as "90s", "2m", "1h". `steps` is the horizon: how long training will go on; without
        it the longest that the budget allows.
    seeds: how many, or which; three at least for an interval that says something.
    copy: a function that returns a copy of the model, for models that cannot be deep-copied.
    workers, on: how many processes (as many as cores without it), and "ray" for Ray.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> data = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(4)]
    >>> from rekindle.methods import FIRE
    >>> advice = advise(net, data, candidates={"nothing": None, "fire": FIRE()}, steps=40, workers=1)
    >>> advice.answer in ("apply", "do nothing", "do not", "cannot tell"), [row.name for row in advice.rows]
    (True, [...])
    """
    began = time.perf_counter()
    end = began + seconds_of(budget)
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    new = list(new_batches)
    if not new or not chosen:
        raise ValueError("advise needs at least one batch of new data and one seed")
    question = Question(model, optimizer, new, list(old_batches), loss or default_loss, copy)
    tried = candidates_for(unwrapped(model)) if candidates is None else given_candidates(candidates)
    if layers:
        tried += layer_groups(unwrapped(model))
    where = executor(question, tried, chosen, on=on, workers=workers)
    try:
        run = _Race(where, tried, chosen, end, progress)
        horizon = run.to_the_end(steps)
    finally:
        where.close()
    return _advice(run, tried, len(chosen), horizon, time.perf_counter() - began)


def seconds_of(budget: float | str) -> float:
    """A budget in seconds.

    >>> seconds_of("2m"), seconds_of("1.5h"), seconds_of(30)
    (120.0, 5400.0, 30.0)
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([smh]?)\s*", str(budget))
    if not found or float(found[1]) <= 0:
        raise ValueError(f'budget={budget!r} is not a time: give seconds, or a text such as "90s", "2m", "1h"')
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


class _Race:
    """All trials, advanced together from horizon to horizon."""

    def __init__(
        self,
        where: TrialExecutor,
        candidates: Sequence[Candidate],
        seeds: Sequence[int],
        end: float,
        progress: bool | None,
    ) -> None:
        self._where, self._end = where, end
        self._seeds = len(seeds)
        self._shown = sys.stderr.isatty() if progress is None else progress
        self.names = [candidate.name for candidate in candidates]
        self.traces: dict[str, list[Trace]] = {}
        self.running = list(self.names)
        self.ranks: dict[str, list[int]] = {name: [] for name in self.names}
        self.steps = 0

    def to_the_end(self, steps: int | None) -> int:
        """Advance to each horizon in turn, dropping candidates in between; the horizon in steps."""
        self._advance(_FIRST_STEPS)
        began = time.perf_counter()
        self._advance(_FIRST_STEPS)
        per_step = (time.perf_counter() - began) / _FIRST_STEPS
        # All go to a quarter, about half of them to a half, a quarter of them to the end.
        allowed = int((self._end - time.perf_counter()) / per_step / (0.25 + 0.125 + 0.125))
        horizon = max(steps or allowed, 4 * _FIRST_STEPS)
        look = max(min(horizon, allowed) // 20, 1)  # steps between two looks at the clock
        for share in HORIZONS:
            goal = round(share * horizon)
            while self.steps < goal and time.perf_counter() < self._end:
                self._advance(min(goal - self.steps, look))
                self._say(horizon)
            self._rank(horizon)
            if self.steps < goal:
                break
            if share < 1:
                self._drop()
        if self._shown:
            sys.stderr.write("\r\x1b[K")
        return horizon

    def _advance(self, steps: int) -> None:
        numbers = [self.names.index(name) * self._seeds + s for name in self.running for s in range(self._seeds)]
        for number, trace in self._where.advance(numbers, steps).items():
            self.traces.setdefault(self.names[number // self._seeds], [Trace()] * self._seeds)[number % self._seeds] = (
                trace
            )
        self.running = [name for name in self.running if not any(trace.error for trace in self.traces[name])]
        self.steps += steps

    def _rank(self, horizon: int) -> None:
        expected = {name: _expected(self.traces[name], horizon)[0] for name in self.running}
        for rank, name in enumerate(sorted(expected, key=lambda name: expected[name]), start=1):
            self.ranks[name].append(rank)

    def _drop(self) -> None:
        """Drop the worse half, but nobody who is not clearly worse than the best, and never doing nothing."""
        order = sorted(self.running, key=lambda name: self.ranks[name][-1])
        best = _levels(self.traces[order[0]])
        out = []
        for name in order[-(-len(order) // 2) :]:
            _, (low, _) = mean_interval([a - b for a, b in zip(_levels(self.traces[name]), best, strict=True)])
            if name != NOTHING and low > 0:
                out.append(name)
        self.running = [name for name in self.running if name not in out]
        self._where.drop(self.names.index(name) * self._seeds + s for name in out for s in range(self._seeds))

    def _say(self, horizon: int) -> None:
        if self._shown:
            left = max(self._end - time.perf_counter(), 0)
            text = f"advise: {len(self.running)} candidates, step {self.steps} of {horizon}, at most {left:.0f} s left"
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()


def _advice(run: _Race, candidates: Sequence[Candidate], seeds: int, horizon: int, seconds: float) -> Advice:
    base = {
        len(trace.losses): _levels(run.traces[NOTHING], len(trace.losses)) for t in run.traces.values() for trace in t
    }
    rows = sorted(
        (_row(candidate, run, base, horizon) for candidate in candidates),
        key=lambda row: (row.error is not None, -row.share, row.level),
    )
    answer, name = _decide(rows, run, horizon)
    method = next(one.method for one in candidates if one.name == name)
    sentence = _sentence(answer, next(row for row in rows if row.name == name), rows, run.steps, horizon)
    return Advice(answer, sentence, method, tuple(rows), run.steps, horizon, seeds, seconds, tuple(candidates))


def _row(candidate: Candidate, run: _Race, base: Mapping[int, list[float]], horizon: int) -> Row:
    traces = run.traces[candidate.name]
    error = next((trace.error for trace in traces if trace.error), None)
    if error:
        nan, none = math.nan, (math.nan, math.nan)
        return Row(candidate.name, candidate.call, 0, nan, none, nan, none, nan, nan, nan, nan, nan, nan, (), error)
    levels = _levels(traces)
    level, interval = mean_interval(levels)
    nothing = base[len(traces[0].losses)]
    difference, around = mean_interval([a - b for a, b in zip(levels, nothing, strict=True)])
    share = len(traces[0].losses) / horizon
    expected, error_of_fit = _expected(traces, horizon)
    return Row(
        candidate.name,
        candidate.call,
        share,
        level,
        interval,
        difference,
        around,
        expected,
        error_of_fit,
        rise=_mean(trace.rise for trace in traces),
        old_rise=_mean(trace.old_after - trace.old_before for trace in traces),
        old_end=_mean(trace.old_end - trace.old_before for trace in traces),
        drift=_mean(trace.drift for trace in traces),
        ranks=tuple(run.ranks[candidate.name]),
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _decide(rows: Sequence[Row], run: _Race, horizon: int) -> tuple[Answer, str]:
    alive = [row for row in rows if row.error is None and row.name in run.running]
    nothing = next(row for row in alive if row.name == NOTHING)
    others = [row for row in rows if row.error is None and row.name != NOTHING]
    better = [row for row in alive if row.name != NOTHING and row.difference_interval[1] < 0]
    if run.steps < 0.25 * horizon:
        return "cannot tell", NOTHING
    if better:
        best = min(better, key=lambda row: row.level)
        # Of those that learn as well as the best, the one that forgets least.
        equal = [row for row in better if row.interval[0] <= best.interval[1] and row.level <= best.level * 1.01]
        keeps = [row for row in equal if not math.isnan(row.old_end)]
        return "apply", (min(keeps, key=lambda row: row.old_end) if keeps else best).name
    if others and all(row.difference_interval[0] > 0 for row in others):
        return "do not", NOTHING
    unclear = [
        row for row in alive if row.name != NOTHING and row.difference_interval[0] < -_SMALL * abs(nothing.level)
    ]
    return ("cannot tell" if unclear else "do nothing"), NOTHING


def _sentence(answer: Answer, row: Row, rows: Sequence[Row], steps: int, horizon: int) -> str:
    if answer == "apply":
        low, high = row.difference_interval
        sentence = (
            f"Apply {row.name}: its loss is {-row.difference:.3g} lower than doing nothing [{-high:.3g}, {-low:.3g}]"
        )
        if row.old_end > 0:
            sentence += f", and the loss on the old data ends {row.old_end:.3g} higher than before"
        return f"{sentence}."
    if answer == "do not":
        return "Do not: every remedy that was tried learns worse than the network as it is."
    if answer == "do nothing":
        return "Do nothing: no remedy learns better than the network as it is."
    wide = [r for r in rows if r.error is None and r.difference < 0]
    best = min(wide, key=lambda r: r.difference) if wide else None
    reason = f"{best.name} may be better, but its interval includes no gain" if best else "nothing stands out"
    return f"Cannot tell with this budget ({steps} of {horizon} steps): {reason}. Give more time or seeds."


def _levels(traces: Sequence[Trace], steps: int | None = None) -> list[float]:
    """Per seed the mean loss over the last quarter of the first `steps` steps."""
    curves = [trace.losses[: steps or len(trace.losses)] for trace in traces]
    return [sum(last) / len(last) for curve in curves for last in [curve[-max(len(curve) // 4, 1) :]]]


def _expected(traces: Sequence[Trace], horizon: int) -> tuple[float, float]:
    """The level extrapolated to the horizon: a line in log(step) through the second half, and its error.

    Loss curves bend less in log(step) than in steps; further ahead than four times what was seen it says little.
    """
    curve = [sum(losses) / len(losses) for losses in zip(*(trace.losses for trace in traces), strict=True)]
    seen = [(math.log(step + 1), loss) for step, loss in enumerate(curve) if step >= len(curve) // 2]
    level = sum(_levels(traces)) / len(traces)
    if len(curve) >= horizon or len(seen) < 8 or not all(math.isfinite(loss) for _, loss in seen):
        return level, 0.0
    count = len(seen)
    x_mean, y_mean = sum(x for x, _ in seen) / count, sum(y for _, y in seen) / count
    spread = sum((x - x_mean) ** 2 for x, _ in seen)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in seen) / spread
    noise = math.sqrt(sum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in seen) / (count - 2))
    ahead = math.log(0.875 * horizon) - x_mean  # the middle of the last quarter
    return y_mean + slope * ahead, noise * math.sqrt(1 / count + ahead**2 / spread)
