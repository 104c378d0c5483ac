"""Trials: copies of a model, each with another remedy, that learn the same new data side by side.

A trial can pause and continue, so that poor candidates can be dropped early; `executors` says where trials run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rekindle.advice.candidates import Candidate
from rekindle.advice.tasks import output
from rekindle.blocks.names import unwrapped
from rekindle.engine.arithmetic import to_float64
from rekindle.isolation import Loss, explained, forked_rng, isolated
from rekindle.methods.learning_rate import LearningRate
from rekindle.methods.remedy import Moment, Remedy, moments
from rekindle.optimizers import unwrap
from rekindle.projection.recalibration import recalibrate

_FIRST_STEPS = 4
_LOOKED_AT = 8  # batches for the loss before and after
SHOWN = 20  # batches that a method is applied with
_STATISTICS = 4  # batches that BatchNorm's statistics are estimated from before a look
JUDGED = 4  # held-out batches per look


Rate = Callable[[float], float]
"""The factor of the learning rate by the share of the training that has passed."""
Judge = Callable[[nn.Module, Any], Any]
"""`judge(model, batch)`: a number, less is better."""


@dataclass(frozen=True)
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

    @property
    def device(self) -> str:
        """The type of device that the model is on."""
        return next((tensor.device.type for tensor in self.model.parameters() if tensor.device.type != "cpu"), "cpu")

    @property
    def first_steps(self) -> int:
        """Steps after which it is known how long one takes."""
        return _FIRST_STEPS

    def call(self, candidate: Candidate) -> str:
        """What to write to apply this candidate."""
        return candidate.call

    def trial(self, candidate: Candidate, seed: int) -> Trial:
        """A copy of the model with this candidate's remedy."""
        return Trial(self, candidate, seed)


