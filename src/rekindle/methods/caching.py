"""What a method has worked out about a model, for as long as the model consists of the same modules and parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import nn

Value = TypeVar("Value")


class PerModel(Generic[Value]):
    """One value per model, made again when a module or parameter was replaced, frozen, cast or moved.

    `load_state_dict(assign=True)` replaces parameters, and so does a new layer in an old place: an old value would
    keep changing weights that are no longer used. A model is forgotten with its last reference; a pickled or copied
    cache is empty.

    >>> model, cache = nn.Sequential(nn.Linear(1, 1)), PerModel()
    >>> [cache.get(model, lambda: "first"), cache.get(model, lambda: "again")]
    ['first', 'first']
    >>> model[0] = nn.Linear(1, 1)
    >>> cache.get(model, lambda: "second")
    'second'
    """

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], Value]] = weakref.WeakKeyDictionary()

    def get(self, model: nn.Module, make: Callable[[], Value], stale: Callable[[Value], object] = id) -> Value:
        """The value for this model; `stale` is first called with the old value, if there was one."""
        parts = _parts(model)
        known = self._kept.get(model)
        if known is not None:
            if len(known[0]) == len(parts) and all(map(_is, known[0], parts)):
                return known[1]
            stale(known[1])
        value = make()
        self._kept[model] = [_mark(part) for part in parts], value
        return value

    def clear(self) -> None:
        """Forget every model."""
        self._kept.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return (PerModel, ())


def _parts(model: nn.Module) -> list[nn.Module | nn.Parameter]:
    found: list[nn.Module | nn.Parameter] = []
    for module in model.modules():
        found.append(module)
        found += [parameter for parameter in module._parameters.values() if parameter is not None]
    return found


def _mark(part: nn.Module | nn.Parameter) -> tuple[Any, ...]:
    reference = weakref.ref(part)
    return (reference, *_kind(part))


def _kind(part: nn.Module | nn.Parameter) -> tuple[Any, ...]:
    return () if isinstance(part, nn.Module) else (part.requires_grad, part.dtype, part.device)


def _is(mark: tuple[Any, ...], part: nn.Module | nn.Parameter) -> bool:
    return mark[0]() is part and mark[1:] == _kind(part)
