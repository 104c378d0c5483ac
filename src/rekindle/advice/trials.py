"""Trials: copies of a model, each with another remedy, that learn the same new data side by side.

A trial can pause and continue, so that poor candidates can be dropped early; `executors` says where trials run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from rekindle.advice.candidates import Candidate
from rekindle.advice.copies import copied, optimizers_like, twins
from rekindle.advice.tasks import output
from rekindle.blocks.evidence import Facts, using
from rekindle.blocks.names import unwrapped
from rekindle.engine.devices import callers_device, to_float64
from rekindle.isolation import Loss, explained, forked_rng, isolated
from rekindle.methods.learning_rate import LearningRate
from rekindle.methods.remedy import Moment, Remedy, moments
from rekindle.projection.recalibration import recalibrate
from rekindle.recording.first_batch import first_shown

_FIRST_STEPS = 4
_LOOKED_AT = 8  # batches for the loss before and after
SHOWN = 20  # batches that a method is applied with
_STATISTICS = 4  # batches that BatchNorm's statistics are estimated from before a look
JUDGED = 4  # held-out batches per look
RUNGS = (0.0625, 0.125, 0.25, 0.5, 1.0)  # of the horizon: where candidates are compared
RANKED = "at a sixteenth, an eighth, a quarter, a half and the whole"


Rate = Callable[[float], float]
"""The factor of the learning rate by the share of the training that has passed."""
Judge = Callable[[nn.Module, Any], Any]
"""`judge(model, batch)`: a number, less is better."""


@dataclass
class Question:
    """What every trial has in common."""

    model: nn.Module
    optimizer: Any
    new: list[Any]
    old: list[Any]
    loss: Loss
    copy: Callable[[], nn.Module] | None = None
    held_out: Sequence[Any] = ()
    schedule: Rate | None = None
    clip: float | None = None
    judge: Judge | None = None
    later: Sequence[list[Any]] = ()
    _before: Measured | None = field(default=None, init=False, repr=False)
    _facts: tuple[Facts | None] | None = field(default=None, init=False, repr=False)
    shown: set[str] = field(default_factory=set, init=False, repr=False)
    _alike: dict[int, list[list[int]]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def in_step(self) -> bool:
        """Whether batches have one shape, or some have one other: trials of all seeds then see equal shapes."""
        return all(len(self.alike(task)) < 3 and len(tasks) > 3 for task, tasks in enumerate((self.new, *self.later)))

    @cached_property
    def judged(self) -> list[Any]:
        """The held-out batches that are looked at; one alone in eight parts, which show how much few examples say."""
        chosen = spread_out(self.held_out, JUDGED)
        return parts_of(chosen[0], _LOOKED_AT) if len(chosen) == 1 else chosen

    def alike(self, task: int) -> list[list[int]]:
        """The places of batches with equal shapes in a task."""
        if task not in self._alike:
            kinds: dict[Any, list[int]] = {}
            for place, batch in enumerate(self.later[task - 1] if task else self.new):
                kinds.setdefault(shapes(batch), []).append(place)
            self._alike[task] = list(kinds.values())
        return self._alike[task]

    @property
    def device(self) -> str:
        """The type of device that the model is on."""
        return next((tensor.device.type for tensor in self.model.parameters() if tensor.device.type != "cpu"), "cpu")

    def facts(self) -> Facts | None:
        """What the first new batch shows about the model, and about each of its copies."""
        if self._facts is None:
            self._facts = (first_shown(unwrapped(self.model), self.new, self.loss),)
        return self._facts[0]

    @property
    def first_steps(self) -> int:
        """Steps after which it is known how long one takes."""
        return _FIRST_STEPS

    def call(self, candidate: Candidate) -> str:
        """What to write to apply this candidate."""
        return candidate.call

    def before(self, twin: nn.Module) -> Measured:
        """What was measured on a copy before any remedy: the same for every trial."""
        if self._before is None:
            self._before = self.measured(twin)
        return self._before

    def measured(self, model: nn.Module) -> Measured:
        """The losses and outputs of a model on a few batches."""
        outputs: list[Tensor] = []
        with isolated(model), torch.no_grad(), suppress(Exception):  # a loss may call the model otherwise
            outputs = [output(model, batch).float() for batch in spread_out(self.new, _LOOKED_AT)]
        return Measured(self.losses(model, self.new), self.losses(model, self.old), outputs)

    def losses(self, model: nn.Module, batches: Sequence[Any], judge: Judge | None = None) -> list[float]:
        """The loss on each of a few batches, in evaluation mode."""
        if not batches:
            return []
        judged = judge or self.loss
        with isolated(model), torch.no_grad():
            found = []
            for batch in spread_out(batches, _LOOKED_AT):
                with explained(model, batch):
                    found.append(float(judged(model, batch)))
        return [loss if math.isfinite(loss) else math.inf for loss in found]

    def trial(self, candidate: Candidate, seed: int) -> Trial:
        """A copy of the model with this candidate's remedy."""
        return Trial(self, candidate, seed)


