"""The one roll-back: a copy of everything that a call may change, to be put back into the same objects.

Values, gradients, modules, hooks, optimizer state and what a method has gathered. `atomic=True`, a guard and a method
that means nothing half done all use it, through `Transaction`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rekindle.isolation import Kept, undone
from rekindle.optimizers import unwrap

Restore = Callable[[], None]


def snapshot(models: Iterable[nn.Module], optimizer: object = None, *others: object) -> Restore:
    """Copy models, optimizers and what a method has gathered (`others`); the result puts it all back, in place.

    >>> layer = nn.Linear(2, 2)
    >>> restore, weight = snapshot([layer]), layer.weight.clone()
    >>> _ = nn.init.zeros_(layer.weight), layer.register_forward_hook(print)
    >>> restore(); torch.equal(layer.weight, weight), len(layer._forward_hooks)
    (True, 0)
    """
    copies = _Copies()
    modules = {id(module): module for model in models for module in model.modules()}.values()
    parts = [copies.module(module) for module in modules]
    parts += [copies.optimizer(each) for each in unwrap(optimizer)]
    parts += [copies.of(other) for other in others]
    return _all_of(parts)


def snapshot_of(tensors: Iterable[Tensor], optimizer: object = None) -> Restore:
    """Copy these tensors alone, with their gradients and their slots in the optimizers.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> restore = snapshot_of([weight])
    >>> _ = nn.init.zeros_(weight)
    >>> restore(); weight.tolist()
    [1.0, 1.0]
    """
    copies, chosen = _Copies(), {id(tensor): tensor for tensor in tensors}
    parts = [copies.of(tensor) for tensor in chosen.values()]
    for each in unwrap(optimizer):
        touched = [group for group in each.param_groups if any(id(p) in chosen for p in group["params"])]
        parts += [copies.group(each, group, chosen) for group in touched]
    return _all_of(parts)


def _all_of(parts: Iterable[Callable[[], Any]]) -> Restore:
    held = list(parts)

    def restore() -> None:
        with torch.no_grad(), undone() as stack:  # one that fails does not keep the others from running
            for part in held:
                stack.callback(part)

    return restore


class _Copies:
    """Functions that return the same objects with their present contents; an object that occurs twice is kept once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}

    def of(self, value: object) -> Callable[[], Any]:
        if id(value) in self._seen or (not isinstance(value, _MUTABLE) and not _ours(value)):
            return lambda: value
        self._seen[id(value)] = value  # held, so that no other object gets this id
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.Generator):
            state = value.get_state()
            return lambda: value.set_state(state)
        if isinstance(value, dict):
            return self._mapping(value)
        if isinstance(value, list | deque):
            return self._sequence(value)
        if isinstance(value, nn.Module):
            return _all_of([self.module(module) for module in value.modules()])
        attributes = self._mapping(vars(value))

        def ours() -> object:
            attributes()
            return value

        return ours

    def module(self, module: nn.Module) -> Callable[[], Any]:
        """Its tensors, and everything that hangs on it: submodules, hooks, mode, attributes by reference."""
        self._seen[id(module)] = module
        tensors = [self.of(t) for table in (module._parameters, module._buffers) for t in table.values()]
        if isinstance(module, torch.jit.ScriptModule):
            return _all_of(tensors)
        attributes = dict(vars(module))
        tables = {name: dict(value) for name, value in attributes.items() if isinstance(value, dict)}

        def restore() -> None:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            for name, table in tables.items():
                attributes[name].clear()
                attributes[name].update(table)

        return _all_of([*tensors, restore])

    def optimizer(self, optimizer: Optimizer) -> Callable[[], Any]:
        """State and groups, and its hooks."""
        state = self.of(optimizer.state)
        hooks = {n: dict(v) for n, v in vars(optimizer).items() if isinstance(v, dict) and v is not optimizer.state}
        # The parameters themselves are kept with the model: only their places are kept here.
        groups = [
            (group, list(group["params"]), {key: self.of(value) for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ]

        def restore() -> None:
            optimizer.param_groups[:] = [group for group, _, _ in groups]
            for group, members, options in groups:
                places = group["params"]
                places[:] = members
                group.clear()
                group.update({"params": places, **{key: value() for key, value in options.items()}})
            for name, table in hooks.items():
                held = vars(optimizer)[name]
                held.clear()
                held.update(table)

        return _all_of([state, restore])

    def group(self, optimizer: Optimizer, group: dict[str, Any], chosen: Collection[int]) -> Callable[[], Any]:
        """The options of one group, and the state of those of its parameters that are chosen."""
        members = group["params"]
        # A stacked slot lies with the first parameter of its group, and so does LBFGS's history of all of them.
        owners = [p for number, p in enumerate(members) if id(p) in chosen or number == 0]
        states = {owner: self.of(optimizer.state[owner]) for owner in owners if owner in optimizer.state}
        options = {key: self.of(value) for key, value in group.items() if key != "params"}

        def restore() -> None:
            for owner in owners:
                if owner in states:
                    optimizer.state[owner] = states[owner]()
                else:
                    optimizer.state.pop(owner, None)
            group.clear()
            group.update({"params": members, **{key: value() for key, value in options.items()}})

        return restore

    def _tensor(self, tensor: Tensor) -> Callable[[], Tensor]:
        kept, trained, gradient, hooks = Kept(tensor), tensor.requires_grad, _gradient(tensor), _hooks(tensor)
        before = None if gradient is None else Kept(gradient)

        def restore() -> Tensor:
            kept.put_back()
            if tensor.is_leaf:
                tensor.requires_grad_(trained)
                tensor.grad = gradient
            if before is not None:
                before.put_back()
            for name, table in hooks.items():
                held = getattr(tensor, name)
                if held is not None:
                    held.clear()
                    held.update(table)
            return tensor

        return restore

    def _mapping(self, value: dict[Any, Any]) -> Callable[[], Any]:
        entries = {key: self.of(item) for key, item in value.items()}

        def restore() -> dict[Any, Any]:
            value.clear()
            value.update({key: entry() for key, entry in entries.items()})
            return value

        return restore

    def _sequence(self, value: list[Any] | deque[Any]) -> Callable[[], Any]:
        items = [self.of(item) for item in value]

        def restore() -> list[Any] | deque[Any]:
            value.clear()
            value.extend(item() for item in items)
            return value

        return restore


_MUTABLE = (Tensor, torch.Generator, dict, list, deque, nn.Module)


def _ours(value: object) -> bool:
    """Whether a method keeps something in this object; what others keep in theirs is not looked into."""
    return type(value).__module__.startswith("rekindle.") and hasattr(value, "__dict__")


def _gradient(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None


def _hooks(tensor: Tensor) -> dict[str, dict[Any, Any]]:
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return {name: dict(getattr(tensor, name, None) or {}) for name in names}
