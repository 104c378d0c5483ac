"""Plasticity injection: a new head beside the old one, without changing the output."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rekindle import initial
from rekindle.blocks.finding import find
from rekindle.blocks.layers import as_layer
from rekindle.blocks.names import unwrapped, wrapped
from rekindle.isolation import forked_rng
from rekindle.methods.call import Call
from rekindle.methods.remedy import Remedy
from rekindle.methods.writing import clear_gradients
from rekindle.optimizers import StateReset
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.receipt import BlockRecord, Receipt

# Wrappers that count or split the parameters once, when the model is wrapped: new ones would not be trained.
_CLOSED = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


class InjectedHead(nn.Module):
    """old(x) + new(x) − minus(x): old and minus frozen, new and minus equal at first."""

    def __init__(self, old: nn.Module, new: nn.Module) -> None:
        super().__init__()
        self.old, self.new, self.minus = old, new, copy.deepcopy(new)
        for frozen in (self.old, self.minus):
            frozen.requires_grad_(False)

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """The sum; the difference first, so that it is exactly zero at the moment of injection."""
        gained = self.new(*args, **kwargs) - self.minus(*args, **kwargs)
        total: Tensor = gained + self.old(*args, **kwargs)
        return total


class PlasticityInjection(Remedy):
    """h(x) ← h_old(x) + h_new(x) − h_minus(x), h_new fresh and trained, the others frozen (Nikishin et al., 2023).

    `head` names the module (a Linear or a whole Sequential); by default it is the output head as in `rekindle.plan`.
    Name one of several layers, as the paper's: for a single linear layer the sum is one matrix again with the same
    gradient, and nothing is injected but a new optimizer state (the receipt says so).
    The new parameters join the optimizer in a group with the settings of the group that trains the old head. A
    later injection first merges a linear head back into one matrix, and keeps anything else as a wider head;
    `merge(model, optimizer)` does so at any time. A head that is tied to an embedding is untied: the old one is a
    frozen copy, and the embedding stays trainable. DDP and sharding wrappers know only the parameters that they were
    made with, so that a wrapped model is refused: inject first, wrap again.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> before = model(torch.ones(1, 2))
    >>> receipt = PlasticityInjection()(model, sgd)
    >>> torch.equal(before, model(torch.ones(1, 2))), len(sgd.param_groups)
    (True, 2)

    Args:
        head: the name of the module that is injected into; the output layer by default.
        fresh: a function that returns a new model, where modules' own schemes are not how the model starts.
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "plasticity-injection"
    needs = "modules"
    atomic = True

    def __init__(self, head: str | None = None, *, fresh: Callable[[], nn.Module] | None = None, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.head = head
        self._fresh = fresh

    def path(self, model: nn.Module) -> str:
        """The name of the module that is the head; an error where there are several and none was named."""
        return self.head if self.head is not None else _head(unwrapped(model))

    def apply(self, call: Call) -> Receipt:
        """Inject; the output does not change."""
        _check_open(call.model)
        inner, optimizer = call.inner, call.optimizer
        path = self.path(inner)
        present = _module(inner, path)
        group = _trained_by(optimizer, present)
        notes = []
        if isinstance(present, InjectedHead):
            if _is_linear(present):
                self.merge(call.model, optimizer)
                present, group = _module(inner, path), _trained_by(optimizer, _module(inner, path))
                notes.append("the earlier injection was merged into one matrix")
            else:
                notes.append("the head is not linear, so the earlier injection is kept as a wider head")
        if isinstance(present, nn.Linear):
            notes.append("the head is one linear layer: it learns as it would have without, from a new optimizer state")
        tied = _name_tied_to(inner, present)
        if tied:
            notes.append(f"the head was tied to {tied}: the old one is now a frozen copy of its own")
        old = copy.deepcopy(present) if tied else present
        new = self._new(present, call)
        injected = InjectedHead(old, new).train(present.training)
        _put(inner, path, injected)
        trained = [p for p in new.parameters() if p.requires_grad]
        if group is not None:
            owner, options = group
            owner.add_param_group({**options, "params": trained})
        records = tuple(
            BlockRecord(f"{path}.new.{name}", counts={"new parameters": p.numel()})
            for name, p in new.named_parameters()
        )
        cleared = clear_gradients(old.parameters())
        return Receipt(self.name, records, optimizer=StateReset("none"), gradients_cleared=cleared, notes=tuple(notes))

    def merge(self, model: nn.Module, optimizer: object = None) -> str:
        """Write old + new − minus into one linear layer again and train that; the name of the merged head.

        The old parameters are still in the optimizer's first group; the injected group leaves it.
        """
        _check_open(model)
        inner = unwrapped(model)
        path = self.head if self.head is not None else _injected(inner)
        head = _module(inner, path)
        if not isinstance(head, InjectedHead):
            raise ValueError(f"{path!r} holds no injection to merge")
        if not _is_linear(head):
            raise ValueError(f"{path!r} is not linear: its three parts cannot become one, it stays a wider head")
        old, added = dict(head.old.named_parameters()), dict(head.new.named_parameters())
        minus = dict(head.minus.named_parameters())
        with torch.no_grad():
            for name, parameter in old.items():
                parameter.add_(added[name] - minus[name])
        head.old.requires_grad_(True)
        _put(inner, path, head.old)
        held = {id(p) for each in optimizers.unwrap(optimizer) for g in each.param_groups for p in g["params"]}
        gone = {id(p) for p in added.values()}
        for each in optimizers.unwrap(optimizer):
            for group in list(each.param_groups):
                if any(id(p) in gone for p in group["params"]):
                    kept = [p for p in group["params"] if id(p) not in gone]
                    missing = [p for p in old.values() if id(p) not in held]
                    group["params"][:] = kept + missing  # a head that was tied was never in the optimizer itself
                    if not group["params"]:
                        each.param_groups.remove(group)
            for parameter in added.values():
                each.state.pop(parameter, None)
        if optimizer is not None:
            optimizers.reset(optimizer, {f"{path}.{name}": p for name, p in old.items()})
        return path

    def _new(self, present: nn.Module, call: Call) -> nn.Module:
        if self._fresh is not None:
            with forked_rng(call.generator, present):
                new = self._fresh()
            return new
        source = present
        while isinstance(source, InjectedHead):
            source = source.new
        new = copy.deepcopy(source).requires_grad_(True)
        values = initial.draw(new, generator=call.generator)
        with torch.no_grad():
            for name, tensor in initial.tensors_of(new).items():
                tensor.copy_(values[name])
        return new


def _check_open(model: nn.Module) -> None:
    inside: nn.Module | None = model
    while inside is not None:
        name = next((c.__name__ for c in type(inside).__mro__ if c.__name__ in _CLOSED), None)
        if name is not None:
            raise ValueError(
                f"{name} knows only the parameters that it was made with, and would not train "
                "an injected head: apply PlasticityInjection to the bare model (the same seed on every rank), then "
                "wrap it again"
            )
        inside = wrapped(inside)


def _head(model: nn.Module) -> str:
    injected = [name for name, module in model.named_modules() if isinstance(module, InjectedHead)]
    if injected:
        return str(injected[0])
    found = [f for f in find(model) if "head" in f.marks]
    modules = {name: None for f in found for name in (f.module, *(a.rpartition(".")[0] for a in f.also))}
    layers = [name for name in modules if as_layer(name, model.get_submodule(name)) is not None]
    if len(layers) != 1:
        raise ValueError(f"which module is the head? found {layers or 'none'}: name it with head=")
    return str(layers[0])


def _injected(model: nn.Module) -> str:
    paths = [name for name, module in model.named_modules() if isinstance(module, InjectedHead)]
    if not paths:
        raise ValueError("the model holds no injection to merge")
    return str(paths[0])


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"head={path!r}: the model has no such module") from error


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    if not name:
        raise ValueError("the whole model is the head: wrap it in a module first")
    unwrapped(model.get_submodule(parent))._modules[name] = module


def _is_linear(head: InjectedHead) -> bool:
    return all(as_layer("", part) is not None for part in (head.old, head.new, head.minus))


def _name_tied_to(model: nn.Module, head: nn.Module) -> str:
    mine = {id(p) for p in head.parameters()}
    inside = {id(m) for m in head.modules()}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in inside and any(id(p) in mine for p in module._parameters.values() if p is not None):
            return str(name)
    return ""


def _trained_by(optimizer: object, head: nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]] | None:
    """The optimizer that trains the head, and the settings of its group; None without an optimizer."""
    opened = optimizers.unwrap(optimizer)
    mine = {id(p) for p in head.parameters()}
    for each in opened:
        for group in each.param_groups:
            if any(id(p) in mine for p in group["params"]):
                return each, {k: v for k, v in group.items() if k not in ("params", "param_names")}
    if opened:
        raise ValueError("the head's parameters are in none of the given optimizers: pass the one that trains it")
    return None