class Measured(NamedTuple):
    """The losses on new and on old batches, and the outputs on the new ones."""

    new: list[float]
    old: list[float]
    outputs: list[Tensor]


@dataclass
class Trace:
    """What one trial has shown so far. `error` says why the candidate could not be applied.

    `losses` are those of every step, `looks` those on the held-out batches with the step. Changes right after the
    remedy have one number per batch. `begun` is the level at which learning began, nan where that is not known.
    """

    losses: list[float] = field(default_factory=list)
    looks: list[tuple[int, float]] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)  # of the last look, batch by batch
    rises: list[float] = field(default_factory=list)
    old_rises: list[float] = field(default_factory=list)
    drifts: list[float] = field(default_factory=list)
    old_before: float = math.nan
    old_end: float = math.nan
    begun: float = math.nan
    error: str | None = None
    tasks: int = 1
    pace: float = math.nan  # seconds per step, of the last steps that it took alone

    @property
    def steps(self) -> int:
        """Steps that were taken."""
        return len(self.losses)

    def curve(self) -> list[tuple[int, float]]:
        """Step and loss by which the candidate is judged: on held-out batches where there are some."""
        return self.looks or list(enumerate(self.losses, start=1))


class Trial:
    """One candidate with one seed: the remedy is applied when the trial is made."""

    def __init__(self, question: Question, candidate: Candidate, seed: int) -> None:
        self.trace = Trace(tasks=1 + len(question.later))
        self.seed = seed
        self.question, self.task = question, 0
        self._parts: dict[Moment, Any] = {}
        self._draws = torch.Generator().manual_seed(seed)
        self._order = torch.Generator().manual_seed(seed)
        self.noise = torch.Generator().manual_seed(seed + 1)
        self._queue: list[int] = []
        self.model = copied(unwrapped(question.model), question.copy)
        self.optimizers = optimizers_like(question.optimizer, twins(unwrapped(question.model), self.model), state=True)
        # A module kept in evaluation mode (a frozen BatchNorm) stays so; a model that is in it as a whole trains.
        every = not self.model.training
        self._training = [module for module in self.model.modules() if every or module.training]
        before = question.before(self.model)
        self.trace.old_before = _mean(before.old)
        try:
            method = copy.deepcopy(candidate.method)  # trials that take turns must not share what it gathers
            self._parts = {} if method is None else moments(method)
            self._period = _period(self._parts.get("event"))
            if getattr(method, "watches", False):
                method.observe(self.model)  # type: ignore[union-attr]  # the hooks are freed with the copy
            if "event" in self._parts and self._period is None:
                self._apply("event")
        except KeyboardInterrupt:  # also one that a method has put its receipt on
            raise
        except Exception as error:
            self._refuse(error)
            return
        refit = getattr(question.loss, "refit", None)  # a critic's values: every candidate begins at the same scale
        if refit is not None:
            refit(self.model, question.new)
        self._rates = [[_base(group) for group in each.param_groups] for each in self.optimizers]
        self.trace.old_end = self.trace.old_before
        if candidate.name in question.shown:
            return
        question.shown.add(candidate.name)  # what a remedy does right away takes as long as many steps: once is enough
        after = before if candidate.method is None and refit is None else question.measured(self.model)
        self.trace.rises = [a - b for a, b in zip(after.new, before.new, strict=True)]
        self.trace.old_rises = [a - b for a, b in zip(after.old, before.old, strict=True)]
        self.trace.old_end = _mean(after.old)
        self.trace.drifts = _drifts(before.outputs, after.outputs)

    def advance(self, steps: int, horizon: float = math.inf) -> Trace:
        """Train `steps` more steps of `horizon` in all, then measure on the held-out and the old data."""
        if self.trace.error is None:
            with forked_rng(self.noise, self.model):
                for _ in range(steps):
                    batch = self.prepare(horizon)
                    if self.trace.error is None:
                        self.learn(batch)
                    if self.trace.error is not None:
                        return self.trace
            self.look(horizon)
        return self.trace

    def learn(self, batch: Any) -> None:
        """One step on a batch."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with explained(self.model, batch), callers_device():
            plain = self.question.loss(self.model, batch)
        plain.backward()  # type: ignore[no-untyped-call]
        if self.trace.steps == 0:
            self._check_learning()
        self.before_step()
        if self.question.clip is not None:
            trained = [p for each in self.optimizers for group in each.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, self.question.clip)
        self.act("backward")
        if self.trace.error is None:
            for optimizer in self.optimizers:
                optimizer.step()
        self.after_step(float(plain.detach()))

    def prepare(self, horizon: float) -> object:
        """What comes before a step: the learning rate, the task, training mode; the batch."""
        if self.question.schedule is not None:
            factor = self.question.schedule(min((self.trace.steps + 0.5) / horizon, 1.0))
            for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = factor * rate
        self._begin_task(int(self.trace.steps * self.trace.tasks / horizon))
        batches = self.question.later[self.task - 1] if self.task else self.question.new
        if not self._queue:
            self._queue = self._shuffled(len(batches))[::-1]
        self.train()
        return batches[self._queue.pop()]

    def _shuffled(self, count: int) -> list[int]:
        """The places of batches in a random order; a last one that is smaller stays the last, as a loader has it."""
        order = list(range(count))
        for places in self.question.alike(self.task) if self.question.in_step else [order[:]]:
            drawn = torch.randperm(len(places), generator=self._order).tolist()
            for place, other in zip(places, drawn, strict=True):
                order[place] = places[other]
        return order

    def train(self) -> None:
        """The mode of training, which a module that was kept out of it does not take."""
        for module in self._training:
            if not module.training:  # a module's own assignment is slow, and this is done at every step
                module.training = True

    def before_step(self) -> None:
        """Add what a method adds to the loss; the gradients of the loss itself are there."""
        if "loss" in self._parts:
            try:
                self._parts["loss"].loss_term(self.model).backward()
            except Exception as error:
                self._refuse(error)

    def after_step(self, loss: float) -> None:
        """What a method does after a step, and the loss of the step."""
        self.act("step")
        if self._period is not None and (self.trace.steps + 1) % self._period == 0:
            self.act("event")
        if self.trace.error is None:
            self.trace.losses.append(loss if math.isfinite(loss) else math.inf)

    @property
    def changes_steps(self) -> bool:
        """Whether its method acts at every step."""
        return bool(self._parts.keys() - {"event"}) or self._period is not None

    def look(self, horizon: float = math.inf) -> None:
        """Measure on the held-out and the old data, in the last quarter of the way to where candidates are compared."""
        question, share = self.question, self.trace.steps / horizon
        if self.trace.looks and not any(0.75 * rung < share <= rung for rung in RUNGS):
            return
        if question.held_out or question.old:
            # After a strong remedy running statistics lag behind the weights for longer than a short trial.
            with suppress(Exception):  # a loss may call the model otherwise; then the running statistics stay
                recalibrate(self.model, spread_out(question.new, _STATISTICS))
        self.trace.old_end = _mean(question.losses(self.model, question.old))
        if question.held_out:
            self.trace.parts = question.losses(self.model, question.judged, question.judge or question.loss)
            self.trace.looks.append((self.trace.steps, _mean(self.trace.parts)))

    def close(self) -> None:
        """Nothing to stop: the copy is freed with the trial."""

    def _begin_task(self, task: int) -> None:
        """Go on to a later task, with the remedy at its beginning; a learning rate is set once."""
        if not self.task < task < self.trace.tasks:
            return
        self.task, self._queue = task, []
        if self._period is None and not isinstance(self._parts.get("event"), LearningRate):
            self.act("event")

    def act(self, moment: Moment) -> None:
        """Let the method act, if it does at this moment; where it cannot, the trial is over."""
        if moment not in self._parts or self.trace.error is not None:
            return
        try:
            self._apply(moment)
        except KeyboardInterrupt:  # also one that a method has put its receipt on
            raise
        except Exception as error:
            self._refuse(error)

    def _apply(self, moment: Moment) -> None:
        method = self._parts[moment]
        more: dict[str, Any] = {"generator": self._draws} if isinstance(method, Remedy) or moment == "event" else {}
        if moment == "event":
            more |= {"batches": shown(method, self.question.new), "loss": self.question.loss}
        with using(self.model, self.question.facts):
            method(self.model, self.optimizers, **more)

    def _refuse(self, error: Exception) -> None:
        self.trace.error = f"{type(error).__name__}: {error}".splitlines()[0]

    def _check_learning(self) -> None:
        """Raise where the loss is one of another model: every candidate would then look the same."""
        if all(p.grad is None for p in self.model.parameters()):
            raise ValueError(
                "loss(model, batch) gave no parameter of the copy a gradient: it must compute with the model that it "
                "is given, not with one that it remembers, and the copy must not be frozen"
            )


def _period(event: Any) -> int | None:
    """Every how many steps a method acts that must have watched training before; None for one that acts at once."""
    if not getattr(event, "watches", False):
        return None
    if event.period is None:
        raise ValueError("it acts at later events, after it has watched the training between them: a trial has none")
    return int(event.period)


def parts_of(batch: Any, count: int) -> list[Any]:
    """A batch in parts of equally many rows; the batch itself where its tensors do not have as many rows each.

    >>> [len(x) for x, y in parts_of((torch.zeros(9, 3), torch.zeros(9)), 4)], len(parts_of((torch.zeros(3), 1), 2))
    ([2, 2, 2, 2], 1)
    """
    leaves = tree_leaves(batch)
    rows = {len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else 0 for leaf in leaves}
    size = min(rows, default=0) // count
    if len(rows) != 1 or not size or isinstance(batch, Tensor):
        return [batch]
    return [tree_map(lambda leaf, at=at: leaf[at * size : (at + 1) * size], batch) for at in range(count)]


def shapes(batch: Any) -> tuple[Any, ...]:
    """The shapes of all tensors in a batch.

    >>> shapes((torch.zeros(2, 3), {"y": torch.zeros(2)}))
    (torch.Size([2, 3]), torch.Size([2]))
    """
    return tuple(each.shape for each in tree_leaves(batch) if isinstance(each, Tensor))


def spread_out(batches: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, from the first to the last: data may be sorted.

    >>> spread_out("abcdefghi", 3), spread_out("ab", 3)
    (['a', 'e', 'i'], ['a', 'b'])
    """
    if len(batches) <= most:
        return list(batches)
    return [batches[round(place * (len(batches) - 1) / (most - 1))] for place in range(most)]


