"""Copies of optimizer state, so that a change can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from rekindle.optimizers.resetting import held_by, unwrap
from rekindle.optimizers.slots import ONE_HISTORY


def snapshot(optimizers: Any, parameters: Mapping[str, Parameter]) -> Callable[[], None]:
    """Copy the slots of `parameters`; calling the result puts them back into the same tensors.

    >>> import torch
    >>> from rekindle.optimizers import reset
    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> sgd = torch.optim.SGD([weight], momentum=0.9)
    >>> weight.sum().backward(); sgd.step()
    >>> restore = snapshot(sgd, {"weight": weight})
    >>> _ = reset(sgd, {"weight": weight})
    >>> restore()
    >>> sgd.state[weight]["momentum_buffer"].sum().item()
    4.0
    """
    kept: list[tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]] = []
    for optimizer in unwrap(optimizers):
        owners = [parameter for _, parameter, _ in held_by(optimizer, parameters)]
        # Stacked slots are in the state of the first parameter of a group.
        leaders = {id(group["params"][0]): group["params"][0] for _, _, group in held_by(optimizer, parameters)}
        owners += [leader for key, leader in leaders.items() if not any(id(owner) == key for owner in owners)]
        if owners and isinstance(optimizer, ONE_HISTORY):
            owners = list(optimizer.state)
        for owner in owners:
            state = optimizer.state.get(owner)
            if state:
                copies = {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
                kept.append((state, dict(state), copies))

    def restore() -> None:
        for state, entries, copies in kept:
            state.clear()
            state.update(entries)
            for key, copy in copies.items():
                state[key].copy_(copy)

    return restore
