"""What a method has worked out about a model, for as long as the model consists of the same modules and parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_, methodcaller
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
        self._kept: weakref.WeakKeyDictionary[nn.Module, tuple[_Parts, Value]] = weakref.WeakKeyDictionary()

    def get(self, model: nn.Module, make: Callable[[], Value], stale: Callable[[Value], object] = id) -> Value:
        """The value for this model; `stale` is first called with the old value, if there was one."""
        known = self._kept.get(model)
        if known is not None:
            if known[0].are_the_same():
                return known[1]
            stale(known[1])
        value = make()
        self._kept[model] = _Parts(model), value
        return value

    def current(self, model: nn.Module) -> Value | None:
        """The value for this model if it is there and the model is as it was; None otherwise."""
        known = self._kept.get(model)
        return known[1] if known is not None and known[0].are_the_same() else None

    def __contains__(self, model: nn.Module) -> bool:
        return model in self._kept

    def clear(self) -> None:
        """Forget every model."""
        self._kept.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return (PerModel, ())


class _Parts:
    """The modules and parameters inside a model, by the tables that hold them: asked at every step, so no loop here."""

    def __init__(self, model: nn.Module) -> None:
        self._tables: list[dict[str, Any]] = [
            table for module in model.modules() for table in (module._modules, module._parameters)
        ]
        self._held = [*chain.from_iterable(map(_values, self._tables))]
        self._parameters = [part for part in self._held if isinstance(part, nn.Parameter)]
        self._kinds = [*map(_kind, self._parameters)]

    def are_the_same(self) -> bool:
        held = [*chain.from_iterable(map(_values, self._tables))]
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            return False
        return [*map(_kind, self._parameters)] == self._kinds


_values = methodcaller("values")
_kind = attrgetter("requires_grad", "dtype", "device")