def shown(method: object, batches: Sequence[Any]) -> list[Any]:
    """What a method is applied with: the first batches, as one where it wants all examples at once.

    >>> class All:
    ...     batches = "all"
    >>> [batch[0].shape for batch in shown(All(), [(torch.zeros(2, 3), torch.zeros(2))] * 2)]
    [torch.Size([4, 3])]
    """
    first = list(batches[:SHOWN])
    if getattr(method, "batches", "any") != "all" or not first:
        return first
    kind = type(first[0])
    if kind is Tensor:
        return [torch.cat(first)]
    if kind in (tuple, list) and all(isinstance(each, Tensor) and each.dim() for one in first for each in one):
        return [kind(torch.cat(column) for column in zip(*first, strict=True))]
    if kind is dict and all(isinstance(each, Tensor) and each.dim() for one in first for each in one.values()):
        return [{name: torch.cat([one[name] for one in first]) for name in first[0]}]
    return first


def _base(group: dict[str, Any]) -> float:
    """The learning rate that a schedule multiplies: where one has begun it is kept beside the present one."""
    rate: float = group.get("initial_lr", group["lr"])
    return rate


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _drifts(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[float]:
    """How far the function moved on each batch: KL divergence of class scores, relative squared change otherwise."""
    found = []
    for old, new in zip(before, after, strict=False):
        if old.dim() >= 2 and old.shape[-1] > 1:
            there, here = (functional.log_softmax(to_float64(t.flatten(0, -2)), -1) for t in (new, old))
            moved = float(functional.kl_div(there, here, log_target=True, reduction="batchmean"))
            found.append(0.0 if moved < 0 else moved)  # not max(): it would turn nan into 0
        else:
            found.append(float((new - old).square().sum() / old.square().sum().clamp_min(1e-12)))
    return found
