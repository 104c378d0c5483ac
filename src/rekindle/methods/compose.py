"""Several methods as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.methods.neurons import Observation
from rekindle.methods.remedy import Moment, Remedy
from rekindle.optimizers import StateReset
from rekindle.projection.receipt import Batch, Loss, Meter, Method, Receipt


class Compose(Remedy):
    """Apply methods one after the other; one receipt holds what each did.

    Its moment is theirs where they agree. Loss terms are added up; `observe` and `remember` reach every method that
    has them.

    >>> from rekindle.methods import HeadReset, Rescale
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> Compose([Rescale(), HeadReset()])(model).changed
    ('0.weight', '2.weight', '2.bias')
    """

    name = "compose"

    def __init__(self, methods: Sequence[Method]) -> None:
        if not methods:
            raise ValueError("Compose needs at least one method")
        super().__init__()
        self.methods = tuple(methods)
        moments: set[Moment] = {getattr(method, "moment", "event") for method in methods}
        self.moment = moments.pop() if len(moments) == 1 else "event"

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Apply all, in order."""
        meter = Meter()
        done = [m(model, optimizer, batches=batches, loss=loss, generator=generator) for m in self.methods]
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
            seconds=meter.seconds,
            memory=meter.memory,
            notes=tuple(note for receipt in done for note in receipt.notes),
        )

    def loss_term(self, model: nn.Module) -> Tensor:
        """The sum of the loss terms of those methods that have one."""
        terms = [m.loss_term(model) for m in self.methods if hasattr(m, "loss_term")]
        return torch.stack(terms).sum() if terms else torch.zeros(())

    def remember(self, model: nn.Module) -> None:
        """Let every method that needs it store the start."""
        for method in self.methods:
            if hasattr(method, "remember"):
                method.remember(model)

    def observe(self, model: nn.Module, batches: Iterable[Batch] | None = None) -> Observation:
        """Let every method that can gather statistics do so."""
        return Observation([m.observe(model, batches) for m in self.methods if hasattr(m, "observe")])

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
