"""Remedies that pull the weights all the time: a term of the loss, or a decoupled step of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rekindle.blocks.names import named_parameters
from rekindle.methods.remedy import Remedy
from rekindle.optimizers import StateReset
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.receipt import Batch, BlockRecord, Loss, Meter, Receipt


class Regulariser(Remedy):
    """coefficient · penalty(model), as a term of the loss (`loss_term`) or decoupled (`__call__`).

    The decoupled form is what AdamW is to Adam: after the optimizer's step, θ ← θ − lr·∇(coefficient·penalty), with
    the learning rate of the group that holds θ. Adaptive optimizers divide the gradient of a loss term by its own
    size, which makes the two forms differ (Loshchilov & Hutter, 2019).
    """

    def __init__(self, coefficient: float, *, decoupled: bool = False, seed: int = 0) -> None:
        if coefficient < 0:
            raise ValueError(f"coefficient={coefficient} must not be negative")
        super().__init__(seed=seed)
        self.coefficient, self.decoupled = coefficient, decoupled
        self.moment = "step" if decoupled else "loss"

    def penalty(self, model: nn.Module) -> Tensor:
        """The penalty itself, a scalar with gradient."""
        raise NotImplementedError

    def loss_term(self, model: nn.Module) -> Tensor:
        """What to add to the training loss."""
        return self.coefficient * self.penalty(model)

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """One decoupled step of the penalty."""
        meter = Meter()
        rates = learning_rates(optimizer)
        named = {n: p for n, p in named_parameters(model) if id(p) in rates and p.requires_grad}
        if not named:
            raise ValueError(
                f"{type(self).__name__} takes its step size from the optimizer, and none of the given optimizer's "
                "parameters is in the model: pass the optimizer that trains it"
            )
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.loss_term(model), list(named.values()), allow_unused=True)
        steps = {n: (p, g) for (n, p), g in zip(named.items(), gradients, strict=True) if g is not None}
        for name, (_, gradient) in steps.items():
            if not bool(torch.isfinite(gradient).all()):
                raise ValueError(f"the penalty's gradient for {name!r} is NaN or Inf; nothing was changed")
        records = []
        with torch.no_grad():
            for name, (parameter, gradient) in steps.items():
                parameter.sub_(gradient, alpha=rates[id(parameter)])
                moved = rates[id(parameter)] * gradient.norm().item()
                records.append(BlockRecord(name, sfe=moved**2, values={"moved": moved}))
        return Receipt(
            self.name,
            tuple(records),
            {n: "the penalty does not depend on it" for n in named if n not in steps},
            self.settings(),
            StateReset("none"),
            seconds=meter.seconds,
            memory=meter.memory,
        )


def learning_rates(optimizer: Any) -> Mapping[int, float]:
    """The learning rate of every parameter that the optimizers hold, by id."""
    rates = {}
    for each in optimizers.unwrap(optimizer):
        for group in each.param_groups:
            rates.update({id(parameter): float(group["lr"]) for parameter in group["params"]})
    return rates


def trainable(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Those that a penalty can move; none is an error."""
    found = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not found:
        raise ValueError("every targeted parameter is frozen: there is nothing to regularise")
    return found
