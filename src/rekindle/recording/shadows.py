"""Shadows: integer tensors beside values, which name the row of a weight behind each element.

A row is named by the flat index, in its parameter, of the row's first element; -1 where there is none. Axes along which
nothing changes are expanded (stride 0), so a shadow of a large activation is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_FEW = 4096  # elements that Python sorts out faster than torch
_LARGEST = 1 << 24  # elements of a shadow that is looked at; larger ones are sampled along their first axes


def compact(shadow: Tensor) -> Tensor:
    """The same numbers with one element along each axis on which nothing changes.

    >>> compact(torch.arange(3).expand(5, 3)).shape
    torch.Size([1, 3])
    """
    for axis, (size, stride) in enumerate(zip(shadow.shape, shadow.stride(), strict=True)):
        if stride == 0 and size > 1:
            shadow = shadow.narrow(axis, 0, 1)
    return shadow


def rows_in(shadows: Iterable[Tensor]) -> frozenset[int]:
    """The rows that these shadows name."""
    rows: set[int] = set()
    for shadow in shadows:
        small = compact(shadow)
        while small.numel() > _LARGEST:
            axis = max(range(small.dim() - 1), key=lambda i: small.shape[i], default=0)
            small = small.narrow(axis, 0, max(1, small.shape[axis] // 8))
        rows.update((small.flatten() if small.numel() < _FEW else torch.unique(small)).tolist())
    rows.discard(-1)
    return frozenset(rows)


def varies(shadow: Tensor, axis: int) -> bool:
    """Whether different rows lie along this axis.

    >>> varies(torch.arange(3).expand(5, 3), 1), varies(torch.arange(3).expand(5, 3), 0)
    (True, False)
    """
    if shadow.dim() == 0 or shadow.shape[axis] < 2 or shadow.stride(axis) == 0:
        return False
    small = compact(shadow)
    return bool((small != small.narrow(axis, 0, 1)).any())


def resized(shadow: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The shadow of a value that an operation made of this one element by element, or by pooling; None if unclear.

    >>> pooled = resized(torch.arange(3).view(1, 3, 1, 1).expand(2, 3, 8, 8), (2, 3, 4, 4))
    >>> pooled.shape
    torch.Size([2, 3, 4, 4])
    """
    if tuple(shadow.shape) == shape:
        return shadow
    if shadow.dim() == len(shape):
        for axis, size in enumerate(shape):
            if shadow.shape[axis] != size and shadow.shape[axis] != 1:
                if shadow.is_meta or not shadow.shape[axis] or varies(shadow, axis):
                    return None
                shadow = shadow.narrow(axis, 0, 1)
    elif shadow.dim() > len(shape):
        return None
    try:
        return shadow.expand(shape)
    except RuntimeError:
        return None


def reshaped(shadow: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The shadow of a view of another shape with the same elements, in order."""
    if shadow.numel() != math.prod(shape) or shadow.numel() > 1 << 28:
        return None
    return shadow.reshape(shape)


def reduced(shadow: Tensor, axes: Iterable[int], keep: bool) -> Tensor | None:
    """The shadow of a sum over these axes, None where rows are added up."""
    for axis in sorted((a % max(shadow.dim(), 1) for a in axes), reverse=True):
        if shadow.dim() == 0:
            return shadow
        if varies(shadow, axis):
            return None
        shadow = shadow.narrow(axis, 0, 1) if keep else shadow.select(axis, 0)
    return shadow
