"""What a live optimizer holds for its parameters, and what each of it starts from: the table of `slots`, asked."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from rekindle.optimizers.slots import COMMON, GROUP_COUNTS, MASTERS, SLOTS, Group, Held, Slot, by_structure


def group_counts(optimizer: Optimizer, group: Group) -> dict[str, float]:
    """The step counts that a group keeps for all its parameters, with their starts; none for torch's own classes.

    Only where they matter: a moment alone (Lion, Muon) starts over without them, a second moment is corrected by them.
    Under DeepSpeed ZeRO every class has such counts, which the group names (`shared_counts`).
    """
    if group.get("shared_counts"):
        table = {**COMMON, **(registered(optimizer) or {})}
        return {name: _begin(table[name], optimizer, group) for name in group["shared_counts"]}
    if registered(optimizer) is not None or builds_when_empty(optimizer):
        return {}
    options = inspect.signature(type(optimizer).__init__).parameters  # what the constructor takes is no count
    names = [name for name in GROUP_COUNTS if name not in options and isinstance(group.get(name), (int, float))]
    counts = {name: GROUP_COUNTS[name] for name in names}
    if not counts.keys() & {"step", "k"}:
        return {}
    kept = {name for parameter in group["params"] for name in optimizer.state.get(parameter, {})}
    alone = all(name in COMMON and COMMON[name].kind in ("moment", "count") for name in kept)
    return {} if alone else counts


def builds_when_empty(optimizer: Optimizer) -> bool:
    """Whether a parameter's state may be dropped, to be built anew at its next step: the classes of bitsandbytes."""
    return _comes_from(optimizer, "bitsandbytes", "Optimizer8bit")


def can_drop(optimizer: Optimizer) -> bool:
    """Whether a fresh state is one that is not there; for a group, once all its parameters are known to change.

    The latter are the classes of pytorch_optimizer, without those that estimate the learning rate (d): that estimate
    belongs to all groups.
    """
    rates = any("d" in group or "d0" in group for group in optimizer.param_groups)
    grouped = _comes_from(optimizer, "pytorch_optimizer", "BaseOptimizer") and not rates
    return grouped or builds_when_empty(optimizer)


def _comes_from(optimizer: Optimizer, package: str, base: str) -> bool:
    return any(cls.__name__ == base and cls.__module__.startswith(f"{package}.") for cls in type(optimizer).__mro__)


def registered(optimizer: Optimizer) -> Mapping[str, Slot] | None:
    """The slots of its class in the table, None where the class is not there."""
    return next((SLOTS[cls] for cls in type(optimizer).__mro__ if cls in SLOTS), None)


def slots(optimizer: Optimizer, parameter: Parameter) -> Mapping[str, Slot]:
    """What each entry of `parameter`'s state in `optimizer` is; KeyError where that is not known.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> sgd = torch.optim.SGD([weight], momentum=0.9)
    >>> weight.sum().backward(); sgd.step()
    >>> slots(sgd, weight)["momentum_buffer"].kind
    'moment'
    """
    known = registered(optimizer)
    if known is None:
        return by_structure(optimizer, parameter)
    table = {**MASTERS, **known}
    return {name: table[name] for name in optimizer.state.get(parameter, {}) if not table[name].stacked}


def known_slots(optimizer: Optimizer, held: Iterable[Held]) -> list[Mapping[str, tuple[Slot, Any]] | str]:
    """For each of these parameters: slot name → (what it is, what it starts from), or the name that is not understood.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> sgd = torch.optim.SGD([weight], momentum=0.9)
    >>> weight.sum().backward(); sgd.step()
    >>> known_slots(sgd, [("weight", weight, sgd.param_groups[0])])
    [{'momentum_buffer': (Slot(kind='moment', ...), 0.0)}]
    """
    found: list[Mapping[str, tuple[Slot, Any]] | str] = []
    for _, parameter, group in held:
        try:
            kept = slots(optimizer, parameter)
            if not optimizer.state.get(parameter):
                slots(optimizer, group["params"][0])  # it may hold the state of the whole group in an unregistered way
        except KeyError as error:
            found.append(str(error.args[0]))
        else:
            found.append({name: (slot, _begin(slot, optimizer, group)) for name, slot in kept.items()})
    return found


def stacked(
    optimizer: Optimizer, held: Iterable[Held], *, masters: bool = False
) -> list[dict[str, tuple[Slot, Any, Tensor]]]:
    """For each of these parameters its stacked slots: what each is, where it starts, and a view of what it holds.

    ValueError where there is not one entry per parameter.

    masters: only copies of the weight.
    """
    known = registered(optimizer) or {}
    wanted = {name: slot for name, slot in known.items() if slot.stacked and (slot.kind == "master" or not masters)}
    return [_views(optimizer, parameter, group, wanted) if wanted else {} for _, parameter, group in held]


def _views(
    optimizer: Optimizer, parameter: Parameter, group: Group, wanted: Mapping[str, Slot]
) -> dict[str, tuple[Slot, Any, Tensor]]:
    members = group["params"]
    state = optimizer.state.get(members[0], {})
    place = next(number for number, member in enumerate(members) if member is parameter)
    found = {}
    for name, slot in wanted.items():
        value = state.get(name)
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != len(members):
            held = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{type(optimizer).__name__} is registered with a stacked slot {name!r}, which must have one entry for "
                f"each of the {len(members)} parameters of its group, and it is {held}: pass optimizer_state='none'"
            )
        found[name] = slot, _begin(slot, optimizer, group), value[place]
    return found


def _begin(slot: Slot, optimizer: Optimizer, group: Group) -> Any:
    """What a slot starts from for a parameter of this group."""
    return slot.start(optimizer, group) if callable(slot.start) else slot.start
