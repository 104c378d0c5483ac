"""Which bytes of a file belong to which tensor: every tensor inside its storage, and no byte in two of them.

Tensors that are the same view of one storage are tied, which is one weight with several names. Any other overlap
(`base` and `base[:16]`) means that writing one changes the other, so neither is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from rekindle.checkpoint.parts import CheckpointError


class Extent(NamedTuple):
    """The bytes from the first to the last number of a tensor, as addresses."""

    start: int
    stop: int
    name: str


def overlapping(path: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str], tree: Any) -> dict[str, str]:
    """Each tensor that shares bytes with another one that is not the same view of them, and which; or with itself.

    `tree` is all that the file holds: also an optimizer's slot may share bytes with a weight.

    >>> import torch
    >>> base = torch.zeros(8, 4)
    >>> overlapping(Path("a.pt"), {"full": base, "part": base[:2], "other": torch.zeros(2)}, {}, {})
    {'full': 'part', 'part': 'full'}
    """
    extents = [extent(path, name, tensor) for name, tensor in tensors.items() if tensor.numel() and name not in tied]
    same = {(t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for t in tensors.values()}
    for place, tensor in _others(tree):
        # The same view under another key (a copy of the state dict) is the same weight.
        if tensor.numel() and (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype) not in same:
            extents.append(extent(path, place, tensor))
    shared = {name: "itself" for name, tensor in tensors.items() if _overlaps_itself(tensor)}
    extents.sort()
    reach: Extent | None = None
    for one in extents:
        if reach is not None and one.start < reach.stop:
            shared.setdefault(one.name, reach.name)
            shared.setdefault(reach.name, one.name)
        if reach is None or one.stop > reach.stop:
            reach = one
    return {name: other for name, other in shared.items() if name in tensors}


def extent(path: Path, name: str, tensor: Tensor) -> Extent:
    """The bytes of a tensor, which must lie in its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if tensor.storage_offset() < 0 or last < 0 or needed > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{path}: {name!r} needs {needed} bytes, its record has less")
    start = tensor.data_ptr()
    return Extent(start, start + (last + 1) * tensor.element_size(), name)


def _overlaps_itself(tensor: Tensor) -> bool:
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _others(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """Every plain tensor of a tree, with where it is; each container once, so that no cycle is followed."""
    waiting, seen = [("", tree)], set()
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, Tensor):
            if value.device.type == "cpu" and value.layout.__str__() == "torch.strided" and not value.is_quantized:
                yield place, value
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            waiting += [(f"{place}[{key!r:.100}]", inner) for key, inner in items]
