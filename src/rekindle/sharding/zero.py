"""DeepSpeed ZeRO 1-3: float32 weights and optimizer state in partitions, reached through DeepSpeed's accessors.

Every rank gets the whole float32 weights for a moment and puts its own partition back, so this is for models that fit.
Nothing is written before the work inside is done on all ranks. ZeRO counts optimizer steps per partition: what starts
the count of single parameters again cannot be put back and is refused.
"""

from __future__ import annotations

import copy
import importlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.sharding.team import RankError, Team, held_by_zero

Twins = dict[int, tuple[nn.Parameter, nn.Parameter]]


@contextmanager
def assembled(model: nn.Module, optimizer: Any = None) -> Iterator[Any]:
    """Inside, parameters are whole and in float32; the result stands for the optimizer, with the same state.

    Everything is put back at the end, if no rank has failed.
    """
    deepspeed: Any = importlib.import_module("deepspeed")
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and held_by_zero(parameter)
    ]
    team = Team.of(torch.distributed.get_process_group_ranks(_group(places[0][2], optimizer)), _device(places[0][2]))
    twins: Twins = {}
    for _, _, parameter in places:
        if id(parameter) not in twins:
            twin = nn.Parameter(_master(deepspeed, parameter), requires_grad=parameter.requires_grad)
            twins[id(parameter)] = parameter, twin
    stand_in = None if optimizer is None else _stand_in(deepspeed, optimizer, twins)
    for module, name, parameter in places:
        module._parameters[name] = twins[id(parameter)][1]
    error: Exception | None = None
    try:
        yield stand_in
        _check_counts(optimizer, stand_in)
    except Exception as caught:
        error = caught
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
    failed = int(team.sum(torch.tensor([int(error is not None)])))
    if error is not None:
        raise error
    if failed:
        raise RankError("another rank failed while the model was whole: nothing was put back")
    for parameter, twin in twins.values():
        _put_back(deepspeed, team, parameter, twin, {} if stand_in is None else stand_in.state.get(twin, {}), optimizer)


def _group(parameter: Any, optimizer: Any) -> Any:
    group = getattr(parameter, "ds_process_group", None) or getattr(optimizer, "dp_process_group", None)
    return group if group is not None else torch.distributed.group.WORLD


def _device(parameter: Tensor) -> str:
    return str(parameter.device.type)


def _master(deepspeed: Any, parameter: nn.Parameter) -> Tensor:
    whole: Tensor | None = deepspeed.utils.safe_get_full_fp32_param(parameter)
    if whole is None:  # frozen: there is no float32 copy
        with deepspeed.zero.GatheredParameters([parameter]):
            whole = parameter.detach().clone()
    return whole.detach().clone().view(_shape(parameter))


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _slots(optimizer: Any) -> dict[str, Any]:
    """What the inner optimizer keeps for a partition: its tensors, and the count of steps."""
    inner = getattr(optimizer, "optimizer", None)
    return dict(next((state for state in inner.state.values() if state), {})) if inner is not None else {}


def _stand_in(deepspeed: Any, optimizer: Any, twins: Twins) -> Any:
    """An optimizer of the inner class that holds the whole parameters with their whole state."""
    inner = getattr(optimizer, "optimizer", None)
    if inner is None:
        raise TypeError(f"{type(optimizer).__name__} is no optimizer of DeepSpeed ZeRO: pass engine.optimizer")
    found = copy.copy(inner)
    trained = [(parameter, twin) for parameter, twin in twins.values() if parameter.requires_grad]
    options = {key: value for key, value in inner.param_groups[0].items() if key != "params"}
    found.param_groups = [{**options, "params": [twin for _, twin in trained]}]
    found.state = defaultdict(dict)
    for name, value in _slots(optimizer).items():
        for parameter, twin in trained:
            if isinstance(value, Tensor) and value.numel() > 1:
                whole = deepspeed.utils.safe_get_full_optimizer_state(parameter, name)
                found.state[twin][name] = whole.detach().clone().view(twin.shape)
            else:
                found.state[twin][name] = value.clone() if isinstance(value, Tensor) else value
    return found


def _check_counts(optimizer: Any, stand_in: Any) -> None:
    shared = {k: v for k, v in _slots(optimizer).items() if not (isinstance(v, Tensor) and v.numel() > 1)}
    members = [] if stand_in is None else stand_in.param_groups[0]["params"]
    for name, value in shared.items():
        if any(name not in stand_in.state[twin] or stand_in.state[twin][name] != value for twin in members):
            raise ValueError(
                f"DeepSpeed ZeRO keeps one {name!r} for a whole partition, so it cannot start again for single "
                "parameters: pass optimizer_state='moments' or 'none'. Nothing was changed"
            )


def _put_back(
    deepspeed: Any, team: Team, parameter: Any, twin: nn.Parameter, state: dict[str, Any], optimizer: Any
) -> None:
    utils, value = deepspeed.utils, twin.detach()
    slots = {name: held for name, held in state.items() if isinstance(held, Tensor) and held.numel() > 1}
    slots |= {
        name: torch.zeros_like(value)
        for name, held in (_slots(optimizer) if optimizer is not None and parameter.requires_grad else {}).items()
        if isinstance(held, Tensor) and held.numel() > 1 and name not in slots
    }
    if not hasattr(parameter, "ds_id"):
        utils.safe_set_full_fp32_param(parameter, value)
        for name, held in slots.items():
            utils.safe_set_full_optimizer_state(parameter, held, name)
        with torch.no_grad():
            parameter.copy_(value)  # the accessor writes the float32 copy alone
        return
    if parameter.requires_grad:
        # safe_set_full_… cannot cut a weight whose size the ranks do not divide.
        own = utils.safe_get_local_fp32_param(parameter).numel()
        utils.safe_set_local_fp32_param(parameter, _part(value, own, team.place))
        for name, held in slots.items():
            utils.safe_set_local_optimizer_state(parameter, _part(held, own, team.place), name)
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.copy_(value)


def _part(whole: Tensor, size: int, place: int) -> Tensor:
    """This rank's part of a flat weight, the last one filled up with zeros."""
    part = whole.flatten()[size * place : size * (place + 1)]
    return torch.cat([part, part.new_zeros(size - part.numel())])
