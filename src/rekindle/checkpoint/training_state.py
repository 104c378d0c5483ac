"""Optimizer states inside a training checkpoint: which weight each belongs to, and their reset.

A state dict of torch.optim knows its parameters as 0, 1, 2, …. Where the optimizer was given names they are stored and
used; else every parameter's place and shape must agree with the weights of the file, or, in a Hugging Face folder, with
the parameters of the config's model as its Trainer groups them; else the job is refused, because a reset of the wrong
slots would go unnoticed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from rekindle.blocks.configs import meta_model
from rekindle.checkpoint.parts import CheckpointError, FilePart, TensorMeta
from rekindle.optimizers import StateReset
from rekindle.optimizers import resetting as optimizers
from rekindle.optimizers.live_slots import slots
from rekindle.spelling import argument

# What transformers' Trainer gives no weight decay, beside LayerNorm modules; and what older scripts do.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_NO_DECAY_OLD = re.compile(r"bias|LayerNorm\.weight")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_CLASSES: tuple[type[Optimizer], ...] = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Muon,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.SparseAdam,
    torch.optim.LBFGS,
)


class Holder(Protocol):
    """The part of a `Checkpoint` that is needed here: its weights by name, and the parts that hold optimizer states."""

    path: Path
    parts: list[FilePart]
    names: tuple[str, ...]
    tied: dict[str, str]
    registration_order: bool
    unread_state: str | None

    def meta(self, name: str) -> TensorMeta:
        """Shape, dtype and place of a weight."""
        ...

    def read(self, name: str) -> Tensor:
        """One weight."""
        ...

    def own_config(self) -> dict[str, Any] | None:
        """The config beside the weights."""
        ...


class States(Protocol):
    """One optimizer's states in a file, parameter by parameter."""

    label: str
    groups: Sequence[Mapping[str, Any]]
    keys: tuple[Any, ...]

    def slots(self, key: object) -> Mapping[str, Any]:
        """The slots of one parameter, tensors without their numbers."""
        ...

    def read(self, key: object) -> dict[str, Any]:
        """The slots of one parameter."""
        ...

    def restructure(self, key: object, slots: Mapping[str, Any]) -> None:
        """Give a parameter other slots than it has, or refuse to."""
        ...

    def write(self, key: object, slots: Mapping[str, Any]) -> None:
        """Put changed slots back."""
        ...


def summary(checkpoint: Holder) -> dict[str, Any] | None:
    """How many optimizers, of which classes, with how many slots, and how they are matched to weights."""
    tables = _tables(checkpoint)
    if not tables:
        return None
    found: dict[str, Any] = {"optimizers": [_class(table).__name__ for table in tables]}
    found["parameters"] = sum(len(table.keys) for table in tables)
    found["slots"] = sum(len(table.slots(key)) for table in tables for key in table.keys)
    try:
        found["matched_by"] = match(checkpoint, tables)[1]
    except CheckpointError as error:
        found["matched_by"], found["reason"] = None, str(error)
    return found


def match(checkpoint: Holder, tables: Sequence[States]) -> tuple[list[dict[Any, str]], str]:
    """For each optimizer its keys' weights, and how they were found: by names, or by order and shapes."""
    if all(isinstance(key, str) for table in tables for key in table.keys):
        return [{key: _known(checkpoint, table, key) for key in table.keys} for table in tables], "names"
    if all(isinstance(group.get("param_names"), list) for table in tables for group in table.groups):
        named = []
        for table in tables:
            pairs = [(k, n) for g in table.groups for k, n in zip(g["params"], g["param_names"], strict=False)]
            if len(pairs) != len(table.keys):
                raise CheckpointError(f"{table.label}: param_names and params differ in length")
            names = {key: _known(checkpoint, table, name) for key, name in pairs}
            for key, name in names.items():
                if not _agrees(table.slots(key), checkpoint.meta(name).shape):
                    raise CheckpointError(f"{table.label}: the state of {name!r} has another shape than the weight")
            named.append(names)
        return named, "param_names"
    by_config = None if checkpoint.registration_order else _by_config(checkpoint, tables)
    if by_config is not None:
        return by_config, "the order of the config's model"
    return _by_order(checkpoint, tables), "order and shapes"


def check_policy(policy: str) -> None:
    """Refuse what `prepare` and `reset` do not know."""
    if policy not in ("fresh", "moments", "step", "none"):
        raise CheckpointError(f"{argument('optimizer_state', policy)} is not one of 'fresh', 'moments', 'step', 'none'")


