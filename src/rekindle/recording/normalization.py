"""Whether a recorded pass normalized activations: a weight read what was divided by its own size.

Each value has a degree in some value before it: a square has twice its degree, a mean the same, a root half of it. A
product or quotient of degree 0 that came about by a mean of squares is a normalization, whoever wrote it. A softmax is
none (an exponential has no degree), weight standardization neither (no activation is in it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rekindle.blocks.normalization import is_norm
from rekindle.recording import operations as kinds
from rekindle.recording.graph import Graph, Operation

_HOMOGENEOUS = frozenset(
    {"neg", "abs", "relu", "leaky_relu", "clamp", "clamp_min", "native_dropout", "expand", "where"}
)
_HOMOGENEOUS |= kinds.MOVES | kinds.RESHAPES | kinds.SAME
_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
_SPREADS = {"var": (2.0,), "std": (1.0,), "var_mean": (2.0, 1.0), "norm": (1.0,), "linalg_vector_norm": (1.0,)}


@dataclass(frozen=True)
class _Size:
    """A value by what it was made of: `degree` in the value `base`, a sum over some of it, out of squares.

    `weighed`: a weight is behind it; `normalized`: a normalization is, with no weight since.
    """

    base: int
    degree: float = 1.0
    summed: bool = False
    squared: bool = False
    weighed: bool = False
    normalized: bool = False


def normalizes_in(graph: Graph) -> bool:
    """Whether some weight read a normalized value.

    >>> import torch
    >>> from torch import nn
    >>> from rekindle.recording import record
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    >>> normalizes_in(record(net, torch.zeros(4, 2))), normalizes_in(record(net[:2], torch.zeros(4, 2)))
    (True, False)
    """
    return _Sizes(graph).normalizes


class _Sizes:
    def __init__(self, graph: Graph) -> None:
        self.normalizes = False
        self._graph = graph
        self._fixed = {*graph.weights, *graph.buffers}  # made of parameters, buffers and constants alone
        self._known: dict[int, _Size] = {}
        self._by_norms = {o for call in graph.calls if is_norm(call.module) for o in call.outputs}
        for operation in graph.operations:
            if operation.name not in kinds.TABLES and self._fixed.issuperset(operation.inputs):
                self._fixed.update(operation.outputs)
            elif self._step(operation):
                self.normalizes = True
                return

    def _size(self, number: int) -> _Size:
        known = self._known.get(number) or _Size(number)
        return replace(known, normalized=True) if number in self._by_norms and known.weighed else known

    def _step(self, operation: Operation) -> bool:
        """Note what it makes; says whether a weight reads a normalized value here."""
        name = operation.name
        values = [self._size(i) for i in operation.inputs if i not in self._fixed]
        weighed = any(v.weighed for v in values)
        normalized = any(v.normalized for v in values)
        if name in kinds.PRODUCTS or name in kinds.OPAQUE:
            factors = [operation.args[i].number for i in kinds.PRODUCTS.get(name, ())] or list(operation.inputs)
            by_weight = any(number in self._fixed for number in factors)
            if by_weight and any(self._size(n).normalized for n in factors if n not in self._fixed):
                return True
            self._make(operation, weighed=weighed or by_weight, normalized=False)
        elif name in kinds.ATTENTION or name in kinds.TABLES:
            self._make(operation, weighed=True, normalized=False)
        elif name in kinds.NORMS:
            self._make(operation, weighed=weighed, normalized=weighed)
        else:
            made = self._homogeneous(operation, values) if values else None
            for i, output in enumerate(operation.outputs):
                known = made[min(i, len(made) - 1)] if made else _Size(output)
                self._known[output] = replace(
                    known, weighed=weighed, normalized=(normalized or known.normalized) and weighed
                )
        return False

    def _make(self, operation: Operation, **known: bool) -> None:
        for output in operation.outputs:
            self._known[output] = _Size(output, **known)

    def _homogeneous(self, operation: Operation, values: list[_Size]) -> list[_Size] | None:
        """What the operation makes of the degrees, None where the result has none."""
        name, first = operation.name, values[0]
        if name in ("mul", "div") and len(values) == 2:
            return self._quotient(first, values[1], 1.0 if name == "mul" else -1.0)
        if name in ("mul", "div") and len(values) == 1:
            inverted = name == "div" and operation.inputs[0] in self._fixed
            return [replace(first, degree=-first.degree)] if inverted else [first]
        if name in ("add", "sub", "rsub", "maximum"):
            alike = all(v.base == first.base and v.degree == first.degree for v in values)
            both = replace(first, summed=all(v.summed for v in values), squared=any(v.squared for v in values))
            return [both] if alike else None
        if len(values) > 1:
            return None
        if name in _POWERS or (name == "pow" and isinstance(operation.args[1], int | float)):
            power = _POWERS.get(name) or float(operation.args[1])
            return [replace(first, degree=first.degree * power, squared=first.squared or power == 2)]
        if name in _SPREADS:
            return [
                replace(first, degree=first.degree * p, summed=True, squared=p == 2 or len(_SPREADS[name]) == 1)
                for p in _SPREADS[name]
            ]
        if name in ("sum", "mean"):
            return [replace(first, summed=True)]
        return [first] if name in _HOMOGENEOUS else None

    @staticmethod
    def _quotient(one: _Size, other: _Size, sign: float) -> list[_Size] | None:
        if one.base != other.base:
            return None
        degree = one.degree + sign * other.degree
        divides = one.summed != other.summed and (one.squared if one.summed else other.squared)
        if degree == 0 and divides:
            return [_Size(one.base, 0.0, normalized=True)]
        squared = one.squared or other.squared or (sign > 0 and one.degree == other.degree)
        return [replace(one, degree=degree, summed=one.summed and other.summed, squared=squared)]
