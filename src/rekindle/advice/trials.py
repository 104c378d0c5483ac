"""Trials: copies of a model, each with another remedy, that learn the same new data side by side.

A trial can pause and continue, so that poor candidates can be dropped early; `executors` says where trials run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rekindle.advice.candidates import Candidate
from rekindle.advice.tasks import output
from rekindle.blocks.names import unwrapped
from rekindle.isolation import Loss, forked_rng, isolated
from rekindle.optimizers import unwrap
from rekindle.projection.recalibration import recalibrate

_FIRST_STEPS = 4
_LOOKED_AT = 8  # batches for the loss before and after
_SHOWN = 20  # batches that a method is applied with
_STATISTICS = 4  # batches that BatchNorm's statistics are estimated from before a look
_JUDGED = 4  # held-out batches per look


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
        self.trace = Trace()
        self._question, self._method = question, candidate.method
        self._order = torch.Generator().manual_seed(seed)
        self._noise = torch.Generator().manual_seed(seed + 1)
        self._queue: list[int] = []
        self._model = copied(question)
        self._optimizers = optimizers_like(question.optimizer, unwrapped(question.model), self._model, state=True)
        self._rates = [[_base(group) for group in each.param_groups] for each in self._optimizers]
        self._moment = getattr(candidate.method, "moment", "event")
        before, at_first, old = self._outputs(), self._losses(question.new), self._losses(question.old)
        self.trace.old_before = _mean(old)
        if self._method is not None and self._moment == "event":
            try:
                self._method(
                    self._model,
                    self._optimizers,
                    batches=shown(self._method, question.new),
                    loss=question.loss,
                    generator=torch.Generator().manual_seed(seed),
                )
            except (ValueError, RuntimeError, NotImplementedError) as error:
                self.trace.error = f"{type(error).__name__}: {error}".splitlines()[0]
                return
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
                    self.trace.losses.append(self._step())
            if self._question.held_out or self._question.old:
                # After a strong remedy running statistics lag behind the weights for longer than a short trial.
                recalibrate(self._model, self._question.new[:_STATISTICS])
            self.trace.old_end = _mean(self._losses(self._question.old))
            if self._question.held_out:
                judge = self._question.judge or self._question.loss
                held_out = self._losses(self._question.held_out[:_JUDGED], judge)
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

    def _step(self) -> float:
        if not self._queue:
            self._queue = torch.randperm(len(self._question.new), generator=self._order).tolist()
        self._model.train()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        plain = self._question.loss(self._model, self._question.new[self._queue.pop()])
        loss = plain
        if self._moment == "loss":
            loss = plain + self._method.loss_term(self._model)  # type: ignore[union-attr]
        loss.backward()  # type: ignore[no-untyped-call]
        if self._question.clip is not None:
            trained = [p for each in self._optimizers for group in each.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, self._question.clip)
        if self._moment == "backward":
            self._method(self._model, self._optimizers)  # type: ignore[misc]
        for optimizer in self._optimizers:
            optimizer.step()
        if self._moment == "step":
            self._method(self._model, self._optimizers)  # type: ignore[misc]
        value = float(plain.detach())
        return value if math.isfinite(value) else math.inf

    def _losses(self, batches: Sequence[Any], judge: Judge | None = None) -> list[float]:
        """The loss on each of the first batches, in evaluation mode."""
        judged = judge or self._question.loss
        with isolated(self._model), torch.no_grad():
            found = [float(judged(self._model, batch)) for batch in batches[:_LOOKED_AT]]
        return [loss if math.isfinite(loss) else math.inf for loss in found]

    def _outputs(self) -> list[Tensor]:
        found: list[Tensor] = []
        with isolated(self._model), torch.no_grad(), suppress(ValueError, TypeError):
            found = [output(self._model, batch).float() for batch in self._question.new[:_LOOKED_AT]]
        return found


def shown(method: Any, batches: Sequence[Any]) -> list[Any]:
    """What a method is applied with: the first batches, as one where it wants all examples at once.

    >>> class All:
    ...     batches = "all"
    >>> [batch[0].shape for batch in shown(All(), [(torch.zeros(2, 3), torch.zeros(2))] * 2)]
    [torch.Size([4, 3])]
    """
    first = list(batches[:_SHOWN])
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
    if question.copy is not None:
        return question.copy()
    model = unwrapped(question.model)
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be deep-copied ({type(error).__name__}: {error}): pass copy=, a function "
            "that returns a copy of the model with its present weights"
        ) from error


def optimizers_like(optimizer: Any, model: nn.Module, other: nn.Module, *, state: bool) -> list[torch.optim.Optimizer]:
    """Optimizers of the same classes and settings for the parameters of `other`, with or without their state."""
    given = unwrap(optimizer)
    if not given:
        return [torch.optim.Adam([p for p in other.parameters() if p.requires_grad], lr=1e-3)]
    twin = dict(zip(map(id, model.parameters()), other.parameters(), strict=True))
    made = []
    for one in given:
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [twin[id(p)] for p in group["params"]]}
            for group in one.param_groups
        ]
        again: torch.optim.Optimizer = type(one)(groups, lr=groups[0].get("lr", 1e-3))  # type: ignore[call-arg]
        if state:
            again.load_state_dict(copy.deepcopy(one.state_dict()))
        made.append(again)
    return made


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
            there, here = (functional.log_softmax(t.flatten(0, -2).double(), -1) for t in (new, old))
            found.append(max(0.0, float(functional.kl_div(there, here, log_target=True, reduction="batchmean"))))
        else:
            found.append(float((new - old).square().sum() / old.square().sum().clamp_min(1e-12)))
    return found
