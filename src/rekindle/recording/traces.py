"""What one value holds of the weights: traces of the outputs of layers, and parameters that were only changed.

A *trace* is what a value holds of the output of one call of a layer: shadows that say which row is behind each element
(or, where that is lost, which rows are in it at all), and what happened to it on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.recording import operations as kinds
from rekindle.recording.graph import Operation, Ref
from rekindle.recording.shadows import resized, rows_in
from rekindle.recording.weights import Entry, WeightPart

FEW = 4  # shadows of one output in a value: a rotation has two; with more the rows alone are kept


@dataclass(frozen=True, slots=True, eq=False)
class RowTrace:
    """The output of one call of a layer inside a value.

    `bent`: it passed a nonlinear function, or was multiplied by another value; `scored`: a softmax or top-k over the
    rows; `added`: it was added to what it was computed from; `attended`: it passed a product of two values.
    """

    shadows: tuple[Tensor, ...] | None
    rows: frozenset[int] | None = None
    bent: bool = False
    scored: bool = False
    added: bool = False
    attended: bool = False

    def all_rows(self) -> frozenset[int]:
        """The rows that are in it."""
        return rows_in(self.shadows) if self.shadows is not None else self.rows or frozenset()


@dataclass(slots=True)
class Content:
    """What is known of one value.

    `traces` by the number of the layer's call; `parts` are the parameters that it was computed from where nothing but
    parameters and constants went into it; `data`: it depends on the model's input or on parameters; `chosen`: the
    calls whose rows it was chosen by (indices of a top-k); `before`: the calls that it was computed from, as bits;
    `scores`: the products of two values that it is, element by element, `weights` after a softmax.
    """

    traces: dict[int, RowTrace] = field(default_factory=dict)
    parts: dict[str, WeightPart] = field(default_factory=dict)
    data: bool = False
    chosen: frozenset[int] = frozenset()
    before: int = 0
    scores: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()


EMPTY = Content()


@dataclass(eq=False)
class LayerCall:
    """One product with a weight: which operation, what the weight is there, what it read."""

    number: int
    operation: int
    weight: str
    entry: Entry
    read: dict[int, RowTrace]
    before: int
    width: int
    caller: nn.Module | None


@dataclass(frozen=True)
class Arrival:
    """Rows of a call's output that arrived somewhere: `kind` at `place` (an operation and the argument)."""

    kind: str
    place: tuple[int, int]
    rows: frozenset[int]
    bent: bool = False


def changed(name: str, parts: list[WeightPart], shape: tuple[int, ...], masked: bool, names: int) -> WeightPart:
    """A weight after an operation with constants, or with itself, element by element."""
    whole = [p for p in parts if p.indices is not None]
    if not whole:
        return parts[0]
    part = whole[0]
    indices = None if name in kinds.SUMS or name in kinds.EXTREMES else resized(part.indices, shape)  # type: ignore[arg-type]
    part = part.with_indices(indices)
    if len(parts) > 1:
        return part.noted("normalized" if name in (*kinds.MULTIPLIES, "sub") else name)
    if name in ("add", "sub", "rsub") or name in kinds.SAME:
        return part
    if name in kinds.MULTIPLIES:
        if masked:
            return part.noted("multiplied by a mask or gain")
        return part.noted("multiplied by another parameter") if names > 1 else part
    if name in ("neg", "native_dropout") or indices is None:
        return part
    return part.noted(f"passed through {name}")


def sources_of(contents: list[Content]) -> int:
    """The calls of layers that these were computed from, as bits."""
    before = 0
    for content in contents:
        before |= content.before
    return before


def flags_of(traces: list[RowTrace]) -> dict[str, bool]:
    """What happened to one output that came here on several paths."""
    return {
        "bent": any(t.bent for t in traces),
        "scored": any(t.scored for t in traces),
        "added": all(t.added for t in traces),
        "attended": any(t.attended for t in traces),
    }


def joined(one: RowTrace | None, other: RowTrace) -> RowTrace:
    """One output that is in a value on two paths."""
    if one is None:
        return other
    flags = flags_of([one, other])
    if (one.shadows is None) != (other.shadows is None):  # divided by its own norm: its rows stay where they are
        clear, blurred = (one, other) if one.shadows is not None else (other, one)
        if clear.all_rows() <= blurred.all_rows():
            return clear
    if one.shadows is None or other.shadows is None:
        return RowTrace(None, one.all_rows() | other.all_rows(), **flags)
    shadows = list(one.shadows)
    for shadow in other.shadows:
        if not any(_same(shadow, s) for s in shadows):
            shadows.append(shadow)
    if len(shadows) > FEW:
        return RowTrace(None, rows_in(shadows), **flags)
    return RowTrace(tuple(shadows), None, **flags)


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr())


def cat(
    operation: Operation,
    held: list[Tensor | None],
    shapes: list[tuple[int, ...]],
    rest: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: tuple[int, ...],
) -> Tensor | None:
    """The shadow of a concatenation: -1 where there is none of this output."""
    shapes, held = list(shapes), list(held)
    for i in reversed(range(len(shapes))):  # an empty tensor of one axis goes with any other
        if shapes[i] == (0,) and len(output) > 1:
            del shapes[i], held[i]
    tensors = [torch.full((1,) * len(s), -1).expand(s) if h is None else h for h, s in zip(held, shapes, strict=True)]
    if any(tuple(t.shape) != s for t, s in zip(tensors, shapes, strict=True)):
        return None
    axis = rest[0] if rest else kwargs.get("dim", 0)
    axis %= len(output)
    # Axes along which nothing changes in any of them stay small.
    small = [True] * len(shapes[0])
    for tensor in tensors:
        for i, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            small[i] = small[i] and (stride == 0 or size == 1)
    stacked = operation.name == "stack"
    for i, flat in enumerate(small):
        if flat and (stacked or i != axis):
            tensors = [t.narrow(i, 0, min(1, t.shape[i])) for t in tensors]
    try:
        return operation.function(tensors, axis).expand(output)  # type: ignore[no-any-return]
    except RuntimeError:
        return None


def axis_of(operation: Operation) -> int:
    """The axis along which a softmax or a choice goes."""
    for position in (2, 1) if operation.name in ("topk", "kthvalue") else (1,):
        if len(operation.args) > position and isinstance(operation.args[position], int):
            if position == 1 and operation.name in ("topk", "kthvalue"):
                break
            return int(operation.args[position])
    dim = operation.kwargs.get("dim")
    return dim if isinstance(dim, int) else -1


def axes_of(operation: Operation, dims: int) -> list[int] | None:
    """The axes that a reduction takes together; None if it is no reduction but a choice between two values."""
    candidates = [a for a in operation.args[1:3] if isinstance(a, int | list | tuple) and not isinstance(a, bool)]
    if any(isinstance(a, Ref) for a in operation.args[1:]):
        return None
    if operation.name in ("norm", "linalg_vector_norm"):
        candidates = [a for a in operation.args[2:3] if a is not None]
    given = operation.kwargs.get("dim", candidates[0] if candidates else None)
    if given is None or given == [] or given == ():
        return list(range(dims))
    axes = [given] if isinstance(given, int) else list(given)
    return [int(a) % max(dims, 1) for a in axes if isinstance(a, int)]
