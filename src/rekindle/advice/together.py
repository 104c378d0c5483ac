"""Trials of one seed that learn as one: they see the same batches, so that one pass serves all (`stacking`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rekindle.advice.stacking import Stack, Unstackable, architecture, signature
from rekindle.advice.trials import Trial
from rekindle.isolation import forked_rng

ALONE = 5  # first steps that each takes alone: they show whether the loss can be learned, and how long a step takes
_LARGEST = 1_000_000  # parameters of a network: larger ones keep a CPU busy alone, and all activations are held at once


def kind_of(trial: Any) -> Any:
    """What trials must have in common to learn as one; None for one that learns alone."""
    if not isinstance(trial, Trial) or trial.trace.error is not None or trial.trace.steps < ALONE:
        return None
    if sum(p.numel() for p in trial.model.parameters()) > _LARGEST:
        return None
    try:
        if len(trial.optimizers) == 1:
            return trial.seed, signature(trial.model, trial.optimizers[0])
    except Unstackable:
        pass  # each with its own optimizer, then
    try:
        return trial.seed, architecture(trial.model)
    except Unstackable:
        return None


class TrialStack:
    """Several trials of one kind; `advance` does for all what `Trial.advance` does for one."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials = list(trials)
        self._stack: Stack | None = self._made()

    def advance(self, steps: int, horizon: float = math.inf) -> None:
        """Train all `steps` more steps, then look at each."""
        first = self._trials[0]
        with forked_rng(first.noise, first.model):
            for _ in range(steps):
                self._step(horizon)
        for trial in self._trials:
            if trial.trace.error is None:
                trial.look(horizon)

    def _made(self) -> Stack:
        """A new stack, of which it is known that it computes what the models do."""
        trials, question = self._trials, self._trials[0].question
        models, optimizers = [trial.model for trial in trials], [trial.optimizers[0] for trial in trials]
        try:
            stack = Stack(models, optimizers, apart=[i for i, trial in enumerate(trials) if trial.changes_steps])
        except Unstackable:
            stack = Stack(models)  # each steps with its own optimizers
        for trial in trials:
            trial.train()
        with forked_rng(trials[0].noise, models[0]):
            stack.check(question.loss, question.new[0])
        return stack

    def _step(self, horizon: float) -> None:
        tasks = [trial.task for trial in self._trials]
        batches = [trial.prepare(horizon) for trial in self._trials]  # of one seed, so all the same
        going = [trial for trial in self._trials if trial.trace.error is None]
        if not going:
            return
        if [trial.task for trial in going] != tasks:
            self._trials = going  # a remedy was applied: weights may be other tensors
            try:
                self._stack = self._made()
            except Unstackable:
                self._stack = None
        if self._stack is None:
            for trial in going:
                trial.learn(batches[0])
        else:
            self._learn(self._stack, batches[0])

    def _learn(self, stack: Stack, batch: Any) -> None:
        question, together = self._trials[0].question, bool(stack.optimizers)
        stack.hide_gradients()
        losses = stack.losses(batch)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        for i, trial in enumerate(self._trials):
            if trial.changes_steps or not together:
                stack.show_gradients(i)
                trial.before_step()
        if question.clip is not None:
            stack.clip(question.clip)
        for trial in self._trials:
            trial.act("backward")
        if together:
            stack.step()
        for i, (trial, loss) in enumerate(zip(self._trials, losses.tolist(), strict=True)):
            if not together:
                for optimizer in trial.optimizers:
                    optimizer.step()
            trial.after_step(loss)
            if together and trial.changes_steps:
                stack.collect(i)
