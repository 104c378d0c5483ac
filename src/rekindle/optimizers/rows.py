"""The optimizer state of single neurons: rows and columns of a parameter are reset while the others are kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from rekindle.optimizers.live_slots import builds_when_empty, known_slots, stacked
from rekindle.optimizers.resetting import StateReset, check, held_by, reset, understood, unwrap
from rekindle.optimizers.slots import ONE_HISTORY, Slot

Index = Tensor | Iterable[int] | None


def reset_rows(
    optimizers: object,
    parameter: Parameter,
    rows: Index = None,
    columns: Index = None,
    *,
    row_dim: int = 0,
    column_dim: int = 1,
    second_moment: Literal["mean", "zero"] = "mean",
    name: str = "parameter",
) -> StateReset:
    """Reset the state of the given rows (along `row_dim`) and columns (along `column_dim`) of one parameter.

    rows, columns: indices or a boolean mask. First moments start over; second moments take the mean of the rows (or
    columns) that are not reset, or start over with `second_moment="zero"`; master copies take the new weights. The
    step count stays: Adam counts steps per parameter, so single rows cannot be fully reset, and with a zero
    second moment their next steps would be 3–6.5 times too large. LBFGS drops its whole history. Slots are counted
    once each, as in `reset`.

    >>> weight = torch.nn.Parameter(torch.ones(3, 2))
    >>> adam = torch.optim.Adam([weight])
    >>> (weight * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward(); adam.step()
    >>> reset_rows(adam, weight, rows=[0]).reset
    2
    >>> state = adam.state[weight]
    >>> state["exp_avg"][0].tolist(), bool((state["exp_avg_sq"][0] == state["exp_avg_sq"][1:].mean(0)).all())
    ([0.0, 0.0], True)
    """
    if second_moment not in ("mean", "zero"):
        raise ValueError(f"second_moment={second_moment!r} is neither 'mean' nor 'zero'")
    check(optimizers, {name: parameter}, "none")
    _check_rows(optimizers, name, parameter)
    places = [
        (dim, _positions(index, parameter, dim, name))
        for dim, index in ((row_dim, rows), (column_dim, columns))
        if index is not None
    ]
    places = [(dim, index) for dim, index in places if index.numel()]
    total = StateReset("rows")
    if not places:
        return total
    for optimizer in unwrap(optimizers):
        held = list(held_by(optimizer, {name: parameter}))
        if not held:
            continue
        if isinstance(optimizer, ONE_HISTORY):
            total += reset(optimizer, {name: parameter})
            continue
        state = optimizer.state.get(parameter, {})
        known = understood(optimizer, held[:1], known_slots(optimizer, held[:1]))[0]
        own = [(slot, start, state[key]) for key, (slot, start) in known.items()]
        own += stacked(optimizer, held[:1])[0].values()
        touched = masters = 0
        for slot, start, value in own:
            if value is not None and _reset_places(value, slot, start, parameter, places, second_moment):
                masters += slot.kind == "master"
                touched += slot.kind != "master"
        total += StateReset(
            "rows", (type(optimizer).__name__,), 1, len(own), touched, masters, without_state=int(not own)
        )
    return total


def _check_rows(optimizers: object, name: str, parameter: Parameter) -> None:
    for optimizer in unwrap(optimizers):
        held = list(held_by(optimizer, {name: parameter}))
        if isinstance(optimizer, ONE_HISTORY) or not held:
            continue
        if builds_when_empty(optimizer) and optimizer.state.get(parameter):
            raise ValueError(
                f"{type(optimizer).__name__} keeps the state of {name!r} in blocks that do not follow rows: single "
                "neurons cannot be reset there; train this layer with torch's own optimizer"
            )
        understood(optimizer, held, known_slots(optimizer, held))


def _positions(index: Index, parameter: Parameter, dim: int, name: str) -> Tensor:
    if not -parameter.ndim <= dim < parameter.ndim:
        raise ValueError(f"{name!r} of shape {tuple(parameter.shape)} has no dimension {dim}")
    size = parameter.shape[dim]
    places = torch.as_tensor(index if isinstance(index, Tensor) else list(index or ()), device=parameter.device)
    if places.dtype == torch.bool:
        if places.shape != (size,):
            raise ValueError(f"the mask for {name!r} has shape {tuple(places.shape)}, expected ({size},)")
        return places.nonzero().flatten()
    places = places.long()
    if places.numel():
        low, high = map(int, torch.aminmax(places))
        if low < 0 or high >= size:
            raise IndexError(f"{name!r} has {size} entries along dimension {dim}, indices go up to {high}")
    return places


def _reset_places(
    value: object,
    slot: Slot,
    start: Any,
    parameter: Parameter,
    places: list[tuple[int, Tensor]],
    second_moment: str,
) -> bool:
    if not isinstance(value, Tensor) or value.ndim != parameter.ndim or slot.kind == "count":
        return False
    done = False
    with torch.no_grad():
        for dim, index in places:
            if value.shape[dim] != parameter.shape[dim]:
                continue  # Adafactor's row and column factors have no such direction
            done = True
            if slot.kind in ("master", "average"):
                put_rows(value, dim, index, parameter.detach().index_select(dim, index).to(value.dtype))
            elif slot.kind == "second" and second_moment == "mean" and _leaves_some(index, value.shape[dim]):
                put_rows(value, dim, index, _living_mean(value, dim, index))
            else:
                put_rows(value, dim, index, 0.0 if start is None else start)
    return done


def put_rows(tensor: Tensor, dim: int, index: Tensor, value: Tensor | float) -> None:
    """Write rows (or columns, along `dim`) where they are others: a receipt names what differs, not what was written.

    >>> tensor = torch.zeros(2, 2)
    >>> put_rows(tensor, 0, torch.tensor([1]), 0.0); put_rows(tensor, 0, torch.tensor([0]), 1.0)
    >>> tensor, tensor._version
    (tensor([[1., 1.],
            [0., 0.]]), 1)
    """
    if bool((tensor.index_select(dim, index) != value).any()):
        if isinstance(value, Tensor):
            tensor.index_copy_(dim, index, value)
        else:
            tensor.index_fill_(dim, index, value)


def _leaves_some(index: Tensor, size: int) -> bool:
    return index.numel() < size or torch.unique(index).numel() < size


def _living_mean(value: Tensor, dim: int, index: Tensor) -> Tensor:
    living = torch.ones(value.shape[dim], dtype=torch.bool, device=value.device)
    living[index] = False
    mean = value.index_select(dim, living.nonzero().flatten()).mean(dim, keepdim=True)
    return mean.expand(*(index.numel() if d == dim % value.ndim else size for d, size in enumerate(value.shape)))
