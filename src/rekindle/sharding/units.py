"""A parameter's matrices as units of work: boxes that hold whole matrices and can be solved on different ranks.

A fused q/k/v weight whose thirds are contiguous is three boxes; where they are interleaved head by head it is one. A
stack of experts is cut along its expert axis, where a shard ends anyway. Inside a box the block's index rule is the
same rule with smaller numbers (`restricted`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rekindle.blocks.layouts import Layout
from rekindle.sharding.spread import Box, Spread, volume

# Slices of a stack are merged up to this many elements: a message should be worth its latency.
GRAIN = 1 << 18


@dataclass(frozen=True)
class Part:
    """The matrices of one block inside a box: which block (its place in the caller's list), which of its matrices."""

    block: int
    layout: Layout
    numbers: tuple[int, ...]

    @property
    def cost(self) -> float:
        """n²m per matrix, n the smaller side."""
        count, out, in_ = self.layout.sizes
        return float(count) * min(out, in_) ** 2 * max(out, in_)


@dataclass(frozen=True)
class Unit:
    """A box of one parameter with the whole matrices in it."""

    box: Box
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def cost(self) -> float:
        """The work to solve its matrices, in units of n²m."""
        return sum(part.cost for part in self.parts)


def units(layouts: Sequence[Layout], spread: Spread, grain: int = GRAIN) -> tuple[Unit, ...]:
    """Cut the blocks of one parameter into units.

    >>> from rekindle.blocks.layouts import matrices
    >>> thirds = [block.layout for block in matrices("(part out) in", part=("query", "key"))((8, 3))]
    >>> [unit.box for unit in units(thirds, Spread.replicated((8, 3), (0,)))]
    [((0, 4), (0, 3)), ((4, 8), (0, 3))]
    >>> experts = [matrices("expert out in", count="expert")((4, 3, 3))[0].layout]
    >>> [unit.box[0] for unit in units(experts, Spread((4, 3, 3), (2,), (0, 1), ((0, 0),)))]
    [(0, 2), (2, 4)]
    """
    found: list[Unit] = []
    for members, box in _together([_box(layout) for layout in layouts]):
        chosen = [layouts[i] for i in members]
        for piece in _slices(chosen, box, spread, grain):
            parts = [Part(i, *restricted(layouts[i], piece)) for i in members]
            found.append(Unit(piece, tuple(parts)))
    return tuple(found)


def interleaved(layouts: Sequence[Layout]) -> bool:
    """Whether the boxes of these blocks hold more than their matrices.

    >>> from rekindle.blocks.layouts import matrices
    >>> interleaved([matrices("(head part dim) in", part=("query", "key"), head=2, heads="head")((8, 3))[0].layout])
    True
    """
    together = _together([_box(layout) for layout in layouts])
    return sum(volume(box) for _, box in together) != sum(math.prod(layout.sizes) for layout in layouts)


def restricted(layout: Layout, box: Box) -> tuple[Layout, tuple[int, ...]]:
    """The rule for a tensor that is only this box of the whole, and which of the block's matrices are in it.

    >>> rule = Layout((4, 2, 2), (4, 2, 2), (0,), (1,), (2,))
    >>> small, numbers = restricted(rule, ((1, 3), (0, 2), (0, 2)))
    >>> small.shape, numbers
    ((2, 2, 2), (1, 2))
    """
    split, take = list(layout.split), {factor: (start, length) for factor, start, length in layout.take}
    counted = [sizes(layout)[factor] for factor in layout.count]
    numbers = torch.arange(math.prod(counted)).reshape(counted)
    for dim, (low, high) in enumerate(box):
        if (low, high) == (0, layout.shape[dim]):
            continue
        factor, stride = _leading(layout, dim)
        first, count = low // stride, (high - low) // stride
        start, length = take.pop(factor, (0, split[factor]))
        inside, outside = max(start, first), min(start + length, first + count)
        if factor in layout.count:
            numbers = numbers.narrow(layout.count.index(factor), inside - start, outside - inside)
        split[factor] = count
        if (inside, outside) != (first, first + count):
            take[factor] = (inside - first, outside - inside)
    shape = tuple(high - low for low, high in box)
    taken = tuple((factor, *take[factor]) for factor in sorted(take))
    return replace(layout, shape=shape, split=tuple(split), take=taken), tuple(numbers.flatten().tolist())


def sizes(layout: Layout) -> list[int]:
    """The length of every factor, as far as it is taken."""
    found = list(layout.split)
    for factor, _, length in layout.take:
        found[factor] = length
    return found


def _leading(layout: Layout, dim: int) -> tuple[int, int]:
    """The factor that varies slowest along a dimension, and how many indices one step of it is."""
    mine = factors(layout)[dim]
    leading = next((f for f in mine if layout.split[f] > 1), mine[0])
    return leading, layout.shape[dim] // layout.split[leading]


def factors(layout: Layout) -> list[list[int]]:
    """The factors of each dimension, in order."""
    grouped: list[list[int]] = []
    position = 0
    for size in layout.shape:
        mine: list[int] = []
        product = 1
        while position < len(layout.split) and (product < size or not mine):
            product *= layout.split[position]
            mine.append(position)
            position += 1
        grouped.append(mine)
    # Factors of size 1 at the end belong to the last dimension; which dimension they are assigned to makes no
    # difference.
    grouped[-1] += range(position, len(layout.split))
    return grouped


def _box(layout: Layout) -> Box:
    """The smallest box with all matrices of a block in it."""
    taken = {factor: (start, length) for factor, start, length in layout.take}
    box = []
    for dim, size in enumerate(layout.shape):
        factor, stride = _leading(layout, dim)
        start, length = taken.get(factor, (0, layout.split[factor]))
        box.append((start * stride, (start + length) * stride) if factor in taken else (0, size))
    return tuple(box)


def _together(boxes: Sequence[Box]) -> list[tuple[list[int], Box]]:
    """Blocks whose boxes overlap share one."""
    groups = [([i], box) for i, box in enumerate(boxes)]
    merged = True
    while merged:
        merged = False
        for a in range(len(groups)):
            for b in range(a + 1, len(groups)):
                if _overlap(groups[a][1], groups[b][1]):
                    box = tuple(
                        (min(p, r), max(q, s)) for (p, q), (r, s) in zip(groups[a][1], groups[b][1], strict=True)
                    )
                    groups[a] = (sorted(groups[a][0] + groups[b][0]), box)
                    del groups[b]
                    merged = True
                    break
            if merged:
                break
    return groups


def _overlap(a: Box, b: Box) -> bool:
    return all(max(p, r) < min(q, s) for (p, q), (r, s) in zip(a, b, strict=True))


def _slices(layouts: Sequence[Layout], box: Box, spread: Spread, grain: int) -> list[Box]:
    """Cut a box along the first dimension that numbers matrices in every block, where ranks are cut anyway."""
    for dim, (low, high) in enumerate(box):
        leads = {_leading(layout, dim) for layout in layouts}
        if len(leads) != 1 or high - low < 2:
            continue
        factor, stride = next(iter(leads))
        if not all(factor in layout.count for layout in layouts):
            continue
        per_step = volume(box) // (high - low) * stride
        steps = max(1, grain // max(1, per_step)) * stride
        edges = {low, high, *(point for point in spread.boundaries(dim) if low < point < high and point % stride == 0)}
        ordered = sorted(edges)
        found = []
        for first, last in itertools.pairwise(ordered):
            for start in range(first, last, steps):
                found.append((*box[:dim], (start, min(start + steps, last)), *box[dim + 1 :]))
        return found
    return [box]
