"""Copies of a model and of its optimizers, which learn while the model stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rekindle.optimizers import unwrap


def copied(model: nn.Module, copy_model: Callable[[], nn.Module] | None = None) -> nn.Module:
    """A copy of the model that can be trained on its own; `copy_model` makes one that cannot be deep-copied.

    >>> copied(nn.Linear(2, 1)).weight.shape
    torch.Size([1, 2])
    """
    if copy_model is not None:
        made = copy_model()
        if {id(p) for p in made.parameters()} & {id(p) for p in model.parameters()}:
            raise ValueError("copy() returned the model itself, or one that shares its parameters: it must copy them")
        found, wanted = (len(list(each.parameters())) for each in (made, model))
        if found != wanted:
            raise ValueError(f"copy() returned a model with {found} parameters, and the model has {wanted}")
        return made
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be deep-copied ({type(error).__name__}: {error}): pass copy=, a function "
            "that returns a copy of the model with its present weights"
        ) from error


def optimizers_like(
    optimizer: object, twins: Mapping[Tensor, Tensor], *, state: bool = False
) -> list[torch.optim.Optimizer]:
    """Optimizers of the same classes and settings for other tensors, with or without their state.

    twins: the tensor that stands for each parameter; what the optimizers hold beside these is left out. Without an
    optimizer it is Adam with a rate of 1e-3.
    """
    given = unwrap(optimizer)
    if not given:
        return [torch.optim.Adam([twin for twin in twins.values() if twin.requires_grad], lr=1e-3)]
    made = []
    for one in given:
        if isinstance(one, torch.optim.LBFGS):
            raise ValueError("LBFGS computes the loss several times a step: give another optimizer=, such as Adam")
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": own}
            for group in one.param_groups
            if (own := [twins[p] for p in group["params"] if p in twins])
        ]
        if not groups:
            continue
        again: torch.optim.Optimizer = type(one)(groups, lr=groups[0].get("lr", 1e-3))  # type: ignore[call-arg]
        if state:
            _copy_state(one, again, twins)
        made.append(again)
    if not made:
        raise ValueError("the given optimizer holds none of the model's trainable parameters")
    return made


def _copy_state(one: torch.optim.Optimizer, again: torch.optim.Optimizer, twins: Mapping[Tensor, Tensor]) -> None:
    kept = one.state_dict()
    held = [p for group in one.param_groups for p in group["params"]]
    if all(p in twins for p in held):
        again.load_state_dict(copy.deepcopy(kept))
        return
    own = [place for place, p in enumerate(held) if p in twins]  # places count through all groups
    state = {new: kept["state"][old] for new, old in enumerate(own) if old in kept["state"]}
    again.load_state_dict(copy.deepcopy({"state": state, "param_groups": again.state_dict()["param_groups"]}))


def twins(model: nn.Module, other: nn.Module) -> dict[Tensor, Tensor]:
    """The parameters of a copy by those of the model."""
    return dict(zip(model.parameters(), other.parameters(), strict=True))
