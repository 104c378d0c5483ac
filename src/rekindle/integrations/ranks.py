"""Several processes that train one model: every rank must end up with the same weights.

Copies (DDP): events are applied on rank 0 and broadcast with buffers and optimizer state, so that all ranks hold the
same result bit for bit, whatever a method measures or draws. Statistics that a method gathered are averaged first.
Methods that act in every step run on every rank if they need no statistics, else on rank 0 with those of rank 0.
Shards (FSDP2, tensor parallel): no rank has the whole model, so every rank calls the method, which must support shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rekindle.blocks.names import is_sharded
from rekindle.methods.remedy import Remedy
from rekindle.optimizers import unwrap
from rekindle.projection.receipt import Receipt
from rekindle.sharding.team import refuse_hidden, refuse_shards, settle


def world() -> int:
    """How many processes train together.

    >>> world()
    1
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def first() -> bool:
    """Whether this process is the one that decides and logs."""
    return world() == 1 or dist.get_rank() == 0


def sharded(model: nn.Module) -> bool:
    """Whether parameters of the model are held in shards (DTensor), so that every rank has to call the method.

    >>> sharded(nn.Linear(1, 1))
    False
    """
    settle(model)
    return any(is_sharded(parameter) for parameter in model.parameters())


def refuse(model: nn.Module, optimizer: Any, method: Any) -> None:
    """Raise where shards are hidden (FSDP1, DeepSpeed, ZeRO), or where the method does not work on them.

    >>> refuse(nn.Linear(1, 1), None, None)
    """
    refuse_hidden(model)
    given = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    for each in given:
        inner = getattr(each, "optimizer", each)
        if any(_sharding(kind) for kind in (type(each), type(inner))):
            raise NotImplementedError(
                f"{type(each).__name__} holds its state in shards that cannot be reset here: train with DDP or "
                "fully_shard; with DeepSpeed call rekindle.fire(engine, engine.optimizer, optimizer_state='moments') "
                "between two steps yourself"
            )
    if sharded(model):
        for member in _members(method):
            if isinstance(member, Remedy) and not member.sharded:
                refuse_shards(model, type(member).__name__, member.needs)


def _members(method: Any) -> Iterator[Any]:
    joined = getattr(method, "methods", None)
    if joined is None:
        yield method
    else:
        for member in joined:
            yield from _members(member)


def _sharding(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "deepspeed" or kind.__name__ in (
        "DeepSpeedOptimizerWrapper",
        "ZeroRedundancyOptimizer",
    )


def agreed(reason: str | None) -> str | None:
    """The reason that rank 0 has to act now, or None: metrics may differ between ranks, decisions may not."""
    if world() == 1:
        return reason
    flag = torch.tensor([0 if reason is None else 1], device=_device())
    dist.broadcast(flag, 0)
    if not int(flag):
        return None
    return str(_same(reason))


def together(
    call: Callable[[], Receipt], modules: Sequence[nn.Module], optimizer: Any, *, rarely: bool = False
) -> Receipt:
    """Run `call` on rank 0, then give every rank its result; an error on rank 0 is raised on all.

    rarely: send nothing if the receipt says that nothing was changed, for a method that is called in every step.
    """
    before = [_names(module) for module in modules]
    done: Receipt | None = None
    error: Exception | None = None
    if first():
        try:
            done = call()
        except Exception as problem:
            error = problem
    failed = _same(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if failed is not None:
        raise RuntimeError(f"the method failed on rank 0: {failed}")
    if rarely and not _same(done is not None and bool(done.records)):
        return done or Receipt("nothing changed")
    moved = _same([_names(module) for module in modules] != before)
    if moved:
        raise RuntimeError("the method replaced modules of the model, which DDP cannot follow: build DDP anew after it")
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            _broadcast(tensor)
    for each in unwrap(optimizer):
        _broadcast_state(each)
    if not first():
        for module in modules:
            for parameter in module.parameters():
                parameter.grad = None  # as on rank 0: it belongs to weights that are gone
    receipt: Receipt = _same(done)
    return receipt


def copy_statistics(method: Any) -> None:
    """Copy a method's statistics from rank 0, the only rank that used them, to all ranks."""
    state = _same(method.state_dict())
    if not first():
        method.load_state_dict(state)


@torch.no_grad()
def average_statistics(method: Any) -> None:
    """Make what a method has gathered the same on all ranks: the mean over them."""
    state = method.state_dict()
    for tensor in _floats(state):
        moved = tensor.to(_device()).contiguous()
        dist.all_reduce(moved)
        tensor.copy_(moved / world())
    method.load_state_dict(state)


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for key in value:
            yield from _floats(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)


def _names(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]


@torch.no_grad()
def _broadcast(tensor: Tensor) -> None:
    moved = tensor.detach().to(_device()).contiguous()
    dist.broadcast(moved, 0)
    if not first():
        tensor.copy_(moved)


def _broadcast_state(optimizer: Any) -> None:
    """Slot by slot; what is not a tensor, or is inside lists (LBFGS), is sent as an object."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    layout = _same([{key: _describe(v) for key, v in optimizer.state.get(p, {}).items()} for p in held])
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
            _broadcast(state[key])


def _describe(value: Any) -> tuple[bool, Any]:
    if isinstance(value, Tensor):
        return True, (tuple(value.shape), value.dtype, value.device.type == "cpu")
    return False, value


def _same(value: Any) -> Any:
    """The value of rank 0, on all ranks."""
    box = [value if first() else None]
    dist.broadcast_object_list(box, 0, device=_device())
    return box[0]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