@dataclass
class Trace:
    """What one trial has shown so far. `error` says why the candidate could not be applied.

    `losses` are those of every step, `looks` those on the held-out batches with the step. Changes right after the
    remedy have one number per batch. `begun` is the level at which learning began, nan where that is not known.
    """

    losses: list[float] = field(default_factory=list)
    looks: list[tuple[int, float]] = field(default_factory=list)
    rises: list[float] = field(default_factory=list)
    old_rises: list[float] = field(default_factory=list)
    drifts: list[float] = field(default_factory=list)
    old_before: float = math.nan
    old_end: float = math.nan
    begun: float = math.nan
    error: str | None = None
    tasks: int = 1

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
        self._question, self._task = question, 0
        self._parts: dict[Moment, Any] = {}
        self._draws = torch.Generator().manual_seed(seed)
        self._order = torch.Generator().manual_seed(seed)
        self._noise = torch.Generator().manual_seed(seed + 1)
        self._queue: list[int] = []
        self._model = copied(question)
        self._optimizers = optimizers_like(
            question.optimizer, twins(unwrapped(question.model), self._model), state=True
        )
        # A module kept in evaluation mode (a frozen BatchNorm) stays so; a model that is in it as a whole trains.
        every = not self._model.training
        self._training = [module for module in self._model.modules() if every or module.training]
        before, at_first, old = self._outputs(), self._losses(question.new), self._losses(question.old)
        self.trace.old_before = _mean(old)
        try:
            method = copy.deepcopy(candidate.method)  # trials that take turns must not share what it gathers
            self._parts = {} if method is None else moments(method)
            self._period = _period(self._parts.get("event"))
            if getattr(method, "watches", False):
                method.observe(self._model)  # type: ignore[union-attr]  # the hooks are freed with the copy
            if "event" in self._parts and self._period is None:
                self._apply("event")
        except KeyboardInterrupt:  # also one that a method has put its receipt on
            raise
        except Exception as error:
            self._refuse(error)
            return
        self._rates = [[_base(group) for group in each.param_groups] for each in self._optimizers]
        after, old_after = self._losses(question.new), self._losses(question.old)
        self.trace.rises = [a - b for a, b in zip(after, at_first, strict=True)]
        self.trace.old_rises = [a - b for a, b in zip(old_after, old, strict=True)]
        self.trace.old_end = _mean(old_after)
        self.trace.drifts = _drifts(before, self._outputs())

    def advance(self, steps: int, horizon: float = math.inf) -> Trace:
        """Train `steps` more steps of `horizon` in all, then measure on the held-out and the old data."""
        if self.trace.error is None:
            with forked_rng(self._noise, self._model):
                for _ in range(steps):
                    self._set_rate((self.trace.steps + 0.5) / horizon)
                    self._begin_task(int(self.trace.steps * self.trace.tasks / horizon))
                    loss = self._step()
                    if self.trace.error is not None:
                        return self.trace
                    self.trace.losses.append(loss)
            if self._question.held_out or self._question.old:
                # After a strong remedy running statistics lag behind the weights for longer than a short trial.
                with suppress(Exception):  # a loss may call the model otherwise; then the running statistics stay
                    recalibrate(self._model, spread_out(self._question.new, _STATISTICS))
            self.trace.old_end = _mean(self._losses(self._question.old))
            if self._question.held_out:
                judge = self._question.judge or self._question.loss
                held_out = self._losses(spread_out(self._question.held_out, JUDGED), judge)
                self.trace.looks.append((self.trace.steps, _mean(held_out)))
        return self.trace

    def close(self) -> None:
        """Nothing to stop: the copy is freed with the trial."""

    def _set_rate(self, share: float) -> None:
        if self._question.schedule is not None:
            factor = self._question.schedule(min(share, 1.0))
            for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = factor * rate

    def _begin_task(self, task: int) -> None:
        """Go on to a later task, with the remedy at its beginning; a learning rate is set once."""
        if not self._task < task < self.trace.tasks:
            return
        self._task, self._queue = task, []
        if "event" in self._parts and self._period is None and not isinstance(self._parts["event"], LearningRate):
            try:
                self._apply("event")
            except KeyboardInterrupt:
                raise
            except Exception as error:
                self._refuse(error)

    def _step(self) -> float:
        batches = self._question.later[self._task - 1] if self._task else self._question.new
        if not self._queue:
            self._queue = torch.randperm(len(batches), generator=self._order).tolist()
        for module in self._training:
            module.training = True
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        batch = batches[self._queue.pop()]
        with explained(self._model, batch):
            plain = self._question.loss(self._model, batch)
        try:
            term = self._parts["loss"].loss_term(self._model) if "loss" in self._parts else None
        except Exception as error:
            self._refuse(error)
            return math.nan
        (plain if term is None else plain + term).backward()
        self._check_learning()
        if self._question.clip is not None:
            trained = [p for each in self._optimizers for group in each.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, self._question.clip)
        try:
            if "backward" in self._parts:
                self._apply("backward")
            for optimizer in self._optimizers:
                optimizer.step()
            if "step" in self._parts:
                self._apply("step")
            if self._period is not None and (self.trace.steps + 1) % self._period == 0:
                self._apply("event")
        except KeyboardInterrupt:  # also one that a method has put its receipt on
            raise
        except Exception as error:
            if not self._parts:
                raise
            self._refuse(error)
        value = float(plain.detach())
        return value if math.isfinite(value) else math.inf

    def _apply(self, moment: Moment) -> None:
        method = self._parts[moment]
        more: dict[str, Any] = {"generator": self._draws} if isinstance(method, Remedy) or moment == "event" else {}
        if moment == "event":
            more |= {"batches": shown(method, self._question.new), "loss": self._question.loss}
        method(self._model, self._optimizers, **more)

    def _refuse(self, error: Exception) -> None:
        self.trace.error = f"{type(error).__name__}: {error}".splitlines()[0]

    def _check_learning(self) -> None:
        """Raise where the loss is one of another model: every candidate would then look the same."""
        if self.trace.steps == 0 and all(p.grad is None for p in self._model.parameters()):
            raise ValueError(
                "loss(model, batch) gave no parameter of the copy a gradient: it must compute with the model that it "
                "is given, not with one that it remembers, and the copy must not be frozen"
            )

    def _losses(self, batches: Sequence[Any], judge: Judge | None = None) -> list[float]:
        """The loss on each of a few batches, in evaluation mode."""
        judged = judge or self._question.loss
        with isolated(self._model), torch.no_grad():
            found = []
            for batch in spread_out(batches, _LOOKED_AT):
                with explained(self._model, batch):
                    found.append(float(judged(self._model, batch)))
        return [loss if math.isfinite(loss) else math.inf for loss in found]

    def _outputs(self) -> list[Tensor]:
        found: list[Tensor] = []
        with isolated(self._model), torch.no_grad(), suppress(Exception):  # a loss may call the model otherwise
            found = [output(self._model, batch).float() for batch in spread_out(self._question.new, _LOOKED_AT)]
        return found


