"""What one recorded pass consists of: operations, the values that they read and make, calls of modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn


class Ref(NamedTuple):
    """A stand-in for a tensor in the arguments of an operation: its number in the recording."""

    number: int


@dataclass(eq=False, slots=True)
class Operation:
    """One call of an operator: its plain name, its arguments with `Ref`s for tensors, what it made, who called it."""

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    caller: nn.Module | None
    depth: int


@dataclass(eq=False, slots=True)
class ModuleCall:
    """One call of a module: the values that it was given and returned, and the operations `first` to `last`."""

    module: nn.Module
    depth: int
    first: int
    inputs: tuple[int, ...]
    last: int = -1
    outputs: tuple[int, ...] = ()


@dataclass(eq=False)
class Graph:
    """A recorded pass. Values are numbered; `shapes` and `floating` say what each one was."""

    parameters: dict[str, nn.Parameter]
    operations: list[Operation] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    floating: list[bool] = field(default_factory=list)
    weights: dict[int, str] = field(default_factory=dict)  # values that are parameters, by name
    buffers: dict[int, str] = field(default_factory=dict)  # values that are buffers, by name
    kept: dict[int, torch.Tensor] = field(default_factory=dict)  # integers and masks, which may be indices
    computed: dict[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of weights made of several parameters
    returned: dict[str, int] = field(default_factory=dict)  # what the caller got, by its place in the result

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, also of one that is computed; empty where it is not known."""
        if name in self.computed:
            return self.computed[name]
        return tuple(self.parameters[name].shape) if name in self.parameters else ()
