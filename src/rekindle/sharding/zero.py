"""DeepSpeed ZeRO 1-3: float32 weights and optimizer state in parts, reached through DeepSpeed's public accessors.

`shown` puts stand-ins into the model during a call. Those of matrices have their shape and take no memory: what works
on them (`Assembly`) fetches one after the other to the rank that solves it. Vectors, a thousandth of a model, are
whole. `assembled` makes everything whole, for code that needs that; nothing is put back then if a rank has failed.

The optimizer to use inside is a stand-in too. ZeRO flattens each parameter group, so that an optimizer counts the steps
of a whole group: the stand-in reports that, and a count starts again only if the whole group does.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.blocks.names import PARTITION, partition_of
from rekindle.sharding.team import Team, held_by_zero

# Where ZeRO 3, 1 and 2, and the bf16 optimizer keep the parameters of each flat part, and the parts.
_PLACES = (
    ("fp16_groups", "fp32_partitioned_groups_flat"),
    ("bit16_groups", "single_partition_of_fp32_groups"),
    ("bf16_groups", "fp32_groups_flat_partition"),
)


class Partition:
    """One parameter that DeepSpeed holds in parts. Fetching and putting are collective."""

    def __init__(self, parameter: Any, team: Team) -> None:
        self.parameter, self.team = parameter, team
        self.shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        self._deepspeed: Any = importlib.import_module("deepspeed")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes that hold a part."""
        return self.team.ranks

    def fetch(self) -> Tensor:
        """The whole weight in float32, in its own memory."""
        whole: Tensor | None = self._deepspeed.utils.safe_get_full_fp32_param(self.parameter)
        if whole is None:  # frozen: there is no float32 copy
            with self._deepspeed.zero.GatheredParameters([self.parameter]):
                whole = self.parameter.detach().clone()
        return whole.detach().float().view(self.shape)

    def put(self, value: Tensor) -> None:
        """Write this rank's part of a weight, and the weight in the precision that the model computes in."""
        utils, parameter = self._deepspeed.utils, self.parameter
        if not hasattr(parameter, "ds_id"):
            utils.safe_set_full_fp32_param(parameter, value)
            with torch.no_grad():
                parameter.copy_(value)  # the accessor writes the float32 copy alone
            return
        if parameter.requires_grad:
            # safe_set_full_… cannot cut a weight whose size the ranks do not divide.
            utils.safe_set_local_fp32_param(parameter, self._part(value))
        with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(value)

    def slot(self, name: str) -> Tensor:
        """The whole of what the optimizer keeps under this name."""
        whole: Tensor = self._deepspeed.utils.safe_get_full_optimizer_state(self.parameter, name)
        return whole.detach().view(self.shape)

    def put_slot(self, name: str, value: Tensor | float) -> None:
        """Write this rank's part of a slot, or fill it with a number; without communication."""
        utils, parameter = self._deepspeed.utils, self.parameter
        if hasattr(parameter, "ds_id"):
            part = self._part(value) if isinstance(value, Tensor) else torch.full_like(self._own(), value)
            utils.safe_set_local_optimizer_state(parameter, part, name)
        else:
            whole = value if isinstance(value, Tensor) else torch.full(self.shape, value, device=parameter.device)
            utils.safe_set_full_optimizer_state(parameter, whole, name)

    def _own(self) -> Tensor:
        own: Tensor = self._deepspeed.utils.safe_get_local_fp32_param(self.parameter)
        return own

    def _part(self, whole: Tensor) -> Tensor:
        """This rank's part of a flat weight, the last one filled up with zeros."""
        size = self._own().numel()
        part = whole.flatten()[size * self.team.place : size * (self.team.place + 1)]
        return torch.cat([part, part.new_zeros(size - part.numel())]) if part.numel() < size else part


@dataclass
class _Twin:
    """What stands for one parameter in the model."""

    partition: Partition
    inside: nn.Parameter
    version: int = 0


@dataclass
class _Group:
    """One parameter group of the inner optimizer: its number, its parameters, and ZeRO's flat parts of them."""

    number: int
    parameters: list[Any] = field(default_factory=list)
    flats: list[Tensor] = field(default_factory=list)

    def state(self, inner: Any) -> dict[str, Any]:
        """What the optimizer keeps for the first part that has anything."""
        return next((inner.state[flat] for flat in self.flats if inner.state.get(flat)), {})

    def slots(self, inner: object) -> list[str]:
        """The names of what has a number for each weight."""
        return [name for name, held in self.state(inner).items() if isinstance(held, Tensor) and held.ndim]

    def counts(self, inner: object) -> dict[str, float]:
        """What has one number for the whole group."""
        slots = self.slots(inner)
        return {name: float(held) for name, held in self.state(inner).items() if name not in slots}


@contextmanager
def shown(model: nn.Module, optimizer: object = None) -> Iterator[Any]:
    """Inside, parameters show their shapes and can be fetched; the result stands for the optimizer."""
    with _stood_in(model, optimizer, whole=False) as inside:
        yield inside


@contextmanager
def assembled(model: nn.Module, optimizer: object = None) -> Iterator[Any]:
    """Inside, parameters are whole and in float32; the result stands for the optimizer, with the whole state.

    Everything is put back at the end, if no rank has failed.
    """
    with _stood_in(model, optimizer, whole=True) as inside:
        yield inside


