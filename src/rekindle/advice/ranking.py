"""rank(): which of several checkpoints will learn best? Copies of all learn the same thing side by side, in a race.

People ask it when several starts are there: the checkpoints of one run, several runs, trained further or less far. The
loss of a network says how well it does what it was trained on, not how well it will learn something new.

>>> import torch
>>> from torch import nn
>>> _ = torch.manual_seed(0)
>>> nets = {name: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)) for name in ("good", "dead")}
>>> _ = nn.init.constant_(nets["dead"][0].bias, -100.0)
>>> x = torch.randn(64, 8)
>>> data = [(part, part[:, :4].argmax(1)) for part in x.split(16)]
>>> rank(nets, data, steps=200, optimizer=torch.optim.Adam(nets["good"].parameters(), lr=1e-2), workers=1).order
('good', 'dead')
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

from torch import nn

from rekindle.advice.candidates import Candidate
from rekindle.advice.copies import optimizers_like
from rekindle.advice.executors import TrialExecutor, executor
from rekindle.advice.judging import Row, levels, row, typical_spread
from rekindle.advice.progress import Progress, seconds_of
from rekindle.advice.racing import behind
from rekindle.advice.tasks import default_loss, same_words
from rekindle.advice.trials import Question, Trace, Trial
from rekindle.blocks.names import unwrapped
from rekindle.diagnosis.agreement import STANDING
from rekindle.engine.devices import callers_device, learning
from rekindle.isolation import Batch, Loss, check_asked, check_loss, random_states_kept
from rekindle.methods import FullReset
from rekindle.optimizers import unwrap
from rekindle.report.showing import Page
from rekindle.sharding.team import refuse_shards
from rekindle.tables import table, terminal_width

FRESH = "fresh"
SAFE = 0.5  # of the horizon: earlier nobody is dropped
_ROUNDS = 8  # looks at the clock


@dataclass(frozen=True)
class Ranking(Page):
    """Models in the order in which they will learn best; prints as a table.

    Attributes:
        sentence: the answer in words.
        rows: for each model the loss that it reached and the paired difference from the first.
        steps: how many were trained.
        horizon: how many the question was about.
        seeds: how many trials each model had.
        seconds: what it took.
        judged_on: the data of the loss.
    """

    page = "ranking"
    sentence: str
    rows: tuple[Row, ...]
    steps: int
    horizon: int
    seeds: int
    seconds: float
    judged_on: str = "the new data"

    @property
    def order(self) -> tuple[str, ...]:
        """The names, the best first."""
        return tuple(each.name for each in self.rows)

    @property
    def best(self) -> str:
        """The name of the first."""
        return self.rows[0].name

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for the page."""
        about = ("sentence", "order", "steps", "horizon", "seeds", "seconds", "judged_on")
        return {**{name: getattr(self, name) for name in about}, "rows": [asdict(each) for each in self.rows]}

    def __str__(self) -> str:
        lines = []
        for each in self.rows:
            low, high = each.difference_interval
            share = "" if each.share >= 1 else f" ({each.share:.0%})"
            line = [each.name, f"{each.level:.4g}{share}" if not each.error else f"not tried: {each.error}"]
            if not each.error and each.name != self.best:
                line += [f"{each.difference:+.3g}", f"[{low:+.3g}, {high:+.3g}]"]
            lines.append(line)
        shown = table(["model", "loss", "− the first", "95% interval"], lines, terminal_width(), left=(0, 1))
        notes = [
            f"{self.steps} of {self.horizon} steps, {self.seeds} seeds, {self.seconds:.0f} s;",
            f"loss: on {self.judged_on}, mean over the last quarter; with a share: dropped there, clearly behind",
        ]
        return "\n".join([self.sentence, "", *shown, "", *notes, STANDING["rank"]])


@same_words
@learning()
def rank(
    models: Mapping[str, nn.Module] | Sequence[nn.Module],
    new_batches: Iterable[Batch],
    *,
    loss: Loss | None = None,
    held_out: Iterable[Batch] | None = None,
    optimizer: Any = None,
    fresh: bool = False,
    budget: float | str = "2m",
    epochs: float = 1.0,
    steps: int | None = None,
    seeds: int | Sequence[int] = 3,
    workers: int | None = None,
    progress: bool | None = None,
) -> Ranking:
    """Put models in the order in which they learn the new batches best. No model is changed.

    Args:
        models: Two or more models, by name or in a list (then they are called by their places).
        new_batches: What is to be learned next.
        loss: `loss(model, batch)`; without it cross entropy of (inputs, labels), or the model's own `.loss`.
        held_out: Batches that are not trained on: models are then ranked by the loss on these.
        optimizer: One of the models' optimizers; its class and settings are used for all. Without it Adam, lr 1e-3.
        fresh: Also a freshly initialized network, called "fresh": continue, or start again?
        budget: Seconds at most, or a text such as "2m".
        epochs: The length in passes over the new batches: that of the training that will follow. Early orders mislead
            (docs/evidence/instruments.md).
        steps: The length in steps, instead of epochs.
        seeds: How many, or which: orders of the batches.
        workers: How many processes; as many as cores without it.
        progress: Whether to report progress on stderr; None does after five seconds.
    """
    began = perf_counter()
    named = dict(models) if isinstance(models, Mapping) else {str(at): model for at, model in enumerate(models)}
    for model in named.values():
        check_asked("rank", model, new_batches)
        refuse_shards(model, "rank()", "batches")
    check_loss(loss)
    chosen, allowed = list(range(seeds)) if isinstance(seeds, int) else list(seeds), seconds_of(budget)
    if len(named) + fresh < 2 or not chosen:
        raise ValueError("rank compares two models or more, with one seed at least")
    with random_states_kept(), callers_device():  # a loader draws its order from the global states
        batches, judged = list(new_batches), list(held_out or ())
        if not batches:
            raise ValueError("there are no batches to learn from")
        questions = {
            name: Question(model, _like(optimizer, model, named), batches, [], loss or default_loss, held_out=judged)
            for name, model in named.items()
        }
        candidates = [Candidate(name) for name in named]
        if fresh:
            questions[FRESH] = next(iter(questions.values()))
            candidates.append(Candidate(FRESH, FullReset()))
        horizon = max(round(epochs * len(batches)) if steps is None else steps, 1)
        bar, end = Progress(progress), began + allowed
        where = executor(_Questions(questions), candidates, chosen, on=None, workers=workers)
        try:
            traces, taken = _run(where, candidates, len(chosen), horizon, end, bar)
        finally:
            where.close()
            bar.close()
    rows = _rows(candidates, traces, horizon)
    return Ranking(
        *(_sentence(rows, taken, horizon), tuple(rows), taken, horizon, len(chosen)),
        *(perf_counter() - began, "held-out data" if judged else "the new data while learning"),
    )


