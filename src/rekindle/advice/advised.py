"""A method that calls `advise` first: candidates are tried on copies, and the best one is applied.

It works wherever methods do: in schedules, trainers and the lab.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from rekindle.advice.advising import Advice, advise
from rekindle.advice.candidates import acting_at_once
from rekindle.advice.copies import optimizers_like, twins
from rekindle.isolation import random_states_kept
from rekindle.methods.call import Call
from rekindle.methods.remedy import Remedy
from rekindle.projection.method import Method
from rekindle.projection.receipt import Receipt


class Advised(Remedy):
    """Apply what `rekindle.advise` recommends on the batches of the call, which may be nothing.

    `last` is the advice that was followed; its sentence is the first note of the receipt.

    >>> import torch
    >>> from torch import nn
    >>> from rekindle.methods import FIRE
    >>> net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> data = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(4)]
    >>> receipt = Advised(steps=20, candidates=[FIRE()])(net, batches=data)
    >>> receipt.method in ("fire", "nothing"), receipt.notes[0].startswith("advised: ")
    (True, True)

    Args:
        steps: how far ahead to look, as for `rekindle.advise`.
        budget: how long it may take, in seconds or as "2m".
        candidates: the methods to try, as for `rekindle.advise`.
        otherwise: the candidate that is taken where trials cannot tell.
        seeds: how many trials each candidate gets.
        held_out: the share of the batches that candidates are judged on instead of trained on.
        new_optimizer: training goes on with a new optimizer, so that candidates are tried with one.
        workers: processes at once.
        seed: what its own random numbers start from.
    """

    name = "advised"
    batches = "any"

    def __init__(
        self,
        *,
        steps: int | None = None,
        budget: float | str = "2m",
        candidates: Mapping[str, Method | None] | Iterable[Method] | None = None,
        otherwise: str | None = None,
        seeds: int = 3,
        held_out: float = 0.0,
        new_optimizer: bool = False,
        workers: int | None = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(seed=seed)
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out={held_out} is a share of the batches, from 0 up to 1")
        self.steps, self.budget, self.seeds, self.workers = steps, budget, seeds, workers
        self.held_out, self.new_optimizer, self.otherwise = held_out, new_optimizer, otherwise
        self._candidates = acting_at_once(candidates)
        self.last: Advice | None = None

    def remember(self, model: nn.Module) -> None:
        """Keep the first weights for the candidates that go back to them (shrink-and-perturb)."""
        methods: Iterable[Any] = (self._candidates or {}).values()
        for method in methods:
            if hasattr(method, "remember"):
                method.remember(model)

    def apply(self, call: Call) -> Receipt:
        """Call `advise`, and apply its choice."""
        if call.replicas.size > 1:
            raise ValueError(
                "Advised decides by trials, which differ from process to process: give it to rekindle.attach or to a "
                "trainer's callback, which let the first process decide for all"
            )
        with random_states_kept():  # a loader draws its order from the global states
            batches = [] if call.batches is None else list(call.batches)
        judged = round(self.held_out * len(batches))
        if len(batches) <= judged:
            raise ValueError("Advised needs batches of what is to be learned: give batches= with the call")
        optimizer = call.optimizer
        if self.new_optimizer and optimizer is not None:
            optimizer = _begun_anew(optimizers_like(optimizer, twins(call.inner, call.inner)))
        advice = advise(
            call.inner,
            batches[judged:],
            held_out=batches[:judged],
            loss=call.loss,
            optimizer=optimizer,
            candidates=self._candidates,
            otherwise=self.otherwise,
            epochs=None,
            steps=self.steps,
            budget=self.budget,
            seeds=self.seeds,
            workers=self.workers,
            progress=False,
        )
        self.last = replace(advice, tried_with=((), None))  # the data need not live until the next call
        receipt = advice.apply(call.model, call.optimizer, generator=call.generator)
        return replace(receipt, notes=(f"advised: {advice.sentence}", *receipt.notes))


def _begun_anew(optimizers: Any) -> object:
    """A new optimizer with the initial learning rate of its schedule, where there is one."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"])
    return optimizers
