"""Trials that learn as one (`stacking`): one pass and one optimizer step serve all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rekindle.advice.stacked_layers import Unstackable
from rekindle.advice.stacking import Stack, architecture, signature
from rekindle.advice.trials import Trial, shapes
from rekindle.isolation import forked_rng

ALONE = 5  # first steps that each takes alone: they show whether the loss can be learned, and how long a step takes
_LARGEST = 1_000_000  # parameters of a network: larger ones keep a CPU busy alone, and all activations are held at once
_LARGE = 200_000  # parameters of a network that fills a CPU with the candidates of one seed


def kind_of(trial: Any) -> Any:
    """What trials must have in common to learn as one; None for one that learns alone."""
    if not isinstance(trial, Trial) or trial.trace.error is not None or trial.trace.steps < ALONE:
        return None
    if (size := sum(p.numel() for p in trial.model.parameters())) > _LARGEST:
        return None
    # Of several seeds only where their batches have the same shapes at every step.
    seed = trial.seed if size > _LARGE or not trial.question.in_step else None
    try:
        if len(trial.optimizers) == 1:
            return seed, signature(trial.model, trial.optimizers[0])
    except Unstackable:
        pass  # each with its own optimizer, then
    try:
        return seed, architecture(trial.model)
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
            alike = [batch for batch in question.new if shapes(batch) == shapes(question.new[0])]
            places = sorted({trial.seed for trial in trials})
            stack.check(question.loss, [alike[places.index(trial.seed) % len(alike)] for trial in trials])
        return stack

    def _step(self, horizon: float) -> None:
        tasks = [trial.task for trial in self._trials]
        batches = [trial.prepare(horizon) for trial in self._trials]
        going = [trial for trial in self._trials if trial.trace.error is None]
        if not going:
            return
        if [trial.task for trial in going] != tasks:
            batches = [batch for trial, batch in zip(self._trials, batches, strict=True) if trial in going]
            self._trials = going  # a remedy was applied: weights may be other tensors
            try:
                self._stack = self._made()
            except Unstackable:
                self._stack = None
        if self._stack is None:
            for trial, batch in zip(going, batches, strict=True):
                trial.learn(batch)
        else:
            self._learn(self._stack, batches)

    def _learn(self, stack: Stack, batches: Sequence[Any]) -> None:
        question, together = self._trials[0].question, bool(stack.optimizers)
        stack.hide_gradients()
        losses = stack.losses(batches)
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
