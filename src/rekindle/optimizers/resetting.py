"""The state that an optimizer keeps for parameters that changed.

After a projection the moments in an optimizer belong to weights that no longer exist. `reset` starts the slots of the
changed parameters afresh, in place, so that their next step is the one a new optimizer would take, and does not touch
any other parameter's slots. `check` finds everything that could go wrong before anything is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from rekindle.optimizers.live_slots import can_drop, group_counts, known_slots, registered, stacked
from rekindle.optimizers.rehearsal import refusal
from rekindle.optimizers.slots import (
    MASTERS,
    ONE_HISTORY,
    Group,
    Held,
    Slot,
    register,
)
from rekindle.spelling import argument

__all__ = ["Policy", "StateReset", "check", "register", "reset", "unwrap"]

Policy = Literal["fresh", "moments", "step", "none"]
_WRAPPERS = {
    "AcceleratedOptimizer": "accelerate",
    "LightningOptimizer": "lightning",
    "_FabricOptimizer": "lightning",
}


@dataclass(frozen=True)
class StateReset:
    """What happened to the optimizer state of the changed parameters.

    `matched` counts the slots that these parameters had (an Adam parameter has three), `reset` those that were
    started afresh, `masters` the float32 copies of weights that were updated. `parameters` were found in the
    optimizers; `without_state` of them had not been stepped yet. `dropped` names optimizers whose one shared
    history (LBFGS) was dropped as a whole.

    >>> StateReset("fresh", ("AdamW",), parameters=2, matched=6, reset=6) + StateReset("fresh", ("SGD",))
    StateReset(policy='fresh', optimizers=('AdamW', 'SGD'), parameters=2, matched=6, reset=6, ...)
    """

    policy: str
    optimizers: tuple[str, ...] = ()
    parameters: int = 0
    matched: int = 0
    reset: int = 0
    masters: int = 0
    without_state: int = 0
    dropped: tuple[str, ...] = ()

    def __add__(self, other: StateReset) -> StateReset:
        return StateReset(
            self.policy,
            tuple(dict.fromkeys(self.optimizers + other.optimizers)),
            self.parameters + other.parameters,
            self.matched + other.matched,
            self.reset + other.reset,
            self.masters + other.masters,
            self.without_state + other.without_state,
            tuple(dict.fromkeys(self.dropped + other.dropped)),
        )

    def __str__(self) -> str:
        if self.policy == "none" or not self.optimizers:
            return "optimizer state left as it was"
        text = f"{self.reset} of {self.matched} slots of {self.parameters} parameters reset"
        if self.without_state:
            text += f" ({self.without_state} not stepped yet)"
        if self.masters:
            text += f", {self.masters} master copies updated"
        if self.dropped:
            text += f", the whole history of {', '.join(self.dropped)} dropped"
        return f"{text}, policy {self.policy!r}, {', '.join(self.optimizers)}"


@dataclass(frozen=True)
class Checked:
    """An optimizer whose state can be reset: the changed parameters that it holds, and what is known of their slots."""

    optimizer: Optimizer
    held: tuple[Held, ...]
    slots: Sequence[Mapping[str, tuple[Slot, Any]] | str]
    stacked: Sequence[Mapping[str, tuple[Slot, Any, Tensor]]]
    counts: Sequence[tuple[dict[str, Any], Mapping[str, float]]]
    drop: bool


def check(optimizers: object, parameters: Mapping[str, Parameter], policy: str = "fresh") -> list[Checked]:
    """Raise if `reset` with the same arguments could not be completed; write nothing. The result is for `start_over`.

    >>> weight, stray = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    >>> check(torch.optim.Adam([weight]), {"weight": weight, "stray": stray})
    Traceback (most recent call last):
    ValueError: 'stray' changes but is in none of the given optimizers (Adam)...
    """
    if policy not in get_args(Policy):
        raise ValueError(
            f"{argument('optimizer_state', policy)} is not one of {', '.join(map(repr, get_args(Policy)))}"
        )
    opened = unwrap(optimizers)
    members = {id(p) for optimizer in opened for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parameters.items() if opened else ():
        if parameter.requires_grad and id(parameter) not in members:
            classes = ", ".join(type(optimizer).__name__ for optimizer in opened)
            raise ValueError(
                f"{name!r} changes but is in none of the given optimizers ({classes}): pass the optimizer that "
                "trains it too (a list is accepted), or leave it out with exclude="
            )
    return [_checked(optimizer, parameters, policy) for optimizer in opened]


def reset(optimizers: object, parameters: Mapping[str, Parameter], *, policy: str = "fresh") -> StateReset:
    """Reset the slots of changed `parameters` (name → Parameter) in place, and count them.

    policy: "fresh" makes the next step that of a new optimizer with the same settings; "moments" forgets the
    gradients but keeps the step count (Adam then takes 3–6.5 times too large a step); "step" resets the count
    only; "none" leaves all. Master copies of weights are brought up to date whatever the policy.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> adam = torch.optim.Adam([weight])
    >>> weight.sum().backward(); adam.step()
    >>> reset(adam, {"weight": weight}).reset
    3
    >>> adam.state[weight]["step"].item()
    0.0
    """
    return start_over(check(optimizers, parameters, policy), parameters, policy)


def start_over(checked: Iterable[Checked], parameters: Mapping[str, Parameter], policy: str = "fresh") -> StateReset:
    """`reset` after its `check`, which was made before the first write; of what was checked, `parameters` changed."""
    changed = {id(parameter) for parameter in parameters.values()}
    total = StateReset(policy)
    for each in checked:
        label = type(each.optimizer).__name__
        members = [i for i, (_, parameter, _) in enumerate(each.held) if id(parameter) in changed]
        done = StateReset(policy, (label,), parameters=len(members))
        if isinstance(each.optimizer, ONE_HISTORY):
            done += _drop_history(each.optimizer, bool(members), policy, label)
        for i in members if each.slots else ():
            parameter, shared = each.held[i][1], each.stacked[i]
            state = each.optimizer.state.get(parameter)
            if shared:
                views = {name: view for name, (_, _, view) in shared.items()}
                starts = {name: (slot, start) for name, (slot, start, _) in shared.items()}
                done += _reset_one(views, parameter, starts, policy, False)
            if not shared or state:
                done += _reset_one(state, parameter, each.slots[i], policy, each.drop)
        for group, numbers in each.counts:
            if policy in ("fresh", "step") and _touched(group, changed):
                group.update(numbers)
        total += done
    return total


def held_by(optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> Iterator[Held]:
    """Those of the parameters that the optimizer holds, each with its group."""
    names = {id(parameter): name for name, parameter in reversed(list(parameters.items()))}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names:
                yield names[id(parameter)], parameter, group


def _touched(group: Group, changed: Collection[int]) -> bool:
    return any(id(parameter) in changed for parameter in group["params"])


def _checked(optimizer: Optimizer, parameters: Mapping[str, Parameter], policy: str) -> Checked:
    """What is known of one optimizer; an error where its state could not be reset."""
    checked = _resolved(optimizer, parameters, policy)
    if policy == "fresh" and _is_a_guess(optimizer):
        groups = {id(group): group for _, _, group in checked.held}.values()
        reason = next((why for group in groups if (why := refusal(optimizer, group, _reset_untried))), None)
        if reason is not None:
            label = type(optimizer).__name__
            raise ValueError(
                f"the state of {label} cannot be reset for some of its parameters: {reason}. Make a new {label} after "
                f"the change, or register how its slots start (rekindle.optimizers.register({label}, fresh={{...}})), "
                "or pass optimizer_state='none'"
            )
    return checked


def _is_a_guess(optimizer: Optimizer) -> bool:
    """Whether what is known of its slots comes from their names, and not from the table or from DeepSpeed."""
    shared = any(group.get("shared_counts") for group in optimizer.param_groups)
    return not shared and registered(optimizer) is None and not isinstance(optimizer, ONE_HISTORY)


def _reset_untried(optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> StateReset:
    return start_over([_resolved(optimizer, parameters, "fresh")], parameters)


def _resolved(optimizer: Optimizer, parameters: Mapping[str, Parameter], policy: str) -> Checked:
    held = tuple(held_by(optimizer, parameters))
    changed = {id(parameter) for parameter in parameters.values()}
    groups = [group for group in optimizer.param_groups if _touched(group, changed)]
    counts = [(group, found) for group in groups if (found := group_counts(optimizer, group))]
    if policy in ("fresh", "step"):
        for group, _ in counts:
            _check_group_counts(optimizer, group, changed)
    shared = stacked(optimizer, held, masters=policy == "none")
    drop = policy == "fresh" and can_drop(optimizer)
    slots: Sequence[Mapping[str, tuple[Slot, Any]] | str] = ()
    if not isinstance(optimizer, ONE_HISTORY):
        slots = [{} for _ in held] if drop else known_slots(optimizer, held)
        if policy != "none":
            understood(optimizer, held, slots)
    _check_fused_dampening(optimizer, parameters, policy)
    return Checked(optimizer, held, slots, shared, counts, drop)


def _check_group_counts(optimizer: Optimizer, group: Group, changed: Collection[int]) -> None:
    stepped = [p for p in group["params"] if optimizer.state.get(p)]
    kept = [p for p in stepped if id(p) not in changed]
    if kept and len(kept) < len(stepped):
        raise ValueError(
            f"{type(optimizer).__name__} counts steps per group, and {len(kept)} of the {len(stepped)} parameters "
            "of one group do not change: put the changed ones into a group of their own when making the "
            "optimizer, or pass optimizer_state='moments' or 'none'"
        )


def understood(
    optimizer: Optimizer, held: Sequence[Held], slots: Sequence[Mapping[str, tuple[Slot, Any]] | str]
) -> list[Mapping[str, tuple[Slot, Any]]]:
    """The slots of each parameter with their starts; an error where one is not known."""
    label = type(optimizer).__name__
    how = f"rekindle.optimizers.register({label}, fresh={{...}}) with the start value of each slot"
    found = []
    for (name, _, _), kept in zip(held, slots, strict=True):
        if isinstance(kept, str):
            if kept == label:
                raise ValueError(
                    f"how to reset the state of {label} for {name!r} is not known: call {how}, "
                    "or pass optimizer_state='none'"
                )
            raise ValueError(
                f"{label} keeps an unknown slot {kept!r} for {name!r}: call {how}, or pass optimizer_state='none'"
            )
        found.append(kept)
    return found


def _check_fused_dampening(optimizer: Optimizer, parameters: Mapping[str, Parameter], policy: str) -> None:
    if policy not in ("fresh", "moments") or not isinstance(optimizer, torch.optim.SGD):
        return
    changed = {id(parameter) for parameter in parameters.values()}
    for group in optimizer.param_groups:
        if not (group.get("fused") and group.get("dampening")):
            continue
        stepped = [p for p in group["params"] if optimizer.state.get(p, {}).get("momentum_buffer") is not None]
        touched = [p for p in stepped if id(p) in changed]
        if touched and len(touched) < len(stepped):
            # torch's fused SGD takes the buffers of a group as all there or all absent.
            raise ValueError(
                "SGD(fused=True, dampening≠0) cannot start some parameters of a group afresh and keep others: "
                "use foreach=True, put the changed parameters in a group of their own, or optimizer_state='none'"
            )


def _starts_over(slot: Slot, policy: str) -> bool:
    if policy == "fresh":
        return slot.kind != "master"
    return slot.kind in {"moments": ("moment", "second", "average"), "step": ("count",)}.get(policy, ())


def _reset_one(
    state: dict[str, Any] | None,
    parameter: Parameter,
    known: Mapping[str, tuple[Slot, Any]] | str,
    policy: str,
    drop: bool,
) -> StateReset:
    if not state:
        return StateReset(policy, without_state=1)
    if drop:
        matched = len(state)
        state.clear()
        return StateReset(policy, matched=matched, reset=matched)
    if isinstance(known, str):  # only policy "none" gets here
        known = {name: (Slot("master"), None) for name in state if name in MASTERS}
    matched = started = masters = 0
    with torch.no_grad():
        for name, (slot, start) in known.items():
            if state[name] is None:
                continue
            matched += 1
            if slot.kind == "master" or (slot.kind == "average" and policy == "moments"):
                state[name].copy_(parameter.detach())
                masters += slot.kind == "master"
                started += slot.kind == "average"
            elif _starts_over(slot, policy):
                _start(state, name, start)
                started += 1
    return StateReset(policy, matched=matched, reset=started, masters=masters)


def _start(state: dict[str, Any], name: str, start: Any) -> None:
    if start is None:
        del state[name]
    elif isinstance(state[name], Tensor):
        if not _holds(state[name], start):
            state[name].fill_(start)  # in place: a captured CUDA graph holds this very tensor
    else:
        state[name] = type(state[name])(start)


def _holds(value: Tensor, start: float) -> bool:
    """Whether nothing would change: a receipt names what differs. A GPU is not asked: the host would wait for it."""
    if value.device.type != "cpu" or not value.numel() or hasattr(value, "to_local"):
        return False
    return value.flatten()[0].item() == start and bool((value == start).all())


def _drop_history(optimizer: Optimizer, changed: bool, policy: str, label: str) -> StateReset:
    if policy == "none" or not changed:
        return StateReset(policy)
    matched = sum(len(state) for state in optimizer.state.values())
    for state in optimizer.state.values():
        state.clear()
    return StateReset(policy, matched=matched, reset=matched, dropped=(label,) if matched else ())


def unwrap(optimizers: Any) -> tuple[Optimizer, ...]:
    """The torch optimizers behind None, one optimizer, a list of them, and accelerate's and lightning's wrappers.

    >>> adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    >>> unwrap(None), unwrap([adam, adam]) == (adam,)
    ((), True)
    """
    if optimizers is None:
        return ()
    if type(optimizers).__module__.startswith("torch.optim."):  # no wrapper, and asked for at every step
        return (optimizers,)
    if isinstance(optimizers, Mapping):
        optimizers = list(optimizers.values())
    if isinstance(optimizers, Sequence) and not isinstance(optimizers, str | bytes):
        found = [inner for one in optimizers for inner in unwrap(one)]
        return tuple({id(one): one for one in found}.values())
    while any(
        cls.__module__.split(".")[0].startswith(_WRAPPERS.get(cls.__name__, "\0")) for cls in type(optimizers).__mro__
    ):
        optimizers = optimizers.optimizer
    if not hasattr(optimizers, "param_groups") or not hasattr(optimizers, "state"):
        raise TypeError(f"expected an optimizer or a list of them, got {type(optimizers).__name__}")
    return (optimizers,)