def prepare(checkpoint: Holder, changed: frozenset[str], policy: str) -> StateReset | None:
    """Check that the states of `changed` can be reset, and count; None without any state in the file.

    What cannot be changed in place (an integer step count, a slot that a fresh optimizer does not have) is changed in
    the tree that the part will then save anew.
    """
    if checkpoint.unread_state is not None and policy != "none":
        raise CheckpointError(f"{checkpoint.unread_state}; {argument('optimizer_state', 'none')} leaves it as it is")
    total: StateReset | None = None
    for table, names in _jobs(checkpoint, changed, policy):
        count = StateReset(policy, (_class(table).__name__,), parameters=len(names))
        for key, name in names.items():
            old = table.slots(key)
            new = {slot: torch.zeros(()) if isinstance(value, Tensor) else value for slot, value in old.items()}
            before = dict(new)
            done = _reset(table, key, name, new, torch.zeros(()), policy)
            count += StateReset(policy, (), 0, done.matched, done.reset, done.masters, done.without_state, done.dropped)
            kept = {slot: value for slot, value in old.items() if slot in new}
            plain = {s: new[s] for s in kept if not isinstance(old[s], Tensor) and new[s] != before[s]}
            if plain or len(kept) < len(old):
                table.restructure(key, kept | plain)
        total = count if total is None else total + count
    return total


def reset(output: Holder, changed: frozenset[str], policy: str) -> None:
    """Reset the states of `changed` in a staged checkpoint, in place and one parameter at a time."""
    for table, names in _jobs(output, changed, policy):
        for key, name in names.items():
            state = table.read(key)
            if state:
                _reset(table, key, name, state, output.read(name), policy)
                table.write(key, state)


def _tables(checkpoint: Holder) -> list[States]:
    return [table for part in checkpoint.parts for table in part.optimizers()]


def _jobs(checkpoint: Holder, changed: frozenset[str], policy: str) -> Iterator[tuple[States, dict[Any, str]]]:
    tables = _tables(checkpoint)
    if not any(table.slots(key) for table in tables for key in table.keys):
        return
    try:
        matched, _ = match(checkpoint, tables)
    except CheckpointError as error:
        if policy == "none":  # master copies cannot be found either, and the user asked to keep all
            return
        raise CheckpointError(f"{error}; {argument('optimizer_state', 'none')} leaves it as it is") from error
    owners = {checkpoint.tied.get(name, name) for name in changed}
    held = {checkpoint.tied.get(name, name) for names in matched for name in names.values()}
    stray = sorted(owners - held)
    if stray and policy != "none":
        raise CheckpointError(
            f"{tables[0].label}: {stray[0]!r} changes but is in none of the optimizers of this file: exclude it if it "
            f"is frozen, or say {argument('optimizer_state', 'none')}"
        )
    for table, names in zip(tables, matched, strict=True):
        chosen = {k: name for k, name in names.items() if checkpoint.tied.get(name, name) in owners}
        if chosen and _class(table) is torch.optim.LBFGS:  # one history for all, kept under the first parameter
            chosen = {key: name for key, name in names.items() if table.slots(key)}
        yield table, chosen


def _reset(table: States, key: object, name: str, state: dict[str, Any], weight: Tensor, policy: str) -> StateReset:
    """Let `optimizers.reset` do it, on an optimizer made around this one state."""
    kind = _class(table)
    group = next((g for g in table.groups if key in g.get("params", ())), {})
    parameter = Parameter(weight, requires_grad=weight.is_floating_point())
    optimizer = object.__new__(kind)
    optimizer.defaults = dict(group)
    optimizer.param_groups = [{**group, "params": [parameter], "fused": False}]
    optimizer.state = {parameter: state}  # type: ignore[assignment]
    try:
        return optimizers.reset(optimizer, {name: parameter}, policy=policy)
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{table.label}: {error}") from error


def _class(table: States) -> type[Optimizer]:
    """The optimizer class that writes such slots and settings; a state dict does not name it."""
    settings = {name for group in table.groups for name in group} - {"params", "param_names", "initial_lr"}
    stepped = next((state for state in (table.slots(key) for key in table.keys) if state), {})
    best: type[Optimizer] = Optimizer
    for kind in _CLASSES:
        accepted = set(inspect.signature(kind.__init__).parameters) | {"decoupled_weight_decay"}
        if settings <= accepted and (not stepped or _fits(kind, stepped)):
            if kind is torch.optim.AdamW and any(g.get("decoupled_weight_decay") is False for g in table.groups):
                continue
            best = kind
            break
    return best


