"""Copies of one model on several processes (DDP): one decision for all, and the same weights after it.

A method on replicas sums statistics and takes random numbers from the first process (`replicas`, `replicated`).
Trainers apply events on the first process alone and copy its result bit for bit (`by_first`), whatever a method
measures or draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rekindle.blocks.names import wrapped
from rekindle.sharding.team import SOLO, Team, device_of, is_a

T = TypeVar("T")
_given: ContextVar[Team | None] = ContextVar("replicas", default=None)


def everyone() -> Team:
    """All processes that train together.

    >>> everyone().size, everyone().leads
    (1, True)
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return SOLO
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return Team(tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD, device)


@contextmanager
def replicated(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Inside, bare models count as replicas over this process group (by default all processes), as within DDP.

    For trainers that pass a method the module inside their wrapper. Every process must make the same calls.
    """
    token = _given.set(everyone() if group is None else _team(group, everyone().device))
    try:
        yield
    finally:
        _given.reset(token)


def replicas(model: nn.Module) -> Team:
    """The processes of a DDP wrapper around the model; this process alone without one.

    >>> replicas(nn.Linear(1, 1)).size
    1
    """
    given = _given.get()
    if given is not None:
        return given
    if not dist.is_available() or not dist.is_initialized():
        return SOLO
    inside: Any = model
    while inside is not None:
        if is_a(inside, "DistributedDataParallel"):
            return _team(inside.process_group, device_of(next(inside.parameters())))
        inside = wrapped(inside)
    return SOLO


def by_first(
    call: Callable[[], T],
    modules: Sequence[nn.Module],
    optimizers: Sequence[Any],
    acted: Callable[[T], bool] | None = None,
) -> T:
    """Run `call` on the first of all processes, then give every process its result; its error is raised on all.

    modules, optimizers: what it changes, which is copied.
    acted: says of the result whether anything was changed; if not, nothing is copied.
    """
    team, before = everyone(), [_shapes(module) for module in modules]
    done: T | None = None
    error: Exception | None = None
    if team.leads:
        try:
            done = call()
        except Exception as problem:
            error = problem
    failed = team.first(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if failed is not None:
        raise RuntimeError(f"the method failed on rank 0: {failed}")
    result = team.first(cast("T", done))
    if acted is not None and not acted(result):
        return result
    if team.first([_shapes(module) for module in modules] != before):
        raise RuntimeError("the method replaced modules of the model, which DDP cannot follow: build DDP anew after it")
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            team.copy(tensor)
    for optimizer in optimizers:
        _copy_state(team, optimizer)
    if not team.leads:
        for module in modules:
            for parameter in module.parameters():
                parameter.grad = None  # as on the first: it belongs to weights that are gone
    return result


@torch.no_grad()
def average(value: object) -> None:
    """Replace every floating tensor inside dicts and lists by its mean over all processes."""
    team = everyone()
    if isinstance(value, Tensor) and value.is_floating_point():
        value.copy_(team.sum(value.clone()) / team.size)
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            average(inner)


def _team(group: dist.ProcessGroup | None, device: str) -> Team:
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    return Team(ranks, dist.get_rank(), group, device) if len(ranks) > 1 else SOLO


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]


def _copy_state(team: Team, optimizer: torch.optim.Optimizer) -> None:
    """Slot by slot; what is not a tensor, or is inside lists (LBFGS), is sent as an object."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    layout = team.first([{key: _described(v) for key, v in optimizer.state.get(p, {}).items()} for p in held])
    for parameter, entries in zip(held, layout, strict=True):
        if not entries and parameter not in optimizer.state:
            continue
        state = optimizer.state[parameter]
        for key in [key for key in state if key not in entries]:
            del state[key]
        for key, (is_tensor, what) in entries.items():
            if not is_tensor:
                state[key] = what
                continue
            shape, dtype, on_host = what
            own = state.get(key)
            if not isinstance(own, Tensor) or tuple(own.shape) != shape or own.dtype != dtype:
                state[key] = torch.empty(shape, dtype=dtype, device="cpu" if on_host else parameter.device)
            team.copy(state[key])


def _described(value: object) -> tuple[bool, Any]:
    if isinstance(value, Tensor):
        return True, (tuple(value.shape), value.dtype, value.device.type == "cpu")
    return False, value
