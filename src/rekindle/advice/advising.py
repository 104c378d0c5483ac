"""advise(): which remedy, for this model and this data? Candidates are tried on copies, and the best is named.

Trials share their seeds and batches, so candidates are compared pairwise, in a race (`racing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any

from torch import nn

from rekindle.advice.candidates import NOTHING, Candidate, to_try
from rekindle.advice.executors import Triable, executor
from rekindle.advice.intervals import Interval
from rekindle.advice.judging import (
    Answer,
    Measure,
    Row,
    decide,
    lost,
    risen,
    row,
    sentence,
    typical_spread,
    unlearned,
)
from rekindle.advice.progress import seconds_of
from rekindle.advice.racing import Race
from rekindle.advice.tasks import default_loss, same_words
from rekindle.advice.trials import JUDGED, RANKED, SHOWN, Judge, Question, Rate, shown, spread_out
from rekindle.blocks.evidence import using
from rekindle.blocks.names import unwrapped
from rekindle.diagnosis.agreement import STANDING
from rekindle.engine.devices import callers_device, learning
from rekindle.isolation import Batch, Loss, check_asked, check_loss, gradients_kept, random_states_kept
from rekindle.methods.learning_rate import LearningRate, Rewarm
from rekindle.methods.remedy import moments
from rekindle.projection.method import Method
from rekindle.projection.receipt import Receipt
from rekindle.recording.first_batch import knowing
from rekindle.report.showing import Page
from rekindle.sharding.team import refuse_shards
from rekindle.tables import table, terminal_width


@dataclass(frozen=True)
class Advice(Page):
    """What was found; prints as a table.

    Attributes:
        answer: "apply", "do nothing", "do not" or "cannot tell".
        sentence: the answer in words.
        choice: the method to apply, None for doing nothing.
        rows: what was measured of each candidate.
        steps: how many were trained.
        horizon: how many the question was about.
        seeds: how many trials each candidate had.
        seconds: what it took.
        judged_on: the data that candidates were judged on.
        measure: the number that they were judged by.
        passes: the horizon in passes over the new data.
        price: the time that it all took, in trainings of one network over the horizon.
        candidates: what was tried.
        tried_with: the data, loss and settings of the trials, which `apply` uses again.
    """

    page = "advice"
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

    def apply(
        self, model: nn.Module, optimizer: object = None, *, scheduler: object = None, **arguments: Any
    ) -> Receipt:
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
        with knowing(model, given, arguments["loss"]):
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
        heads += ["right after"] * at_once
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
            f"{reached}, {self.seeds} seeds, {self.seconds:.0f} s, as long as {self.price:.1f} trainings of one;",
            f"{self.measure}: on {self.judged_on}, mean over the last quarter of the steps;",
            f"ranks: {RANKED}{at_first}; [95% intervals]",
        ]
        notes += ["with a share: dropped there, clearly behind; its difference is the one at that depth"] * short
        return "\n".join([self.sentence, self.call, "", *shown, "", *notes, STANDING["advise"]])


def _around(value: float, interval: Interval, sign: str = "+") -> str:
    """A number with its interval; without one where there is none."""
    if math.isnan(value):
        return ""
    low, high = interval
    return f"{value:{sign}.3g}" + (f" [{low:{sign}.2g}, {high:{sign}.2g}]" if math.isfinite(low + high) else "")


@same_words
@learning()
def advise(
    model: nn.Module,
    new_batches: Iterable[Batch] | None = None,
    *,
    tasks: Iterable[Iterable[Batch]] | None = None,
    loss: Loss | None = None,
    old_batches: Iterable[Batch] | None = None,
    held_out: Iterable[Batch] | None = None,
    optimizer: object = None,
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

    Args:
        model: The network; its copies learn.
        new_batches: What is to be learned now.
        tasks: Several lists of batches instead, learned one after the other with the remedy at the beginning of each;
            candidates are judged on the last, so that a remedy that stops helping is seen.
        loss: `loss(model, batch)`; without it cross entropy of (inputs, labels), or the model's own `.loss`.
        old_batches: What should not be forgotten.
        held_out: Batches that the model has never seen and that are not trained on: candidates are then judged by the
            loss on these (what generalizes) instead of the loss while learning (what fits).
        optimizer: The optimizer of the model; copies have one like it, with its state.
        candidates: Methods or names ("fire", "lr:3", "he-reset"), or a mapping of names to methods; without it those
            of `candidates_for(model)`.
        layers: Whether FIRE is also tried on each group of layers alone, by kind and by depth.
        otherwise: The candidate that is chosen where trials cannot tell, if they did not show that it does harm.
        judge: `judge(model, batch)`: another number to judge held-out batches by; less is better.
        schedule: The factor of the learning rate by the share of the training that has passed (0 to 1).
        clip: The largest norm of the gradients.
        budget: Seconds at most, or a text such as "90s", "2m", "1h"; below a quarter of the horizon it cannot tell.
        epochs: The horizon, how long training will go on, in passes over the new batches. None without steps: as long
            as the budget allows.
        steps: The horizon in steps, 20 at least.
        seeds: How many, or which; at least three for a useful interval.
        copy: A function that returns a copy of the model, for models that cannot be deep-copied.
        workers: How many processes; as many as cores without it. Each candidate has one copy per seed.
        on: "ray" for Ray.
        progress: Whether to report progress on stderr; None does after five seconds.

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
        with callers_device():
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
        with using(unwrapped(model), question.facts):
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
        race = Race(where, tried, seeds, until, progress, question.first_steps, otherwise or NOTHING, measure)
        horizon = race.to_the_end(steps)
    finally:
        where.close()
    nothing, typical = race.traces[NOTHING], typical_spread(race.traces)
    rows = [
        row(one, race.traces[one.name], nothing, race.ranks[one.name], horizon, typical, question.call(one))
        for one in tried
    ]
    rows.sort(key=lambda each: (each.error is not None, -each.share, each.level))
    waiting = unlearned(race.traces, race.judged, measure)
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
        price=(perf_counter() - until[0]) / (horizon * median(trace.pace for trace in nothing)),
        candidates=tuple(tried),
        tried_with=tried_with,
    )
