"""Seeing single values of a pass again: those that a recording has found, in passes that run later.

>>> import torch
>>> from rekindle.recording.ancestry import Sight
>>> seen = []
>>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
>>> with Sightings(net, {Sight("0", "addmm", 0, -1): seen.append}):
...     _ = net(torch.zeros(4, 2))
>>> [tuple(value.shape) for value in seen]
[(4, 3)]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.recording.ancestry import Sight
from rekindle.recording.recorder import PassMode

Look = Callable[[Tensor], object]


class Sightings(PassMode):
    """While open, calls the function of each sight with its value, whenever a pass comes there."""

    def __init__(self, model: nn.Module, looks: Mapping[Sight, Look]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(module): name for name, module in model.named_modules()}
        self._looks: dict[tuple[str | None, str], dict[int, list[tuple[int, Look]]]] = defaultdict(dict)
        for sight, look in looks.items():
            numbers = self._looks[sight.caller, sight.operation]
            numbers.setdefault(sight.number, []).append((sight.tensor, look))
        self._operations = {sight.operation for sight in looks}
        self._stack: list[tuple[str | None, dict[str, int]]] = [("", {})]

    def _enter_module(self, module: nn.Module, args: object) -> None:
        self._stack.append((self._names.get(id(module)), {}))

    def _leave_module(self, module: nn.Module, args: object, result: object) -> None:
        if len(self._stack) > 1:
            self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func._schema.is_mutable:
            name = name.rstrip("_")
        if name not in self._operations or torch._C._current_graph_task_id() != -1:
            return func(*args, **kwargs)
        caller, counts = self._stack[-1]
        number = counts[name] = counts.get(name, -1) + 1
        looks = self._looks[caller, name].get(number, ()) if (caller, name) in self._looks else ()
        given = list(_tensors((args, kwargs))) if looks else []
        result = func(*args, **kwargs)
        made = result if isinstance(result, list | tuple) else (result,)
        for place, look in looks:
            look(given[place] if place >= 0 else made[-1 - place])
        return result


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
