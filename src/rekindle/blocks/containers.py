"""Values that hold others while a class's source is read: tuples, lists, dicts, dataclasses, what a call returns."""

from __future__ import annotations

import ast
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from torch import nn

from rekindle.blocks.values import EMPTY, Cut, Uses, Value

_NONE: frozenset[Any] = frozenset()
_NOTHING = Value(items=())


class Containers:
    """Makes, joins and opens `Value`s."""

    def __init__(self, module: nn.Module, methods: dict[str, list[ast.FunctionDef]]) -> None:
        self.module, self.methods = module, methods
        self.uses = Uses()
        self.cuts: dict[Any, Cut] = {}
        self.given: dict[str, frozenset[int]] = {}
        self.inputs: dict[int, str] = {}  # the arguments of the class's methods, as they came
        self.residual: set[str] = set()  # what is added to what it was computed from
        self.related: set[tuple[str, str]] = set()  # arguments of submodules from which others were computed
        self.attributes: dict[str, Value] = {}
        self.reached: set[str] = set()
        self.next, self.steps = 0, 0
        self.stack: list[tuple[str, int]] = []
        self.plain: dict[str, bool] = {}
        self.loops = 0  # around the statement that is read
        self.arguments: dict[int, list[Value]] = {}  # of each call, by its node
        self.returned: list[Value] = []  # by the method that was read last
        self.fields: dict[tuple[frozenset[int], str], Value] = {}  # of what a call returned, by key
        self.results: dict[frozenset[int], Value] = {}  # what calls returned, before anything was put into it

    def _fresh(self, *sources: Value, **known: Any) -> Value:
        """A new value computed from these."""
        self.next += 1
        me = frozenset({self.next})
        value = Value(
            ids=me,
            ancestors=me.union(*(s.ancestors for s in sources)),
            near=_NONE.union(*(s.near for s in sources)),
            taint=_NONE.union(*(s.taint for s in sources)),
            parts=_NONE.union(*(s.parts for s in sources)),
        )
        return replace(value, **known)

    @staticmethod
    def _merged(*values: Value) -> Value:
        """One of these; which one is not known."""
        present = [v for v in values if v not in (EMPTY, _NOTHING)] or [v for v in values if v == _NOTHING][:1]
        if len(present) < 2:
            return present[0] if present else EMPTY
        first = present[0]
        items = None
        if all(v.items is not None for v in present):  # what comes last may be left out
            each = zip_longest(*(v.items or () for v in present), fillvalue=EMPTY)
            items = tuple(Containers._merged(*values) for values in each)
        sets = {
            name: _NONE.union(*(getattr(v, name) for v in present))
            for name in ("ids", "ancestors", "direct", "near", "taint", "parts")
        }
        return Value(
            **sets,  # type: ignore[arg-type]
            viewed=any(v.viewed for v in present),
            turned=any(v.turned for v in present),
            split=next((v.split for v in present if v.split is not None), None),
            module=next((v.module for v in present if v.module is not None), None),
            items=items,
            result=first.result if all(v.result == first.result for v in present) else None,
            named=Containers._by_name(present),
        )

    @staticmethod
    def _by_name(values: list[Value]) -> tuple[tuple[str, Value], ...]:
        """The keys of one of these dicts; a dict without the key may get it from elsewhere."""
        keys = dict.fromkeys(key for value in values for key, _ in value.named)
        if not keys or not all(value.named or value.result for value in values):
            return ()
        held = [dict(value.named) for value in values]
        return tuple((key, Containers._merged(*(h[key] for h in held if key in h))) for key in keys)

    def _field(self, value: Value, key: str) -> Value:
        """What a dict or dataclass, or all that a call returned, has under this key."""
        for name, held in value.named:
            if name == key:
                return held
        if value.result is None:
            return replace(value, named=())
        known = self.fields.get((value.ids, key))
        if known is None:
            here = frozenset({f"{value.result}#{key}"})
            known = self._fresh(self.results.get(value.ids, value), direct=here, near=here)
            known = replace(known, taint=(known.taint - {value.result}) | here)
            self.fields[value.ids, key] = known
        return known

    def _with_field(self, value: Value, key: str, held: Value) -> Value:
        """The same dict with this under that key."""
        named = (*((k, v) for k, v in value.named if k != key), (key, held))
        return replace(self._holding(value, held), named=named)

    def _holding(self, value: Value, *held: Value) -> Value:
        """The same dict with these too, under unknown keys."""
        whole = self._merged(*(replace(self._flat(v), named=(), items=None) for v in (value, *held)))
        return replace(self._fresh(whole), direct=value.direct, result=value.result, named=value.named, ids=value.ids)

    def _flat(self, value: Value) -> Value:
        """A tuple or list as one value."""
        if not value.items:
            return value
        return replace(self._merged(value, *(self._flat(v) for v in value.items)), module=None, items=None)

    def _elements(self, value: Value) -> list[Value]:
        """What a loop runs over, one after the other where they are modules that are written out."""
        if value.items and all(item.module for item in value.items):
            return list(value.items)
        return [self._element(value)]

    def _element(self, value: Value) -> Value:
        """What iterating gives."""
        if value.module is not None:
            return Value(module=f"{value.module}.*".lstrip("."))
        if value.items:
            return self._merged(*value.items)
        if value.result is not None or value.named:
            return replace(value, result=None, named=())
        return self._part(value, "each") if value.split is not None else value

    def _part(self, value: Value, index: str) -> Value:
        if value.split is None:
            return value
        cut = self.cuts[value.split]
        cut.parts.add(index)
        return self._fresh(value, parts=value.parts | {(value.split, index)}, viewed=value.viewed)

    def _iterated(self, name: str, arguments: list[Value]) -> Value:
        if name in ("reversed", "list", "tuple", "sorted", "iter"):
            return arguments[0] if arguments else EMPTY
        each = tuple(self._element(a) for a in arguments)
        pair = (EMPTY, *each) if name == "enumerate" else each
        return Value(items=(Value(items=pair),))  # iterating gives this one element
