"""Changing whole parameters: choose them, check everything, write in place, tidy the optimizer, account for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rekindle.blocks.finding import find
from rekindle.blocks.names import named_buffers, named_parameters
from rekindle.optimizers import StateReset
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.receipt import BlockRecord, Meter, Receipt
from rekindle.projection.targets import Targets, choose


def chosen(model: nn.Module, targets: Targets) -> dict[str, Parameter]:
    """The parameters that `targets` mean, by clean name, each once.

    "everything" is every parameter, "trainable" those that are trained; anything else is chosen among the weight
    matrices as in `rekindle.plan`.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    >>> len(chosen(model, "everything")), list(chosen(model, "auto"))
    (6, ['0.weight'])
    """
    named = dict(named_parameters(model))
    if isinstance(targets, str) and targets in ("everything", "trainable"):
        found = {n: p for n, p in named.items() if targets == "everything" or p.requires_grad}
        if not found:
            raise ValueError(f"targets={targets!r}: the model has no such parameter")
        return found
    keys = dict(model.named_parameters(remove_duplicate=False))
    return {c.found.name: keys[c.found.key] for c in choose(find(model), targets) if c.reason is None}


def check_values(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> None:
    """Raise unless every new value fits and both it and what it replaces are finite."""
    for name, value in new.items():
        if value.shape != old[name].shape:
            raise ValueError(f"{name!r}: the new value has shape {tuple(value.shape)}, not {tuple(old[name].shape)}")
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name!r} would become NaN or Inf; nothing was changed")


def overwrite(
    method: str,
    model: nn.Module,
    new: Mapping[str, Tensor],
    optimizer: Any = None,
    *,
    policy: str = "fresh",
    buffers: Mapping[str, Tensor] | None = None,
    settings: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] = (),
    counts: Mapping[str, Mapping[str, int]] | None = None,
    skipped: Mapping[str, str] | None = None,
    meter: Meter | None = None,
) -> Receipt:
    """Write new values (by clean name) into parameters and buffers, after checking all of them."""
    meter = meter or Meter()
    parameters = {name: p for name, p in named_parameters(model) if name in new}
    own_buffers = dict(named_buffers(model))
    buffers = buffers or {}
    check_values(new, parameters)
    check_values(buffers, own_buffers)
    optimizers.check(optimizer, parameters, policy)
    records = []
    with torch.no_grad():
        for name, value in new.items():
            records.append(record(name, parameters[name], value, (counts or {}).get(name, {})))
            parameters[name].copy_(value)
        for name, value in buffers.items():
            own_buffers[name].copy_(value)
    notes = (*notes, f"{len(buffers)} buffers restored") if buffers else notes
    return Receipt(
        method,
        tuple(records),
        {**left_alone(model, new), **(skipped or {})},
        settings or {},
        optimizers.reset(optimizer, parameters, policy=policy) if optimizer is not None else StateReset("none"),
        gradients_cleared=clear_gradients(parameters.values()),
        seconds=meter.seconds,
        memory=meter.memory,
        notes=notes,
    )


def left_alone(model: nn.Module, changed: Collection[str]) -> dict[str, str]:
    """Every other parameter, with the one reason that it was not among the targets."""
    names = (name for name, _ in named_parameters(model))
    return {name: "not among the targets" for name in names if name not in changed}


def record(name: str, old: Tensor, new: Tensor, counts: Mapping[str, int]) -> BlockRecord:
    """One line of a receipt about a whole parameter."""
    before, after = old.detach().double(), new.detach().double()
    norm, error = before.norm(), (before - after).square().sum()
    return BlockRecord(
        name,
        out=old.shape[0] if old.ndim > 1 else 0,
        in_=old[0].numel() if old.ndim > 1 else 0,
        sfe=float(error),
        sfe_relative=float(error / norm.square()) if norm > 0 else None,
        norm_before=float(norm),
        norm_after=float(after.norm()),
        counts=counts,
    )


def clear_gradients(parameters: Collection[Parameter] | Any) -> int:
    """Drop gradients that belong to weights that are gone; how many there were."""
    stale = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in stale:
        parameter.grad = None
    return len(stale)
