"""advise(): which remedy, for this model and this data? Candidates are tried on copies, and the best is named.

Trials share their seeds, so candidates are compared pairwise. All run for a quarter of the horizon; then, if the time
is short, those that are clearly behind are dropped, and the rest goes on to a half and to the whole. Short horizons are
misleading, so nothing is dropped earlier, or without need, and ranks are shown for each horizon.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

from torch import nn

from rekindle.advice.candidates import NOTHING, Candidate, to_try
from rekindle.advice.executors import Triable, TrialExecutor, executor
from rekindle.advice.intervals import Interval, mean_interval
from rekindle.advice.judging import (
    HORIZONS,
    Answer,
    Measure,
    Row,
    decide,
    levels,
    lost,
    ranked,
    risen,
    row,
    sentence,
    typical_spread,
    unlearned,
)
from rekindle.advice.progress import Progress
from rekindle.advice.tasks import default_loss, instead
from rekindle.advice.trials import JUDGED, SHOWN, Judge, Question, Rate, Trace, shown, spread_out
from rekindle.blocks.names import unwrapped
from rekindle.isolation import Batch, Loss, check_asked, check_loss, gradients_kept, random_states_kept
from rekindle.methods.learning_rate import LearningRate, Rewarm
from rekindle.methods.remedy import moments
from rekindle.projection.method import Method
from rekindle.projection.receipt import Receipt
from rekindle.sharding.team import refuse_shards
from rekindle.tables import table, terminal_width

_FIRST_STEPS = 4  # at least, of a first round
_LEAST = 20  # steps of the shortest horizon
_LOOKS = 16  # at the clock, and at held-out data, per horizon


@dataclass(frozen=True)
class Advice:
    """What was found. `choice` is the method to apply, None for doing nothing; prints as a table.

    `passes` is the horizon in passes over the new data; `price` what all trials cost, in trainings of that length.
    """

    answer: Answer
    sentence: str
    choice: Method | None
    rows: tuple[Row, ...]
    steps: int
    horizon: int
    seeds: int
    seconds: float
    judged_on: str = "the new data"
    measure: Measure = "loss"
    passes: float | None = None
    price: float = math.nan
    candidates: tuple[Candidate, ...] = field(repr=False, default=())
    tried_with: tuple[Sequence[Batch], Loss | None] = field(repr=False, compare=False, default=((), None))

    @property
    def chosen(self) -> str:
        """The name of the chosen candidate."""
        if self.choice is None:
            return NOTHING
        return next(one.name for one in self.candidates if one.method is self.choice)

    @property
    def lost(self) -> bool | None:
        """Whether plasticity was lost: a reset learns better than the network as it is. None where none was tried."""
        return None if self.measure == "return" else lost(self.rows)

    @property
    def call(self) -> str:
        """The exact call to make."""
        return next(each.call for each in self.rows if each.name == self.chosen)

    def apply(self, model: nn.Module, optimizer: Any = None, *, scheduler: Any = None, **arguments: Any) -> Receipt:
        """Do it: apply the chosen method to the model itself, with the batches and the loss that it was tried with.

        Doing nothing gives an empty receipt. Another learning rate is set in the optimizer and in the `scheduler`. A
        method that acts while training is not applied but attached.
        """
        if self.choice is None:
            return Receipt(NOTHING)
        if isinstance(self.choice, LearningRate):
            return LearningRate(self.choice.factor, scheduler=scheduler)(model, optimizer)
        act = moments(self.choice).get("event")
        if act is None or getattr(act, "watches", False) or isinstance(act, Rewarm):
            raise ValueError(f"{self.chosen} acts while you train: {self.call}")
        batches, loss = self.tried_with
        other, arguments["loss"] = arguments.pop("batches", None), arguments.get("loss") or loss
        with random_states_kept():  # a loader draws its order from the global states
            given = list(islice(batches if other is None else other, SHOWN))
        return act(model, optimizer, batches=shown(act, given) or None, **arguments)  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        """Without the data that it was tried with: in a file `apply` needs its batches and loss again."""
        return {**vars(self), "tried_with": ((), None)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for the page."""
        about = [*("answer", "sentence", "chosen", "lost", "call", "steps", "horizon", "passes", "price", "seeds")]
        about += ["judged_on", "measure", "seconds"]
        return {**{name: getattr(self, name) for name in about}, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        short = any(each.error is None and each.share < 1 for each in self.rows)
        old = any(not math.isnan(each.old_end) for each in self.rows)
        at_once = any(not math.isnan(each.rise) for each in self.rows)
        heads = ["candidate", self.measure, "− nothing", "95% interval", "ranks"]
        heads += ["expected"] * short + ["right after"] * at_once
        heads += ["old: right after", "old: at the end"] * old + ["drift"] * at_once
        lines = []
        for each in self.rows:
            if each.error:
                lines.append([each.name, f"not tried: {each.error}"])
                continue
            low, high = each.difference_interval
            own = each.name != NOTHING
            line = [
                each.name,
                f"{each.level:.4g}" + ("" if each.share >= 1 else f" ({each.share:.0%})"),
                f"{each.difference:+.3g}" if own else "",
                f"[{low:+.3g}, {high:+.3g}]" if own else "",
                "/".join(map(str, each.ranks)),
            ]
            fitted = each.share < 1 and not math.isnan(each.expected_error)
            line += [f"{each.expected:.3g} ± {each.expected_error:.2g}" if fitted else ""] * short
            line += [_around(each.rise, each.rise_interval) if own else ""] * at_once
            line += [_around(each.old_rise, each.old_rise_interval) if own else ""] * old
            line += [_around(each.old_end, each.old_end_interval)] * old
            line += [_around(each.drift, each.drift_interval, sign="") if own else ""] * at_once
            lines.append(line)
        shown = table(heads, lines, terminal_width(), left=(0, 1))
        reached = f"{self.steps} of {self.horizon} steps" if self.steps < self.horizon else f"{self.steps} steps"
        if self.passes is not None:
            reached += f" (the horizon = {self.passes:.1f} passes over your data)"
        at_first = "; right after, old: change of the loss; drift: of the function (KL)" if at_once else ""
        notes = [
            f"{reached}, {self.seeds} seeds, {self.seconds:.0f} s, as much training as {self.price:.1f} horizons;",
            f"{self.measure}: on {self.judged_on}, mean over the last quarter of the steps;",
            f"ranks: at a quarter, a half and the whole{at_first}; [95% intervals]",
        ]
        notes += ["expected: the curve's line in log(step) at the whole horizon ± the error of the fit"] * short
        return "\n".join([self.sentence, self.call, "", *shown, "", *notes])


def _around(value: float, interval: Interval, sign: str = "+") -> str:
    """A number with its interval; without one where there is none."""
    if math.isnan(value):
        return ""
    low, high = interval
    return f"{value:{sign}.3g}" + (f" [{low:{sign}.2g}, {high:{sign}.2g}]" if math.isfinite(low + high) else "")


@instead(batches="new_batches", seconds="budget")
def advise(
    model: nn.Module,
    new_batches: Iterable[Batch] | None = None,
    *,
    tasks: Iterable[Iterable[Batch]] | None = None,
    loss: Loss | None = None,
    old_batches: Iterable[Batch] | None = None,
    held_out: Iterable[Batch] | None = None,
    optimizer: Any = None,
    candidates: Mapping[str, Method | str | None] | Iterable[Method | str] | None = None,
    layers: bool = False,
    otherwise: str | None = None,
    judge: Judge | None = None,
    schedule: Rate | None = None,
    clip: float | None = None,
    budget: float | str = "2m",
    epochs: float | None = 1.0,
    steps: int | None = None,
    seeds: int | Sequence[int] = 3,
    copy: Callable[[], nn.Module] | None = None,
    workers: int | None = None,
    on: str | None = None,
    progress: bool | None = None,
) -> Advice:
    """Try remedies on copies of the model and say which to apply, if any. The model itself is not changed.

    new_batches, old_batches: what is to be learned now, and (optional) what should not be forgotten.
    tasks: several lists of batches instead of new_batches, learned one after the other with the remedy at the
        beginning of each; candidates are judged on the last, so that a remedy that stops helping is seen.
    held_out: batches of the new data that the model has never seen and that are not trained on: candidates are then
        judged by the loss on these (what generalises) instead of the loss while learning (what fits). `judge(model,
        batch)` is another number to judge them by, less is better: the share of wrong answers, where that counts.
    loss: `loss(model, batch)`; without it cross entropy of (inputs, labels), or the model's own `.loss`.
    schedule, clip: as training will be: the factor of the learning rate by the share of the training that has passed
        (0 to 1; `lambda share: min(1, share / 0.1)` is a warm-up), and the largest norm of the gradients.
    candidates: methods or names ("fire", "lr:3", "he-reset"), or a mapping of names to methods; without it those of
        `candidates_for(model)`: doing nothing, other learning rates, FIRE, a reset, and what fits the model.
    layers: also FIRE on each group of layers alone, by kind (convolutions, queries and keys, MLPs, …) and by depth.
    otherwise: the candidate that is chosen where trials cannot tell, if they did not show that it does harm; without
        it that is doing nothing.
    epochs, steps: the horizon, how long training will go on: passes over the new batches, or steps; 20 steps at least.
        `epochs=None` without steps: as long as the budget allows.
    budget: seconds at most, or a text such as "90s", "2m", "1h". One that ends before a quarter of the horizon gives
        "cannot tell".
    seeds: how many, or which; at least three for a useful interval.
    copy: a function that returns a copy of the model, for models that cannot be deep-copied.
    workers, on: how many processes (as many as cores without it), and "ray" for Ray. Each candidate has one copy of
        the model and of the optimizer's state per seed; those of dropped candidates are freed.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> data = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(4)]
    >>> from rekindle.methods import FIRE
    >>> advice = advise(net, data, candidates={"nothing": None, "fire": FIRE()}, steps=40, workers=1)
    >>> advice.answer in ("apply", "do nothing", "do not", "cannot tell"), [row.name for row in advice.rows]
    (True, [...])
    """
    began = perf_counter()
    check_asked("advise", model, [] if tasks is not None else new_batches)
    refuse_shards(model, "advise()", "batches")
    check_loss(loss)
    seconds = seconds_of(budget)
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if steps is not None and steps < 1:
        raise ValueError(f"steps={steps}: give the steps that training will go on")
    if epochs is not None and not epochs > 0:
        raise ValueError(f"epochs={epochs}: give the passes over the data that training will go on")
    if (new_batches is None) == (tasks is None):
        raise ValueError("give new_batches, what is to be learned next, or tasks, several of these")
    with random_states_kept(), gradients_kept(model):  # a loader draws its order from the global states
        old, judged = ([] if given is None else list(given) for given in (old_batches, held_out))
        learned = [list(task) for task in ([new_batches] if tasks is None else tasks) if task is not None]
        new = [batch for task in learned for batch in task]
        if judge is not None and not judged:
            raise ValueError("judge= looks at held-out batches: give held_out= too")
        if not new or not chosen:
            raise ValueError("advise needs at least one batch of new data and one seed")
        if not all(learned):
            raise ValueError("tasks holds an empty list: every task needs batches")
        question = Question(
            *(model, optimizer, learned[0], old, loss or default_loss, copy, judged, schedule, clip, judge),
            later=learned[1:],
        )
        tried = to_try(unwrapped(model), new, candidates, layers)
        return compared(
            question,
            tried,
            chosen,
            until=(began, seconds),
            steps=round(epochs * len(new)) if steps is None and epochs is not None else steps,
            batches=len(new),
            otherwise=otherwise,
            workers=workers,
            on=on,
            progress=progress,
            judged_on=_judged_on(judged),
            measure="loss" if judge is None else "judged",
            tried_with=(new[:SHOWN], loss or default_loss),
        )


def _judged_on(held_out: Sequence[Batch]) -> str:
    if not held_out:
        return "the new data while learning"
    used = len(spread_out(held_out, JUDGED))
    return "held-out data" if used == len(held_out) else f"{used} of {len(held_out)} held-out batches"


def compared(
    question: Triable,
    tried: Sequence[Candidate],
    seeds: Sequence[int],
    *,
    until: tuple[float, float],
    steps: int | None,
    otherwise: str | None,
    workers: int | None,
    on: str | None,
    progress: bool | None,
    judged_on: str,
    batches: int | None = None,
    measure: Measure = "loss",
    tried_with: tuple[Sequence[Batch], Loss | None] = ((), None),
) -> Advice:
    """Let all candidates try, and judge them. `until` is when the time began and how many seconds it has."""
    if otherwise is not None and otherwise not in (known := [one.name for one in tried]):
        raise ValueError(f"otherwise={otherwise!r} is none of the candidates: {', '.join(known)}")
    where = executor(question, tried, seeds, on=on, workers=workers)
    try:
        race = _Race(where, tried, seeds, *until, progress, question.first_steps, otherwise or NOTHING)
        horizon = race.to_the_end(steps)
    finally:
        where.close()
    nothing, typical = race.traces[NOTHING], typical_spread(race.traces)
    rows = [
        row(one, race.traces[one.name], nothing, race.ranks[one.name], horizon, typical, question.call(one))
        for one in tried
    ]
    rows.sort(key=lambda each: (each.error is not None, -each.share, each.level))
    waiting = unlearned([each for each in rows if each.name in race.running], nothing, measure)
    answer, name = decide(rows, race.running, race.steps, horizon, otherwise or NOTHING, waiting=bool(waiting))
    if (
        waiting
        and measure != "return"
        and all(each.difference_interval[0] > 0 for each in rows if each.name != NOTHING)
    ):
        answer, name = decide(rows, race.running, race.steps, horizon)  # harm is seen before anything is learned
    if measure == "return":
        rows = [risen(each) for each in rows]
    method = next(one.method for one in tried if one.name == name)
    said = sentence(
        answer,
        next(each for each in rows if each.name == name),
        rows,
        race.steps,
        horizon,
        measure,
        waiting,
    )
    return Advice(
        *(answer, said, method, tuple(rows), race.steps, horizon, len(seeds), perf_counter() - until[0], judged_on),
        measure=measure,
        passes=horizon / batches if batches else None,
        price=sum(trace.steps for traces in race.traces.values() for trace in traces) / horizon,
        candidates=tuple(tried),
        tried_with=tried_with,
    )


def seconds_of(budget: float | str) -> float:
    """A budget in seconds.

    >>> seconds_of("2m"), seconds_of("1.5h"), seconds_of(30)
    (120.0, 5400.0, 30.0)
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([smh]?)\s*", str(budget))
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
        began: float,
        seconds: float,
        progress: bool | None,
        first_steps: int,
        otherwise: str,
    ) -> None:
        self._first_steps, self._otherwise = first_steps, otherwise
        self._where, self._seconds, self._end = where, seconds, began + seconds
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
        """Advance to each horizon in turn, dropping candidates in between; the horizon in steps."""
        self._horizon = max(steps, _LEAST) if steps else math.inf
        self._begin()
        first = min(self._first_steps, self._horizon - 1)
        while self.steps <= first and perf_counter() < self._end:
            piece = max(1, min(_FIRST_STEPS, first), min(first // _LOOKS, self.steps))
            self._advance(int(min(piece, first + 1 - self.steps)))
        # All go to a quarter, about half of them to a half, a quarter of them to the end.
        allowed = int((self._end - perf_counter()) / max(self._per_step, 1e-9) / (0.25 + 0.125 + 0.125))
        self._horizon = horizon = max(steps or allowed, _LEAST)
        for share in HORIZONS:
            goal = round(share * horizon)
            while self.steps < goal and self._advance_in_time(goal, horizon):
                self._say(horizon)
            for name, rank in ranked(self.traces, self.running, horizon).items():
                self.ranks[name].append(rank)
            if self.steps < goal:
                break
            if share < 1 and not self._in_time(horizon):
                self._drop()
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

    def _in_time(self, horizon: int) -> bool:
        """Whether all that still run can go to the end in the time that is left: then nobody need be dropped."""
        return perf_counter() + (horizon - self.steps) * self._per_step < self._end

    def _advance_in_time(self, goal: int, horizon: int) -> bool:
        """One round of a sixteenth of the horizon or of the time; False if that time is not left."""
        fitting = int(self._seconds / _LOOKS / max(self._per_step, 1e-9))
        steps = max(min(goal - self.steps, horizon // _LOOKS, fitting), 1)
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
        numbers = [self.names.index(name) * self._seeds + s for name in names for s in range(self._seeds)]
        for number, trace in self._where.advance(numbers, steps, self._horizon).items():
            name, seed = self.names[number // self._seeds], number % self._seeds
            self.traces.setdefault(name, [Trace() for _ in range(self._seeds)])[seed] = trace
        return [name for name in names if not any(trace.error for trace in self.traces[name])]

    def _drop(self) -> None:
        """Drop the worse half; candidates that are not clearly worse than the best stay, and so does doing nothing."""
        order = sorted(self.running, key=lambda name: self.ranks[name][-1])
        best = levels(self.traces[order[0]])
        out = []
        for name in order[-(-len(order) // 2) :]:
            own = levels(self.traces[name])
            _, (low, _) = mean_interval([a - b for a, b in zip(own, best, strict=True)])
            if name != NOTHING and (low > 0 or not all(map(math.isfinite, own))):
                out.append(name)
        self.running = [name for name in self.running if name not in out]
        self._where.drop([self.names.index(name) * self._seeds + s for name in out for s in range(self._seeds)])

    def _say(self, horizon: int) -> None:
        text = f"advise: {len(self.running)} candidates, step {self.steps} of {horizon}"
        self._progress.show(text, self.steps / horizon)
