"""Several methods as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.methods.call import Call
from rekindle.methods.remedy import Batches, Moment, Observation, Remedy, moments
from rekindle.optimizers import StateReset
from rekindle.projection.method import Batch, Method
from rekindle.projection.receipt import Receipt

_MORE: tuple[Batches, ...] = ("none", "any", "all")


class Compose(Remedy):
    """Apply methods one after the other; one receipt holds what each did.

    Loss terms are added up; `observe` and `remember` reach every method that has them. Methods of different moments
    may be joined: `at(moment)` gives a trainer what belongs to each. A plain call applies what acts at events or after
    steps; a member that acts through the loss does so through `loss_term`, and one that acts between backward and step
    only through `at("backward")`.

    >>> from rekindle.methods import HeadReset, Rescale
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> Compose([Rescale(), HeadReset()])(model).changed
    ('0.weight', '2.weight', '2.bias')

    Args:
        methods: the methods, in the order in which they act.
    """

    name = "compose"
    sharded = True  # its members decide

    def __init__(self, methods: Sequence[Method]) -> None:
        if not methods:
            raise ValueError("Compose needs at least one method")
        super().__init__()
        self.methods = tuple(methods)
        for method in self.methods:
            if not callable(method):
                raise TypeError(f"Compose joins methods, and {method!r} cannot be called")
            if _moment(method) == "loss" and not hasattr(method, "loss_term"):
                raise TypeError(f"{method!r} acts through the loss but has no loss_term(model)")
        acting = {moment for method in self.methods for moment in moments(method)}
        self.moment = acting.pop() if len(acting) == 1 else "event"
        self.batches = max((getattr(method, "batches", "none") for method in self.methods), key=_MORE.index)
        self.watches = any(getattr(method, "watches", False) for method in self.methods)
        periods = {getattr(method, "period", None) for method in self.methods} - {None}
        self.period = periods.pop() if len(periods) == 1 else None

    def at(self, moment: Moment) -> Remedy | None:
        """Those that act at this moment, as one; None if there are none."""
        parts = [part for method in self.methods if (part := moments(method).get(moment)) is not None]
        if len(parts) == len(self.methods):
            return self
        return Compose(parts) if parts else None

    def check(self, call: Call) -> None:
        """Check every member."""
        for method in self.methods:
            if isinstance(method, Remedy):
                method.check(call)

    def resume(self, model: nn.Module) -> None:
        """Every member."""
        for method in self.methods:
            if isinstance(method, Remedy):
                method.resume(model)

    def apply(self, call: Call) -> Receipt:
        """Apply all that can be applied now, in order."""
        acting: Sequence[Method] = self.methods
        notes = []
        if self.moment == "event":
            if any("backward" in moments(method) for method in self.methods):
                raise ValueError(
                    'a member acts between backward and step, another does not: call compose.at("event") and '
                    'compose.at("backward") each at their moment'
                )
            acting = [method for method in self.methods if _moment(method) != "loss"]
            through = [getattr(m, "name", repr(m)) for m in self.methods if _moment(m) == "loss"]
            notes = [f"{name} acts through loss_term(model)" for name in through]
        self.check(call)  # before the first of them writes
        done = [
            method(call.model, call.optimizer, batches=call.batches, loss=call.loss, generator=call.given)
            for method in acting
        ]
        changed = {name for receipt in done for name in receipt.changed}
        total = StateReset(done[0].optimizer.policy if done[0].optimizer else "none")
        for receipt in done:
            total = total + receipt.optimizer if receipt.optimizer else total
        return Receipt(
            f"compose({', '.join(receipt.method for receipt in done)})",
            tuple(record for receipt in done for record in receipt.records),
            {n: r for receipt in done for n, r in receipt.skipped.items() if n not in changed},
            {receipt.method: receipt.settings for receipt in done},
            total,
            gradients_cleared=sum(receipt.gradients_cleared for receipt in done),
            biases_zeroed=sum(receipt.biases_zeroed for receipt in done),
            mirrors=max(receipt.mirrors for receipt in done),
            recalibrated=tuple(name for receipt in done for name in receipt.recalibrated),
            notes=(*notes, *(note for receipt in done for note in receipt.notes)),
        )

    def loss_term(self, model: nn.Module) -> Tensor:
        """The sum of the loss terms of those methods that act through the loss."""
        terms = [parts["loss"].loss_term(model) for parts in map(moments, self.methods) if "loss" in parts]
        return torch.stack(terms).sum() if terms else torch.zeros(())

    def remember(self, model: nn.Module) -> None:
        """Let every method that needs it store the start."""
        for method in self.methods:
            if hasattr(method, "remember"):
                method.remember(model)

    def observe(self, model: nn.Module, batches: Iterable[Batch] | None = None) -> Observation:
        """Let every method that can gather statistics do so."""
        return Observation(m.observe(model, batches) for m in self.methods if hasattr(m, "observe"))

    def settings(self) -> dict[str, Any]:
        """The methods, as text."""
        return {"methods": ", ".join(map(repr, self.methods))}

    def gathered(self) -> dict[str, Any]:
        """Each method's state."""
        return {"methods": [m.state_dict() if hasattr(m, "state_dict") else {} for m in self.methods]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give each method its state back."""
        for method, one in zip(self.methods, state["methods"], strict=True):
            if hasattr(method, "load_state_dict"):
                method.load_state_dict(one)


def _moment(method: Method) -> Moment:
    moment: Moment = getattr(method, "moment", "event")
    return moment
