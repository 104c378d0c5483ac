"""How matrices lie inside a tensor: index rules that can be read, written and saved as JSON.

Every layout in this library is the same small thing: split the axes of the tensor into factors, take a slice of
some of them, and sort the rest into three groups: which matrix (count), its outputs and its inputs. A pattern
names the factors, so that a layout reads like the `view` in the model's own forward:

    in (part head dim)      GPT-2's Conv1D: transposed, thirds q | k | v
    (head part dim) in      GPT-NeoX: q, k, v of head 0, then of head 1, …
    (group out) in h w      a grouped convolution, one matrix per tap and group
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

ROLES = (
    "query",
    "key",
    "value",
    "attention-output",
    "mlp-in",
    "mlp-gate",
    "mlp-out",
    "gate",
    "conv",
    "depthwise",
    "head",
    "embedding",
    "router",
    "adapter",
    "other",
)

# What a named part of a fused weight does, where the name is not itself a role.
PART_ROLES = {"gate": "mlp-gate", "up": "mlp-in", "x": "mlp-in", "z": "mlp-gate"}


class LayoutError(ValueError):
    """A tensor does not have the shape that its layout says."""


@dataclass(frozen=True)
class Layout:
    """An index rule from a tensor of `shape` to (count, out, in) matrices.

    `split` refines the shape (each axis becomes one or more factors); `take` holds (factor, start, length) slices;
    `count`, `out` and `in_` say which factors, in which order, make up the three axes of the result.

    >>> import torch
    >>> rule = Layout(shape=(4, 3), split=(2, 2, 3), count=(), out=(0, 1), in_=(2,), take=((1, 0, 1),))
    >>> rule.read(torch.arange(12).reshape(4, 3)).tolist()
    [[[0, 1, 2], [6, 7, 8]]]
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    count: tuple[int, ...]
    out: tuple[int, ...]
    in_: tuple[int, ...]
    take: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        if sorted((*self.count, *self.out, *self.in_)) != list(range(len(self.split))):
            raise LayoutError(f"each of the {len(self.split)} factors must be named once in count, out or in")
        if not _refines(self.split, self.shape):
            raise LayoutError(f"{self.split} does not split the axes of {self.shape}")
        for factor, start, length in self.take:
            if length < 1 or start < 0 or start + length > self.split[factor]:
                raise LayoutError(f"slice {start}:{start + length} is outside factor {factor} of {self.split}")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(count, out, in) of what `read` returns."""
        sizes = list(self.split)
        for factor, _, length in self.take:
            sizes[factor] = length
        count, out, in_ = (math.prod(sizes[i] for i in group) for group in (self.count, self.out, self.in_))
        return count, out, in_

    def read(self, tensor: Tensor) -> Tensor:
        """The matrices (count, out, in): a view where strides allow it, else a copy."""
        return self._window(tensor).reshape(self.sizes)

    def norms(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """‖W‖_F of each matrix, (count,), without gathering strided matrices (the taps of a convolution).

        >>> Layout((2, 2), (2, 2), (1,), (0,), ()).norms(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
        tensor([5., 1.])
        """
        window = self._window(tensor)
        inside = tuple(range(len(self.count), window.ndim))
        found: Tensor = torch.linalg.vector_norm(window, dim=inside, dtype=dtype)
        return found.reshape(-1)

    def write(self, tensor: Tensor, matrices: Tensor) -> None:
        """Copy matrices (count, out, in) into the tensor, in place; no other element is touched."""
        if tuple(matrices.shape) != self.sizes:
            raise LayoutError(f"expected matrices of shape {self.sizes}, got {tuple(matrices.shape)}")
        window = self._window(tensor)
        source = matrices.reshape(window.shape)
        if window.ndim == 2 and window.stride(0) < window.stride(1):
            window, source = window.mT, source.mT  # torch copies three times faster along the rows of what it writes
        window.copy_(source)

    def to_dict(self) -> dict[str, Any]:
        """Lists of numbers only.

        >>> Layout((2, 3), (2, 3), (), (0,), (1,)).to_dict()
        {'shape': [2, 3], 'split': [2, 3], 'count': [], 'out': [0], 'in': [1], 'take': []}
        """
        return {
            "shape": list(self.shape),
            "split": list(self.split),
            "count": list(self.count),
            "out": list(self.out),
            "in": list(self.in_),
            "take": [list(t) for t in self.take],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layout:
        """The inverse of `to_dict`."""
        shape, split, count, out, in_ = (tuple(map(int, data[k])) for k in ("shape", "split", "count", "out", "in"))
        take = tuple((int(f), int(s), int(n)) for f, s, n in data["take"])
        return cls(shape, split, count, out, in_, take)

    def _window(self, tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) != self.shape:
            raise LayoutError(f"this layout is for shape {self.shape}, the tensor has {tuple(tensor.shape)}")
        # Axes are only ever split, never merged, so this is a view for any strides (channels_last too).
        window = tensor.detach().view(self.split)
        for factor, start, length in self.take:
            window = window.narrow(factor, start, length)
        return window.permute(*self.count, *self.out, *self.in_)


@dataclass(frozen=True)
class Block:
    """The matrices of one shape that one parameter, or one part of it, holds.

    `taps` is the number of kernel positions of a convolution, 1 otherwise. `heads` are the layout's factors that
    run over attention heads; `parent` is the (out, in) before a split per head, whose scale the heads keep.

    >>> import torch
    >>> block = matrices("(head part dim) in", part=("query", "key"), head=2, heads="head")((8, 3))[1]
    >>> block.role, block.count, block.out, block.in_
    ('key', 1, 4, 3)
    >>> weight = torch.zeros(8, 3)
    >>> block.write(weight, torch.ones(1, 4, 3))
    >>> weight[:, 0].tolist()
    [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    """

    role: str
    part: str
    out: int
    in_: int
    count: int
    layout: Layout
    taps: int = 1
    heads: tuple[int, ...] = ()
    parent: tuple[int, int] | None = None

    @property
    def smaller(self) -> int:
        """k = min(out, in), the side on which an isometry's Gram matrix is the identity."""
        return min(self.out, self.in_)

    @property
    def fans(self) -> tuple[int, int]:
        """(out, in) that the scale is computed from: one matrix's, or the parent's after a split per head."""
        return self.parent or (self.out, self.in_)

    def read(self, tensor: Tensor) -> Tensor:
        """The matrices (count, out, in) of this block; may share memory with the tensor."""
        return self.layout.read(tensor)

    def write(self, tensor: Tensor, matrices: Tensor) -> None:
        """Copy matrices into the tensor in place, cast to its dtype."""
        self.layout.write(tensor, matrices)

    def per_head(self) -> Block:
        """One matrix per head where the heads are known, else the block itself.

        >>> b = matrices("(head dim) in", head=2, heads="head")((8, 3))[0].per_head()
        >>> b.count, b.out, b.fans
        (2, 4, (8, 3))
        """
        if not self.heads or self.parent:
            return self
        keep = [tuple(f for f in group if f not in self.heads) for group in (self.layout.out, self.layout.in_)]
        layout = replace(self.layout, count=(*self.layout.count, *self.heads), out=keep[0], in_=keep[1])
        count, out, in_ = layout.sizes
        return replace(self, layout=layout, count=count, out=out, in_=in_, parent=(self.out, self.in_))

    def to_dict(self) -> dict[str, Any]:
        """Everything, in JSON types."""
        return {
            "role": self.role,
            "part": self.part,
            "taps": self.taps,
            "heads": list(self.heads),
            "parent": list(self.parent) if self.parent else None,
            "layout": self.layout.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Block:
        """The inverse of `to_dict`.

        >>> block = matrices("out in")((2, 3))[0]
        >>> Block.from_dict(block.to_dict()) == block
        True
        """
        layout = Layout.from_dict(data["layout"])
        count, out, in_ = layout.sizes
        parent = (int(data["parent"][0]), int(data["parent"][1])) if data["parent"] else None
        heads = tuple(map(int, data["heads"]))
        return cls(data["role"], data["part"], out, in_, count, layout, int(data["taps"]), heads, parent)


@dataclass(frozen=True)
class Recipe:
    """A pattern that becomes blocks once the shape of the tensor is known; made by `matrices`."""

    pattern: str
    parts: tuple[tuple[str, int], ...]
    sizes: tuple[tuple[str, int], ...]
    count: tuple[str, ...]
    inputs: tuple[str, ...]
    heads: tuple[str, ...]
    taps: tuple[str, ...]
    role: str

    def __call__(self, shape: Sequence[int], role: str = "other") -> tuple[Block, ...]:
        """The blocks of a tensor of this shape; `role` is that of the whole weight where a part has none.

        Raises LayoutError when the shape does not fit the pattern.
        """
        shape = tuple(shape)
        names, split = self._solve(shape)
        place = {name: i for i, name in enumerate(names)}
        count = tuple(place[n] for n in self.count)
        in_ = tuple(place[n] for n in self.inputs)
        out = tuple(i for i, n in enumerate(names) if n not in self.count and n not in self.inputs)
        taps = math.prod(split[place[n]] for n in self.taps)
        blocks, start = [], 0
        for part, length in self.parts or (("", 0),):
            take = ((place["part"], start, length),) if self.parts else ()
            start += length
            layout = Layout(shape, split, count, out, in_, take)
            heads = tuple(place[n] for n in self.heads)
            n, rows, columns = layout.sizes
            does = _role_of(part) or self.role or role
            blocks.append(Block(does, part, rows, columns, n, layout, taps, heads))
        return tuple(blocks)

    def _solve(self, shape: tuple[int, ...]) -> tuple[list[str], tuple[int, ...]]:
        groups = _groups(self.pattern)
        if len(groups) != len(shape):
            raise LayoutError(f"pattern {self.pattern!r} has {len(groups)} axes, the tensor has shape {shape}")
        known = dict(self.sizes)
        if self.parts:
            known["part"] = sum(n for _, n in self.parts)
        names: list[str] = []
        split: list[int] = []
        for group, size in zip(groups, shape, strict=True):
            product = math.prod(known[n] for n in group if n in known)
            free = [n for n in group if n not in known]
            if len(free) > 1 or product == 0 or size % product or (not free and product != size):
                raise LayoutError(f"an axis of {size} in {shape} is not {' × '.join(group)} with {known}")
            names += group
            split += [known.get(n, size // product) for n in group]
        return names, tuple(split)


def matrices(
    pattern: str,
    *,
    part: Sequence[str] | Mapping[str, int] = (),
    count: str = "",
    inputs: str = "in",
    heads: str = "",
    taps: str = "",
    role: str = "",
    **sizes: int,
) -> Recipe:
    """Name the factors of a weight's axes; the result turns a shape into blocks.

    Factors named in `count` number the matrices, those in `inputs` are their columns, all others their rows. A
    factor called `part` is cut into blocks: a sequence of names gives one entry each, a mapping gives sizes.
    `heads` names the factors that run over attention heads. One size per bracket may be left out.

    >>> [b.part for b in matrices("in (part out)", part=("query", "key", "value"))((4, 12))]
    ['query', 'key', 'value']
    >>> grouped = matrices("(part dim) in", part={"query": 4, "key": 1, "value": 1}, heads="part")
    >>> [(b.role, b.out) for b in grouped((48, 32))]
    [('query', 32), ('key', 8), ('value', 8)]
    """
    parts = tuple(part.items()) if isinstance(part, Mapping) else tuple((name, 1) for name in part)
    names = [name for group in _groups(pattern) for name in group]
    stated = {*count.split(), *inputs.split(), *heads.split(), *taps.split(), *sizes}
    if parts:
        stated.add("part")
    if len(set(names)) != len(names) or not stated <= set(names):
        raise LayoutError(f"pattern {pattern!r} must name each factor once, and {sorted(stated - set(names))} too")
    named = tuple(tuple(text.split()) for text in (count, inputs, heads, taps))
    return Recipe(pattern, parts, tuple(sizes.items()), named[0], named[1], named[2], named[3], role)


def convolution(shape: Sequence[int], *, groups: int, transposed: bool, flat: bool) -> Recipe:
    """The recipe of a convolution weight: one matrix per tap and group, or flat: one per group, its taps side by side.

    A transposed convolution stores (in, out/groups, …).

    >>> shape = (8, 2, 3, 3)
    >>> for flat in (False, True):
    ...     block = convolution(shape, groups=2, transposed=False, flat=flat)(shape)[0]
    ...     print(block.count, block.out, block.in_, block.taps)
    18 4 2 9
    2 4 18 1
    """
    kernel = " ".join(f"k{i}" for i in range(len(shape) - 2))
    pattern = f"(group in) out {kernel}" if transposed else f"(group out) in {kernel}"
    if flat:
        return matrices(pattern, count="group", inputs=f"in {kernel}", group=groups)
    return matrices(pattern, count=f"group {kernel}", taps=kernel, group=groups)


def _role_of(part: str) -> str:
    return PART_ROLES.get(part) or (part if part in ROLES else "")


def _groups(pattern: str) -> list[list[str]]:
    return [group.strip("()").split() for group in re.findall(r"\([^()]*\)|[^\s()]+", pattern)]


def _refines(split: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    factors = list(split)
    for size in shape:
        product = 1
        while factors and (product < size or factors[0] == 1):
            product *= factors.pop(0)
        if product != size:
            return False
    return not factors


def same_rows(one: tuple[Block, ...], other: tuple[Block, ...], shape: tuple[int, ...]) -> bool:
    """Whether two layouts part a weight in the same way; of very large ones that is taken for granted."""
    if math.prod(shape) > 1 << 22:
        return True
    places = torch.arange(math.prod(shape)).view(shape)
    parts = [{frozenset(b.read(places).flatten().tolist()) for b in blocks} for blocks in (one, other)]
    return parts[0] == parts[1]
