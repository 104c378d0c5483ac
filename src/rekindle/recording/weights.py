"""How a parameter enters an operation: which of its axes are outputs, inputs or a stack, and what was done before.

The place of each element in its parameter is kept as a strided view of an empty tensor on the meta device, so that a
weight of a billion numbers costs nothing; only rearrangements that are no view are written out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rekindle.blocks.layouts import Layout
from rekindle.recording import operations as kinds
from rekindle.recording.graph import Graph, Operation
from rekindle.recording.shadows import compact

_WRITTEN_OUT = 1 << 24  # elements of a rearranged weight whose places are written out


@dataclass(frozen=True, eq=False)
class WeightPart:
    """A parameter inside a value that was computed from parameters and constants alone.

    `indices` are places in the parameter, `notes` what was done to it beside moving it.
    """

    indices: Tensor | None
    notes: tuple[str, ...] = ()

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> WeightPart:
        """A parameter as it is."""
        return cls(torch.empty(shape, dtype=torch.int64, device="meta"))

    def with_indices(self, indices: Tensor | None) -> WeightPart:
        """The same parameter elsewhere."""
        return replace(self, indices=indices)

    def noted(self, note: str) -> WeightPart:
        """The same parameter after this was done to it."""
        return self if note in self.notes else replace(self, notes=(*self.notes, note))

    def moved(self, move: Callable[[Tensor], list[Tensor | None]]) -> list[WeightPart]:
        """The parts that a move makes of it."""
        if self.indices is None:
            return [self]
        indices: Tensor = self.indices
        if indices.is_meta:
            made = move(indices)
            memory = indices.untyped_storage()._cdata
            if all(m is not None and m.untyped_storage()._cdata == memory for m in made):
                return [self.with_indices(m) for m in made]
            written = self.written_out()
            if written is None:
                return [self.with_indices(None) for _ in made]
            indices = written
        return [self.with_indices(m) for m in move(indices)]

    def written_out(self) -> Tensor | None:
        """The places as numbers, None where there are too many."""
        indices = self.indices
        if indices is None or not indices.is_meta:
            return indices
        if indices.numel() > _WRITTEN_OUT:
            return None
        return _grid(indices.shape, indices.stride(), int(indices.storage_offset()))


@dataclass(frozen=True, eq=False)
class Entry:
    """One use of a parameter: `kind` is matrix, convolution, or what `operations.OPAQUE` and `Fact.use` name.

    The parameter's axes are split into factors; `count`, `out` and `in_` are those that number matrices, rows and
    columns; `units[i]` is how far apart in memory two neighbors along factor i are.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    notes: tuple[str, ...] = ()
    split: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    count: tuple[int, ...] = ()
    out: tuple[int, ...] = ()
    in_: tuple[int, ...] = ()
    taps: int = 1
    member: tuple[int, ...] = ()
    refusal: str = ""
    first_column: Tensor | None = None

    @classmethod
    def plain(cls, graph: Graph, name: str, kind: str, *notes: str) -> Entry:
        """A use in which there is no matrix to see."""
        return cls(name, graph.shape_of(name), kind, notes)

    @property
    def layout(self) -> Layout | None:
        """The index rule of the matrices, None where there is none."""
        if not self.split or self.refusal:
            return None
        return Layout(self.shape, self.split, self.count, self.out, self.in_)

    def shadow_of_output(self, operation: Operation, shape: tuple[int, ...]) -> Tensor | None:
        """Which row made each element of the product."""
        if self.first_column is None:
            return None
        try:
            return self.first_column.expand(shape)
        except RuntimeError:
            return None

    def rows(self) -> list[int]:
        """Every row that the product has."""
        return [] if self.first_column is None else torch.unique(compact(self.first_column)).tolist()

    def stack_varies(self, shadow: Tensor, axis: int) -> bool:
        """Whether different members of a stack lie along this axis of a shadow of the output."""
        if not self.count or shadow.dim() < -axis or shadow.shape[axis] < 2:
            return False
        rows = compact(shadow)
        member = sum((rows // self.units[i]) % self.split[i] * self.units[i] for i in self.count)
        assert isinstance(member, Tensor)
        return bool((member != member.narrow(axis, 0, 1)).any())


def entries_of(graph: Graph, operation: Operation, position: int, parts: Mapping[str, WeightPart]) -> dict[str, Entry]:
    """How each of these parameters enters a product whose factor at `position` they are."""
    shapes = [graph.shapes[operation.args[i].number] for i in kinds.PRODUCTS[operation.name]]
    output = graph.shapes[operation.outputs[0]]
    return {
        name: _entry(graph, operation, position, name, part, shapes[position], output) for name, part in parts.items()
    }


def _entry(
    graph: Graph,
    operation: Operation,
    position: int,
    name: str,
    part: WeightPart,
    operand: tuple[int, ...],
    output: tuple[int, ...],
) -> Entry:
    shape = graph.shape_of(name) or operand
    convolves = operation.name in kinds.CONVOLUTIONS
    plain = Entry(name, shape, "convolution" if convolves else "matrix", part.notes)
    affine = None if part.indices is None else _affine(part.indices, operand)
    if affine is None:
        return replace(plain, refusal="its elements are rearranged before the product")
    sizes, strides, offset = affine
    dims = len(operand)
    digits, start = [], 0  # where the steps of each axis stand in the flat list
    for held_sizes in sizes:
        digits.append(list(range(start, start + len(held_sizes))))
        start += len(held_sizes)
    column: Tensor | None
    if convolves:
        transposed, groups = bool(operation.args[6]), int(operation.args[8])
        axes = {"out": [1], "in": [0], "taps": list(range(2, dims))}
        if not transposed:
            axes |= {"out": [0], "in": [1]}
        column = _convolved(sizes, strides, offset, transposed, groups, len(output))
    elif operation.name == "linear" or position == 0:
        axes = {"out": [dims - 2] if dims > 1 else [], "in": [dims - 1], "batch": list(range(dims - 2))}
        column = _column(sizes, strides, offset, axes)
        if operation.name != "linear" and len(output) == dims and dims > 1:
            column = column.unsqueeze(-1)
        elif dims > 2:
            column = column.unsqueeze(-2)
    else:
        axes = {"out": [dims - 1] if dims > 1 else [], "in": [max(dims - 2, 0)], "batch": list(range(dims - 2))}
        column = _column(sizes, strides, offset, axes)
        column = column.unsqueeze(-2) if dims > 1 else column
        if "grouped" in operation.name and dims > 2:
            column = column[0]
    if convolves and int(operation.args[8]) > 1:
        return replace(plain, refusal="a grouped convolution", first_column=column)
    axes = {group: [i for a in held for i in digits[a]] for group, held in axes.items()}
    factors = _factors(shape, *_flat(sizes, strides), offset, axes)
    if isinstance(factors, str):
        return replace(plain, refusal=factors, first_column=column)
    split, units, groups_of, member = factors
    taps = math.prod(_flat(sizes, strides)[0][a] for a in axes.get("taps", ()))
    order = {g: tuple(i for i, k in enumerate(groups_of) if k == g) for g in ("out", "in")}
    count = tuple(i for i, k in enumerate(groups_of) if k not in ("out", "in"))
    if order["out"] and order["out"] != tuple(range(order["out"][0], order["out"][-1] + 1)):
        why = "a stack whose members are used side by side: whether they are one matrix or several is not seen"
        return replace(plain, refusal=why, first_column=column)
    return replace(
        plain,
        split=split,
        units=units,
        count=count,
        out=order["out"],
        in_=order["in"],
        taps=taps,
        member=member,
        first_column=column,
    )


def _factors(
    shape: tuple[int, ...], sizes: list[int], strides: list[int], offset: int, axes: Mapping[str, list[int]]
) -> tuple[tuple[int, ...], tuple[int, ...], list[str], tuple[int, ...]] | str:
    """Split the parameter's axes where an axis of the operand begins or ends; say which group each factor is in."""
    edges = {1, math.prod(shape)}
    unit = 1
    for size in reversed(shape):
        unit *= size
        edges.add(unit)
    used = [(strides[a], strides[a] * sizes[a], group) for group, held in axes.items() for a in held if sizes[a] > 1]
    used = [use for use in used if use[0] > 0 or use[2] != "batch"]  # one matrix for every example
    if any(stride <= 0 for stride, _, _ in used):
        return "its elements are repeated before the product"
    for low, high, _ in used:
        edges |= {low, high}
    ordered = sorted(edges)
    split, units, groups = [], [], []
    for low, high in itertools.pairwise(ordered):
        if high % low:
            return "the part of it that is used is no regular part of its axes"
        holders = [group for start, end, group in used if start <= low and high <= end]
        if len(holders) > 1:
            return "its elements are used twice in one product"
        split.append(high // low)
        units.append(low)
        groups.append(holders[0] if holders else "fixed")
    split, units, groups = split[::-1], units[::-1], groups[::-1]
    if not split:
        return "it is one number"
    member = tuple((offset // u) % n for u, n, g in zip(units, split, groups, strict=True) if g == "fixed")
    return tuple(split), tuple(units), groups, member


_Steps = list[list[int]]  # of each axis: usually one step, several where two axes of the weight were merged


def _affine(indices: Tensor, operand: tuple[int, ...]) -> tuple[_Steps, _Steps, int] | None:
    """(sizes, strides, offset) of places that lie regularly in the parameter, in the range that is the parameter's."""
    if tuple(indices.shape) != operand:
        return None
    if indices.is_meta:
        return [[n] for n in indices.shape], [[n] for n in indices.stride()], int(indices.storage_offset())
    for axis in range(indices.dim()):  # a part of a concatenation
        held = (indices >= 0).movedim(axis, 0).flatten(1).any(1) if indices.dim() > 1 else indices >= 0
        places = held.nonzero().flatten()
        if not len(places):
            return None
        low, high = int(places[0]), int(places[-1]) + 1
        indices = indices.narrow(axis, low, high - low)
    first = int(indices.flatten()[0])
    sizes: _Steps = []
    strides: _Steps = []
    for axis in range(indices.dim()):
        line = indices
        for other in reversed([i for i in range(indices.dim()) if i != axis]):
            line = line.select(other, 0)
        steps = _steps([n - first for n in line.tolist()])
        sizes.append([size for size, _ in steps])
        strides.append([stride for _, stride in steps])
    grid = _grid(*_flat(sizes, strides), first).reshape(indices.shape)
    return (sizes, strides, first) if torch.equal(grid, indices) else None


def _steps(line: list[int]) -> list[tuple[int, int]]:
    """A line of places as nested steps (size, stride), outermost first.

    >>> _steps([0, 1, 10, 11, 20, 21])
    [(3, 10), (2, 1)]
    """
    if len(line) < 2:
        return [(len(line), 0)]
    step = line[1] - line[0]
    length = next((i for i, place in enumerate(line) if place != line[0] + i * step), len(line))
    if length == len(line) or len(line) % length:
        return [(len(line), step)]
    return [*_steps(line[::length]), (length, step)]


def _flat(sizes: _Steps, strides: _Steps) -> tuple[list[int], list[int]]:
    return [n for held in sizes for n in held], [n for held in strides for n in held]


def _grid(shape: Any, strides: Any, offset: int) -> Tensor:
    grid = torch.full((), offset)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = torch.arange(size) * stride
        grid = grid + steps.view([-1 if i == axis else 1 for i in range(len(shape))])
    return grid.expand(tuple(shape))


def _column(sizes: _Steps, strides: _Steps, offset: int, axes: Mapping[str, list[int]]) -> Tensor:
    """The places of the first column: (…batch, out)."""
    kept = [*axes.get("batch", ()), *axes["out"]]
    grid = _grid(*_flat([sizes[a] for a in kept], [strides[a] for a in kept]), offset)
    return grid.reshape([math.prod(sizes[a]) for a in kept]) if grid.dim() != len(kept) else grid


def _convolved(sizes: _Steps, strides: _Steps, offset: int, transposed: bool, groups: int, dims: int) -> Tensor | None:
    if any(len(held) != 1 for held in sizes[:2]):
        return None
    if transposed:
        steps = [strides[0][0] * (sizes[0][0] // groups), strides[1][0]]
        column = _grid([groups, sizes[1][0]], steps, offset).flatten()
    else:
        column = _grid(sizes[0], strides[0], offset)
    return column.view(-1, *([1] * (dims - 2)))