def _fits(kind: type[Optimizer], state: Mapping[str, Any]) -> bool:
    if kind is torch.optim.LBFGS:
        return "func_evals" in state
    parameter = Parameter(torch.zeros(()))
    optimizer = object.__new__(kind)
    optimizer.state = {parameter: dict(state)}  # type: ignore[assignment]
    try:
        slots(optimizer, parameter)
    except KeyError:
        return False
    return True


def _known(checkpoint: Holder, table: States, name: object) -> str:
    if not isinstance(name, str) or name not in checkpoint.names:
        raise CheckpointError(f"{table.label}: its parameter {name!r} is not among the weights of the file")
    return name


def _by_order(checkpoint: Holder, tables: Sequence[States]) -> list[dict[Any, str]]:
    labels = ", ".join(table.label for table in tables)
    if not checkpoint.registration_order:
        raise CheckpointError(
            f"{labels}: parameters have no names, these weights are not in the model's order, and no config.json tells "
            "it; make the optimizer from model.named_parameters() next time"
        )
    weights = [
        name
        for name in checkpoint.names
        if name not in checkpoint.tied
        and checkpoint.meta(name).dtype.is_floating_point
        and name.rpartition(".")[2] not in _BUFFERS
    ]
    keys = sum(len(table.keys) for table in tables)
    if keys != len(weights):
        raise CheckpointError(f"{labels}: {keys} parameters without names cannot be matched to {len(weights)} weights")
    matched, place = [], 0
    for table in tables:
        names = dict(zip(table.keys, weights[place:], strict=False))
        place += len(table.keys)
        for key, name in names.items():
            if not _agrees(table.slots(key), checkpoint.meta(name).shape):
                raise CheckpointError(
                    f"{table.label}: parameters have no names, and the state of number {key} does not have the shape "
                    f"of {name!r}: the order differs"
                )
        matched.append(names)
    return matched


def _by_config(checkpoint: Holder, tables: Sequence[States]) -> list[dict[Any, str]] | None:
    """The parameters of one optimizer in the order in which a trainer of the config's model passes them.

    None where there is no config, or none that transformers knows. Two orders that both fit are refused.
    """
    config = checkpoint.own_config()
    if config is None or len(tables) != 1:
        return None
    try:
        model = meta_model(config)
    except Exception:  # whatever transformers makes of a config that it does not know
        return None
    table = tables[0]
    sizes = [len(group["params"]) for group in table.groups]
    fitting: list[dict[Any, str]] = []
    for order in _trainer_orders(model, len(sizes)):
        names = [_on_disk(checkpoint, aliases) for group in order for aliases in group]
        if [len(group) for group in order] != sizes or None in names:
            continue
        found = {key: str(name) for key, name in zip(table.keys, names, strict=True)}
        if found not in fitting and all(_agrees(table.slots(k), checkpoint.meta(n).shape) for k, n in found.items()):
            fitting.append(found)
    if len(fitting) == 1:
        return fitting
    why = "fit several orders" if fitting else "do not fit the parameters"
    raise CheckpointError(
        f"{table.label}: parameters have no names, and their states {why} of {type(model).__name__}, which config.json "
        "describes: frozen or added parameters? Make the optimizer from model.named_parameters() next time"
    )


def _trainer_orders(model: nn.Module, groups: int) -> Iterator[list[list[tuple[str, ...]]]]:
    """Ways in which trainers put parameters into groups: each parameter as the names that it has."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    named = [tuple(names) for names in aliases.values()]
    if groups == 1:
        yield [named]
    if groups == 2:
        norms = {f"{path}." for path, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
        # With decay first, as transformers does it: today, up to 4.45, and in the older examples.
        for pattern, classes in ((_NO_DECAY, True), (re.compile("bias"), True), (_NO_DECAY_OLD, False)):
            spared = [
                bool(pattern.search(names[0].lower() if classes else names[0]))
                or (classes and f"{names[0].rpartition('.')[0]}." in norms)
                for names in named
            ]
            yield [[n for n, s in zip(named, spared, strict=True) if s is side] for side in (False, True)]


def _on_disk(checkpoint: Holder, aliases: Sequence[str]) -> str | None:
    known = checkpoint.names
    return next((name for name in aliases if name in known), None)


def _agrees(state: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether the tensors of a state belong to a weight of this shape; factored ones (Adafactor) span it together."""
    if "func_evals" in state:  # LBFGS keeps vectors over all parameters
        return True
    tensors = [tuple(value.shape) for value in state.values() if isinstance(value, Tensor) and value.numel() > 1]
    if not tensors:
        return True
    if any(len(each) != len(shape) for each in tensors):
        return False
    return tuple(max(sides) for sides in zip(*tensors, strict=True)) == shape