def _run(
    where: TrialExecutor, tried: Sequence[Candidate], seeds: int, horizon: int, end: float, bar: Progress
) -> tuple[dict[str, list[Trace]], int]:
    """Let all learn, and drop who is clearly behind from `SAFE` on; what they have shown, and the steps taken."""
    names = [one.name for one in tried]
    traces: dict[str, list[Trace]] = {name: [] for name in names}
    running, taken, began = list(names), 0, perf_counter()
    for share in (*(part / _ROUNDS for part in range(1, _ROUNDS)), 1.0):
        steps = min(max(round(share * horizon), taken + 1), horizon) - taken
        passed = perf_counter() - began
        if steps < 1 or (taken and perf_counter() + passed / taken * steps > end):
            continue
        places = {seed * len(names) + names.index(name): name for seed in range(seeds) for name in running}
        found = where.advance(sorted(places), steps, horizon)
        for name in running:
            traces[name] = [found[number] for number in sorted(places) if places[number] == name]
        taken += steps
        running = [name for name in running if not any(trace.error for trace in traces[name])]
        bar.show(f"rank: {len(running)} models, step {taken} of {horizon}", taken / horizon)
        if SAFE <= share < 1 and len(running) > 1:
            running = [name for name in running if name not in behind(traces, running)]
    return traces, taken


def _rows(tried: Sequence[Candidate], traces: Mapping[str, Sequence[Trace]], horizon: int) -> list[Row]:
    """A row for each, the best first; who was dropped stands behind those that went on."""

    def place(one: Candidate) -> tuple[bool, int, float]:
        own = traces[one.name]
        failed = any(trace.error for trace in own)
        level = math.inf if failed else sum(levels(own)) / len(own)
        return failed, 0 if failed else -own[0].steps, level if level == level else math.inf

    ordered = sorted(tried, key=place)
    first = traces[ordered[0].name]
    if first[0].error:
        raise ValueError(f"no model could be tried: {first[0].error}")
    typical = typical_spread(traces, ordered[0].name)
    return [
        row(replace(one, method=None), traces[one.name], first, [], horizon, typical, "", base=ordered[0].name)
        for one in ordered
    ]


def _sentence(rows: Sequence[Row], steps: int, horizon: int) -> str:
    first, near = rows[0], [each.name for each in rows[1:] if not each.error and not each.difference_interval[0] > 0]
    if near:
        said = f"{first.name} learns best in this trial, but {', '.join(near)} cannot be told from it"
        return f"{said}: more steps or seeds may."
    gone = f" ({steps} of {horizon} steps)" if steps < horizon else ""
    return f"Start from {first.name}: it learns the new data best{gone}."


def _like(optimizer: Any, model: nn.Module, named: Mapping[str, nn.Module]) -> Any:
    """An optimizer of this model, with the class and the settings of the given one, which is of one of them."""
    if optimizer is None:
        return None
    held = {p for one in unwrap(optimizer) for group in one.param_groups for p in group["params"]}
    for owner in map(unwrapped, named.values()):
        own, mine = list(owner.parameters()), list(unwrapped(model).parameters())
        if held & set(own) and len(own) == len(mine):
            return optimizers_like(optimizer, dict(zip(own, mine, strict=True)))
    raise ValueError(
        "optimizer= holds the parameters of none of the models, or of one that is built otherwise: give the optimizer "
        "of one of them"
    )


class _Questions:
    """What is tried (`executors.Triable`): every model on the same batches."""

    first_steps = 4

    def __init__(self, questions: Mapping[str, Question]) -> None:
        self._questions = questions
        self.device = next((q.device for q in questions.values() if q.device != "cpu"), "cpu")

    def call(self, candidate: Candidate) -> str:
        """Nothing is to be applied."""
        return ""

    def trial(self, candidate: Candidate, seed: int) -> Trial:
        """A copy of the candidate's model."""
        return Trial(self._questions[candidate.name], candidate, seed)