def _period(event: Any) -> int | None:
    """Every how many steps a method acts that must have watched training before; None for one that acts at once."""
    if not getattr(event, "watches", False):
        return None
    if event.period is None:
        raise ValueError("it acts at later events, after it has watched the training between them: a trial has none")
    return int(event.period)


def spread_out(batches: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, from the first to the last: data may be sorted.

    >>> spread_out("abcdefghi", 3), spread_out("ab", 3)
    (['a', 'e', 'i'], ['a', 'b'])
    """
    if len(batches) <= most:
        return list(batches)
    return [batches[round(place * (len(batches) - 1) / (most - 1))] for place in range(most)]


def shown(method: Any, batches: Sequence[Any]) -> list[Any]:
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


def copied(question: Question) -> nn.Module:
    """A copy of the model that can be trained on its own."""
    model = unwrapped(question.model)
    if question.copy is not None:
        made = question.copy()
        if {id(p) for p in made.parameters()} & {id(p) for p in model.parameters()}:
            raise ValueError("copy() returned the model itself, or one that shares its parameters: it must copy them")
        found, wanted = (len(list(each.parameters())) for each in (made, model))
        if found != wanted:
            raise ValueError(f"copy() returned a model with {found} parameters, and the model has {wanted}")
        return made
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be deep-copied ({type(error).__name__}: {error}): pass copy=, a function "
            "that returns a copy of the model with its present weights"
        ) from error


def optimizers_like(
    optimizer: Any, twins: Mapping[Tensor, Tensor], *, state: bool = False
) -> list[torch.optim.Optimizer]:
    """Optimizers of the same classes and settings for other tensors, with or without their state.

    twins: the tensor that stands for each parameter; what the optimizers hold beside these is left out. Without an
    optimizer it is Adam with a rate of 1e-3.
    """
    given = unwrap(optimizer)
    if not given:
        return [torch.optim.Adam([twin for twin in twins.values() if twin.requires_grad], lr=1e-3)]
    made = []
    for one in given:
        if isinstance(one, torch.optim.LBFGS):
            raise ValueError("LBFGS computes the loss several times a step: give another optimizer=, such as Adam")
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": own}
            for group in one.param_groups
            if (own := [twins[p] for p in group["params"] if p in twins])
        ]
        if not groups:
            continue
        again: torch.optim.Optimizer = type(one)(groups, lr=groups[0].get("lr", 1e-3))  # type: ignore[call-arg]
        if state:
            _copy_state(one, again, twins)
        made.append(again)
    if not made:
        raise ValueError("the given optimizer holds none of the model's trainable parameters")
    return made


def _copy_state(one: torch.optim.Optimizer, again: torch.optim.Optimizer, twins: Mapping[Tensor, Tensor]) -> None:
    kept = one.state_dict()
    held = [p for group in one.param_groups for p in group["params"]]
    if all(p in twins for p in held):
        again.load_state_dict(copy.deepcopy(kept))
        return
    own = [place for place, p in enumerate(held) if p in twins]  # places count through all groups
    state = {new: kept["state"][old] for new, old in enumerate(own) if old in kept["state"]}
    again.load_state_dict(copy.deepcopy({"state": state, "param_groups": again.state_dict()["param_groups"]}))


def twins(model: nn.Module, other: nn.Module) -> dict[Tensor, Tensor]:
    """The parameters of a copy by those of the model."""
    return dict(zip(model.parameters(), other.parameters(), strict=True))


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
