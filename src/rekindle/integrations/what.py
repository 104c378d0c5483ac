"""What is done when a method acts: the method on a model with its optimizers, mirrors, guard, batches and loss.

Events and methods that act in every step go the same way: mirrors follow, and a receipt says what changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rekindle.blocks.evidence import UNREAD, Facts, using
from rekindle.integrations import gradients
from rekindle.integrations.mirroring import Mirrors
from rekindle.isolation import Recorded, isolated, run_batch
from rekindle.methods.call import Call
from rekindle.methods.neurons import NeuronRemedy
from rekindle.methods.remedy import Moment, Remedy
from rekindle.monitoring.guard import Guard, watched
from rekindle.optimizers import unwrap
from rekindle.projection.method import Batch, Loss
from rekindle.projection.receipt import Receipt
from rekindle.projection.transaction import Transaction
from rekindle.recording import facts_of
from rekindle.recording.first_pass import FirstPass
from rekindle.recording.graph import Graph
from rekindle.sharding.replicas import average, by_first, everyone, replicated

Run = Callable[[nn.Module, Any], Any]
Given = Iterable[Batch] | Callable[[], Iterable[Batch]]


class What:
    """A method by its moments, and everything that it is given when it acts.

    parts: what acts at each moment. batches: data, or a function that returns them. run: `run(model, batch)` for a
    model that is not called as `model(batch)`.
    """

    def __init__(
        self,
        method: Any,
        parts: dict[Moment, Any],
        *,
        guard: Guard | None = None,
        mirrors: Mirrors,
        batches: Given | None = None,
        loss: Loss | None = None,
        run: Run | None = None,
    ) -> None:
        self.method, self.parts, self.guard, self.mirrors = method, parts, guard, mirrors
        self.batches, self.loss, self.run = batches, loss, run
        self.model: nn.Module | None = None
        self.optimizer: object = None
        self.sharded = False
        self.observing: Any = None
        self.also: tuple[nn.Module, ...] = ()  # what a trainer's callback changes after the model: an agent's targets
        self.called: nn.Module | None = None  # the model with its wrappers, as the loop calls it
        self._first: FirstPass | None = None
        self._graph: Graph | None = None
        self._known: tuple[int, Facts] | None = None
        self._added: set[int] = set()  # optimizers whose gradients hold the loss term already

    def bind(self, model: nn.Module, optimizer: Any, sharded: bool) -> None:
        """Training starts: find everything that can be wrong."""
        self.model, self.optimizer, self.sharded = model, optimizer, sharded
        self._added.clear()
        self.check()
        self.mirrors.check(model)
        if self.guard is not None:
            self.guard.measure(model)  # for its errors
        self._try_batches()

    def check(self) -> None:
        """Errors that would come when the method acts: when training starts, and when the optimizers have slots."""
        assert self.model is not None
        if isinstance(self.method, Remedy) and "event" in self.parts and not self.sharded:
            batches = () if callable(self.batches) else self.batches  # a function may have no data yet
            try:
                with using(self.model, self._facts):
                    self.method.check(Call(self.model, self.optimizer, batches, self.loss))
            except ValueError as error:
                if UNREAD not in str(error) or self._graph is not None:  # the first step shows what the source does not
                    raise

    def watch(self) -> None:
        """Let a method that gathers statistics while training do so."""
        watches = getattr(self.method, "watches", False)
        if hasattr(self.method, "observe") and (watches or self.batches is None):
            with replicated() if everyone().size > 1 else nullcontext():
                self.observing = self.method.observe(self.model)
        if self.model is not None and "event" in self.parts and not self.sharded and not watches:
            self._first = FirstPass(self.model, self._note, called=self.called)

    def _note(self, graph: Graph) -> None:
        self._graph = graph

    def _facts(self) -> Facts | None:
        """What the first training step showed; found when it is asked for."""
        if self._graph is None:
            return None
        size = len(self._graph.operations)
        if self._known is None or self._known[0] != size:  # another of its networks has run since
            self._known = size, facts_of(self._graph)
        return self._known[1]

    def written(self) -> tuple[nn.Module, ...]:
        """What changes when the method acts: the model first, then what follows it."""
        model = () if self.model is None else (self.model,)
        return tuple(dict.fromkeys((*model, *self.mirrors.modules(), *self.also)))

    def release(self) -> None:
        """Remove the hooks."""
        if self.observing is not None:
            self.observing.remove()
            self.observing = None
        if self._first is not None:
            self._first.remove()
        self._first = self._graph = self._known = None

    def event(self) -> Receipt:
        """Act at an event, on all ranks alike, by what the first step showed."""
        assert self.model is not None
        with using(self.model, self._facts):
            return self._event()

    def _event(self) -> Receipt:
        assert self.model is not None
        if everyone().size == 1 or self.sharded:
            return self._change()
        if self.observing is not None:
            state = self.method.state_dict()
            average(state)
            self.method.load_state_dict(state)
        receipt = by_first(self._change, self.written(), unwrap(self.optimizer))
        if self.observing is not None:
            self.method.load_state_dict(everyone().first(self.method.state_dict()))  # as the first has used them
        return receipt

    def after_step(self) -> Receipt:
        """Act after a step: on every rank; a foreign method that watches the data on rank 0."""
        assert self.model is not None
        together = everyone().size > 1 and not self.sharded
        if self.observing is not None and together and not isinstance(self.method, Remedy):
            optimizers = unwrap(self.optimizer)
            return by_first(lambda: self._follow("step"), self.written(), optimizers, lambda done: bool(done.records))
        return self._follow("step")

    def before_step(self, optimizer: Any, first: bool, alternating: bool) -> Receipt | None:
        """Act between backward pass and step: terms of the loss, then once per step what looks at gradients.

        Each optimizer gets the term for its own parameters when it steps: another's `zero_grad` and backward pass may
        come between (GANs). Where optimizers alternate, so does what looks at gradients.
        """
        assert self.model is not None
        if "loss" in self.parts and id(optimizer) not in self._added:
            gradients.add_term(self.parts["loss"], self.model, optimizer)
        self._added.discard(id(optimizer))
        if "backward" not in self.parts or not (first or alternating):
            return None
        with gradients.only_of(optimizer, self.model) if alternating else nullcontext():
            return self.call("backward")

    def add_terms(self, optimizers: Iterable[Any], scale: float) -> None:
        """Add the gradient of a loss term now, before clipping."""
        if "loss" in self.parts and self.model is not None:
            for optimizer in optimizers:
                gradients.add_term(self.parts["loss"], self.model, optimizer, scale)
                self._added.add(id(optimizer))

    def call(self, moment: Moment) -> Receipt:
        """The method itself.

        Events are applied on rank 0 alone; per-step remedies reduce statistics and random draws over the ranks. Shards
        are not copies: there the method itself makes the ranks agree.
        """
        method = self.parts[moment]
        everywhere = moment != "event" and everyone().size > 1 and not self.sharded and isinstance(method, Remedy)
        batches: Iterable[Batch] | None = () if moment != "event" else self.read()
        if not callable(self.batches) and self.run is None:
            batches = self.batches
        with replicated() if everywhere else nullcontext():
            receipt: Receipt = method(self.model, self.optimizer, batches=batches, loss=self.loss)
        return receipt

    def read(self) -> list[Batch]:
        """The batches of now, each with the way to run it."""
        given = self.batches() if callable(self.batches) else self.batches
        rows = [] if given is None else list(given)
        return rows if self.run is None else [Recorded((row,), {}, run=self.run) for row in rows]

    def _change(self) -> Receipt:
        assert self.model is not None
        follow = self.mirrors.before(self.model, self.optimizer)
        with watched(self.guard, "method", self.written(), self.optimizer, self.method) as transaction:
            receipt = transaction.settle(self.call("event"))
            return replace(receipt, mirrors=max(follow(), receipt.mirrors))

    def _follow(self, moment: Moment) -> Receipt:
        """A method of every step. New neurons are copied to mirrors; small changes move a mirror by as much."""
        assert self.model is not None
        if not self.mirrors:
            return self.call(moment)
        follow = self.mirrors.before(self.model, self.optimizer)
        with Transaction(getattr(self.method, "name", "method"), self.written(), self.optimizer):
            receipt = self.call(moment)
            if not receipt.records:
                return receipt
            members = getattr(self.parts[moment], "methods", (self.parts[moment],))
            moved = not any(isinstance(member, NeuronRemedy) for member in members)
            return replace(receipt, mirrors=max(follow(moved), receipt.mirrors))

    def _try_batches(self) -> None:
        """One pass on the first batch, for its errors; none while a function has no data yet."""
        if self.batches is None or self.model is None or self.sharded:
            return
        try:
            rows = self.read() if callable(self.batches) else None
        except Exception as error:
            raise ValueError(
                f"batches() failed when training started ({type(error).__name__}: {error}): return an empty list "
                "while there is no data"
            ) from error
        first = next(iter(rows if rows is not None else self.read()), None)
        if first is None:
            if not callable(self.batches):
                raise ValueError("batches is empty: the method would have nothing to measure")
            return
        if self.loss is not None and self.run is None:
            return  # the loss decides how a batch is run
        with isolated(self.model), torch.no_grad():
            run_batch(self.model, first, "batches")
