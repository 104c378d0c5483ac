"""Gradients between the backward pass and the step: a loss term's, and those of one optimizer alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rekindle.methods.regularizers import Regularizer


def add_term(method: Any, model: nn.Module, optimizer: Optimizer, scale: float = 1.0) -> None:
    """Add the gradient of a method's loss term to what an optimizer holds.

    Once per step, whatever accumulation and loss scaling do to the loss.

    >>> from rekindle.methods import L2Init
    >>> layer, penalty = nn.Linear(1, 1), L2Init(0.5)
    >>> penalty.remember(layer)
    >>> with torch.no_grad():
    ...     _ = layer.weight.add_(1)
    >>> add_term(penalty, layer, torch.optim.SGD(layer.parameters()))
    >>> layer.weight.grad.item() > 0
    True
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not parameters:
        return
    if isinstance(method, Regularizer):
        gradients, factor = method.gradients(model, parameters)
    else:
        with torch.enable_grad():
            gradients, factor = torch.autograd.grad(method.loss_term(model), parameters, allow_unused=True), 1.0
    old, more = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient * (factor * scale)
        else:
            old.append(parameter.grad)
            more.append(gradient)
    if old:
        torch._foreach_add_(old, more, alpha=factor * scale)


@contextmanager
def only_of(optimizer: Optimizer, model: nn.Module) -> Iterator[None]:
    """The gradients of this optimizer's parameters alone; those of others are back afterwards."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [p for p in model.parameters() if id(p) not in own]
    stale = [p.grad for p in others]
    for parameter in others:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(others, stale, strict=True):
            parameter.grad = gradient