@contextmanager
def _stood_in(model: nn.Module, optimizer: Any, *, whole: bool) -> Iterator[Any]:
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and held_by_zero(parameter)
    ]
    first = places[0][2]
    team = Team.of(torch.distributed.get_process_group_ranks(_process_group(first, optimizer)), str(first.device.type))
    twins: dict[int, _Twin] = {}
    for _, _, parameter in places:
        if id(parameter) not in twins:
            twins[id(parameter)] = _twin(Partition(parameter, team), whole)
    groups = [] if optimizer is None else _groups(optimizer)
    stand_in = None if optimizer is None else _stand_in(optimizer, groups, twins, whole)
    for module, name, parameter in places:
        module._parameters[name] = twins[id(parameter)].inside
    error: Exception | None = None
    try:
        yield stand_in
    except Exception as caught:
        error = caught
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
    failed = int(team.sum(torch.tensor([int(error is not None)])))
    if failed < team.size:
        team.agree(error)
    elif whole and error is not None:
        raise error
    for twin in twins.values():  # what was fetched is written already; a failure that all know of leaves a part
        if partition_of(twin.inside) is None and (whole or twin.inside._version != twin.version):
            twin.partition.put(twin.inside.detach())
    if stand_in is not None:
        _put_state(optimizer.optimizer, stand_in, groups, twins, whole)
    if error is not None:
        raise error


def _process_group(parameter: object, optimizer: object) -> Any:
    group = getattr(parameter, "ds_process_group", None) or getattr(optimizer, "dp_process_group", None)
    return group if group is not None else torch.distributed.group.WORLD


def _twin(partition: Partition, whole: bool) -> _Twin:
    trained = partition.parameter.requires_grad
    if whole or len(partition.shape) < 2:
        inside = nn.Parameter(partition.fetch(), requires_grad=trained)
        return _Twin(partition, inside, inside._version)
    inside = nn.Parameter(_hollow(partition, 1.0), requires_grad=trained)
    setattr(inside, PARTITION, partition)
    return _Twin(partition, inside)


def _hollow(partition: Partition, value: float) -> Tensor:
    """One number expanded to the shape of the parameter."""
    return torch.full((1,) * len(partition.shape), value, device=partition.parameter.device).expand(partition.shape)


def _groups(optimizer: Any) -> list[_Group]:
    names = next((pair for pair in _PLACES if all(hasattr(optimizer, name) for name in pair)), None)
    if names is None or getattr(optimizer, "optimizer", None) is None:
        raise TypeError(f"{type(optimizer).__name__} is not an optimizer of DeepSpeed ZeRO: pass engine.optimizer")
    parts = zip(*(getattr(optimizer, name) for name in names), strict=False)
    numbers = getattr(optimizer, "sub_group_to_group_id", None)
    found: dict[int, _Group] = {}
    for place, (parameters, flat) in enumerate(parts):
        number = place if numbers is None else numbers[place]
        group = found.setdefault(number, _Group(number))
        group.parameters += list(parameters)
        group.flats.append(flat)
        if numbers is None and optimizer.optimizer.state.get(flat):
            # DeepSpeed 0.19 links parameters with their state after the step of the first group, when later groups
            # have none yet: its accessors would find nothing there.
            utils: Any = importlib.import_module("deepspeed.utils")
            utils.lazy_init_hp_params_optimizer_state(parameters, flat, optimizer.optimizer.state)
    return list(found.values())


def _stand_in(optimizer: Any, groups: list[_Group], twins: dict[int, _Twin], whole: bool) -> object:
    """An optimizer of the inner class that holds the stand-ins, with the state that each has."""
    inner = optimizer.optimizer
    found = copy.copy(inner)
    found.param_groups, found.state = [], defaultdict(dict)
    for group in groups:
        members = [twins[id(parameter)] for parameter in group.parameters if id(parameter) in twins]
        options = {key: value for key, value in inner.param_groups[group.number].items() if key != "params"}
        counts = group.counts(inner)
        found.param_groups.append(
            {**options, **counts, "params": [twin.inside for twin in members], "shared_counts": tuple(counts)}
        )
        for twin in members:
            for name in group.slots(inner):
                found.state[twin.inside][name] = (
                    twin.partition.slot(name) if whole else _hollow(twin.partition, math.nan)
                )
    return found


def _put_state(inner: Any, stand_in: Any, groups: list[_Group], twins: dict[int, _Twin], whole: bool) -> None:
    for group, now in zip(groups, stand_in.param_groups, strict=True):
        for twin in (twins[id(parameter)] for parameter in group.parameters if id(parameter) in twins):
            for name in group.slots(inner):
                held = stand_in.state[twin.inside].get(name)
                if held is None:
                    twin.partition.put_slot(name, 0.0)
                elif whole:
                    twin.partition.put_slot(name, held)
                elif not math.isnan(started := held[(0,) * held.ndim].item()):
                    twin.partition.put_slot(name, started)
        for name, before in group.counts(inner).items():
            if now[name] != before:
                for state in (inner.state[flat] for flat in group.flats if inner.state.get(flat)):
                    held = state[name]
                    state[name] = held.fill_(now[name]) if isinstance(held, Tensor) else type(held)(now[name])
        options = inner.param_groups[group.number]
        options.update({k: now[k] for k, v in options.items() if isinstance(v, int | float) and now[k] != v})
