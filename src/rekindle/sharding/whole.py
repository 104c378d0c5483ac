"""A sharded model gathered temporarily, for code that draws or resets whole parameters.

This is for everything that does not work on shards: every rank holds the whole model inside, so it is for models that
fit. `rekindle.fire` and `rekindle.health` do not need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rekindle.blocks.names import is_sharded
from rekindle.sharding.spread import Spread
from rekindle.sharding.team import local, partitioned, settle
from rekindle.sharding.zero import assembled


@contextmanager
def gathered(model: nn.Module, optimizer: object = None) -> Iterator[Any]:
    """Inside, sharded parameters of the model and their optimizer state are ordinary tensors; afterwards shards again.

    Shards are those of DTensor and of DeepSpeed ZeRO. The result is the optimizer to use inside: under ZeRO another
    one, which holds the whole state, else the given one.

    Every process must enter, and do the same inside: a method draws the same numbers everywhere if it was made with the
    same seed. Forward passes are not possible inside, because FSDP2 and tensor parallel exchange parameters there.
    `optimizer` is one torch optimizer or a list of them.

    >>> layer = nn.Linear(2, 2)
    >>> with gathered(layer):
    ...     print(type(layer.weight).__name__)
    Parameter
    """
    if partitioned(model):
        watch = model.register_forward_pre_hook(_no_forward, prepend=True)
        try:
            with assembled(model, optimizer) as inside:
                yield inside
        finally:
            watch.remove()
        return
    settle(model)
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    twins: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and is_sharded(parameter):
                if id(parameter) not in twins:
                    twins[id(parameter)] = (parameter, _twin(parameter))
                places.append((module, name, parameter))
    barred = model.register_forward_pre_hook(_no_forward, prepend=True) if twins else None
    optimizers = [each for each in optimizers if each is not None]
    kept = [_swap_state(each, twins) for each in optimizers]
    for module, name, parameter in places:
        module._parameters[name] = twins[id(parameter)][1]
    try:
        yield optimizer
    finally:
        if barred is not None:
            barred.remove()
        for module, name, parameter in places:
            module._parameters[name] = parameter
        with torch.no_grad():
            for parameter, twin in twins.values():
                _put_back(parameter, twin)
                if twin.grad is None:
                    parameter.grad = None
                elif parameter.grad is not None:
                    _put_back(parameter.grad, twin.grad)
        for each, states in zip(optimizers, kept, strict=True):
            _restore_state(each, twins, states)


def _twin(parameter: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(_whole(parameter.detach()), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        twin.grad = _whole(parameter.grad)
    return twin


def _whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full.clone()  # a copy placement would hand out the shard itself


def _put_back(parameter: Tensor, whole: Tensor) -> None:
    spread = Spread.of(parameter)
    own = local(parameter)
    for piece in spread.pieces(torch.distributed.get_rank(), tuple((0, size) for size in spread.shape)):
        own[piece.local] = whole.detach()[piece.inside].to(own.dtype)


def _swap_state(optimizer: Optimizer, twins: dict[int, tuple[nn.Parameter, nn.Parameter]]) -> dict[int, dict[str, Any]]:
    states: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        group["params"] = [twins[id(p)][1] if id(p) in twins else p for p in group["params"]]
    for key, (parameter, twin) in twins.items():
        if parameter in optimizer.state:
            states[key] = optimizer.state.pop(parameter)
            whole = {name: _whole(v) if isinstance(v, Tensor) else v for name, v in states[key].items()}
            optimizer.state[twin] = whole
    return states


def _restore_state(
    optimizer: Optimizer, twins: dict[int, tuple[nn.Parameter, nn.Parameter]], states: dict[int, dict[str, Any]]
) -> None:
    back = {id(twin): parameter for parameter, twin in twins.values()}
    for group in optimizer.param_groups:
        group["params"] = [back.get(id(p), p) for p in group["params"]]
    for key, (parameter, twin) in twins.items():
        whole = optimizer.state.pop(twin, None)
        if whole is None:
            continue
        state = states.get(key, {})
        for name in [name for name in state if name not in whole]:
            del state[name]
        for name, value in whole.items():
            old = state.get(name)
            if isinstance(old, Tensor) and is_sharded(old):
                _put_back(old, value)
            elif isinstance(old, Tensor) and isinstance(value, Tensor):
                old.copy_(value)
            else:
                state[name] = value
        optimizer.state[parameter] = state


def _no_forward(module: nn.Module, args: object) -> None:
    raise RuntimeError(
        "inside rekindle.sharding.gathered() a forward pass is not possible: what needs batches goes through a plain "
        "copy of the model that is loaded from get_model_state_dict(..., full_state_dict=True)"
    )
