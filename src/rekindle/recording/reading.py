"""Where the activity of neurons can be read while a model runs, and how they lie there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rekindle.blocks.layers import as_layer
from rekindle.recording import operations as kinds
from rekindle.recording.graph import Graph, ModuleCall
from rekindle.recording.shadows import varies

Order = Literal["channel", "last", "major", "minor"]


@dataclass(frozen=True)
class Reading:
    """Where neurons' activity can be read: the first input of a module, or its output."""

    module: str
    side: Literal["input", "output"]
    order: Order

    def per_neuron(self, value: Tensor, width: int) -> Tensor:
        """The value with the neurons as its last axis; a view where strides allow, so that watching stays cheap.

        >>> import torch
        >>> Reading("relu", "output", "channel").per_neuron(torch.zeros(2, 5, 3, 3), 5).shape
        torch.Size([2, 3, 3, 5])
        """
        if self.order == "channel":
            return value.movedim(1, -1)
        if self.order == "major":
            return value.reshape(value.shape[0], width, -1).movedim(1, -1)
        return value.reshape(value.shape[0], -1, width) if self.order == "minor" else value


def order_of(columns: tuple[int, ...], width: int) -> Order | None:
    """How neurons lie along one axis: one after the other, each as one run, or in turns; None if otherwise.

    >>> order_of((0, 1, 2), 3), order_of((0, 0, 1, 1), 2), order_of((0, 1, 0, 1), 2), order_of((1, 0), 2)
    ('last', 'major', 'minor', None)
    """
    if columns == tuple(range(width)):
        return "last"
    spread, rest = divmod(len(columns), width)
    if rest:
        return None
    if columns == tuple(i // spread for i in range(len(columns))):
        return "major"
    return "minor" if columns == tuple(range(width)) * spread else None


@dataclass(frozen=True, eq=False)
class Flow:
    """Neurons in a value: the layers that make them, and which neuron is behind each element (-1 for none)."""

    sources: frozenset[str]
    width: int
    shadow: Tensor
    active: bool = False  # a nonlinearity has been passed

    def same(self, other: Flow) -> bool:
        """Whether the same neuron of this flow and the other stands at each place, after broadcasting."""
        if self.width != other.width:
            return False
        if self.shadow is other.shadow:
            return True
        try:
            return bool((self.shadow == other.shadow).all())
        except RuntimeError:
            return False


def line_along(shadow: Tensor, axis: int) -> Tensor | None:
    """The neurons along one axis, None if they differ along any other."""
    if not 0 <= axis < shadow.dim() or any(varies(shadow, i) for i in range(shadow.dim()) if i != axis):
        return None
    for other in reversed([i for i in range(shadow.dim()) if i != axis]):
        shadow = shadow.select(other, 0)
    return shadow


def _order(flow: Flow) -> Order | None:
    """How neurons lie in a value, where a reading can take them apart."""
    dims = flow.shadow.dim()
    line = line_along(flow.shadow, dims - 1) if dims else None
    if line is not None:
        order = order_of(tuple(line.tolist()), flow.width)
        return order if order == "last" or dims == 2 else None
    line = line_along(flow.shadow, 1) if dims > 2 else None
    return "channel" if line is not None and line.tolist() == list(range(flow.width)) else None


def find_reading(
    graph: Graph, names: Mapping[int, str], values: list[tuple[int, Flow]], consumer: str, columns: tuple[int, ...]
) -> Reading:
    """The first module that shows neurons after the last nonlinearity, among the values that they are in.

    Else the input of the consumer, whose columns read these neurons; `names` are those of the modules by id.
    """
    calls = Counter(id(call.module) for call in graph.calls)
    once = [c for c in graph.calls if calls[id(c.module)] == 1 and id(c.module) in names]
    shown: dict[int, list[tuple[Literal["input", "output"], ModuleCall]]] = {}
    for call in once:
        for number in call.outputs[:1]:
            shown.setdefault(number, []).insert(0, ("output", call))
        for number in call.inputs[:1]:
            shown.setdefault(number, []).append(("input", call))
    active = [v for v in values if v[1].active]
    last = _after_the_last_function(graph, active) if active else values
    for number, flow in last:
        order = _order(flow)
        for side, call in shown.get(number, ()):
            if order is None or (as_layer("", call.module) is not None and side == "output" and active):
                continue
            return Reading(names[id(call.module)], side, order)
    width = max(columns) + 1
    return Reading(consumer, "input", order_of(columns, width) or "last")


def _after_the_last_function(graph: Graph, values: list[tuple[int, Flow]]) -> list[tuple[int, Flow]]:
    """Of the values that a flow is in, those from the last function on; pooling and moves come after it."""
    makers = {o: operation.name for operation in graph.operations for o in operation.outputs}
    quiet = {*kinds.MOVES, *kinds.RESHAPES, *kinds.SAME, *kinds.TRANSPARENT, *kinds.POOLS, *kinds.JOINS, *kinds.SUMS}
    loud = [i for i, (number, _) in enumerate(values) if makers.get(number) not in quiet]
    return values[loud[-1] :] if loud else values
