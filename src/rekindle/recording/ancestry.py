"""Where the values of a recorded pass come from, and what they are used for.

>>> import torch
>>> from torch import nn
>>> from rekindle.recording.recorder import record
>>> graph = record(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(4, 2))
>>> ancestry = Ancestry(graph)
>>> ancestry.held(graph.operations[1].inputs[2])
'0.weight'
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from rekindle.recording import operations as kinds
from rekindle.recording.graph import Graph, Operation

VIEWS = kinds.RESHAPES | kinds.SAME | {"t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "numpy_T", "mT"}
DISTANCES = {"_cdist_forward": (0, 1), "_euclidean_dist": (0, 1)}
PRODUCTS = {**kinds.PRODUCTS, **DISTANCES}
_FARTHEST = 400  # operations that are followed from a choice to what it is used for


@dataclass(frozen=True)
class Sight:
    """Where a pass shows something: an operation of a module by its number there, and which of its tensors.

    tensor: the place among the operation's inputs, or −1 − the place among its outputs.
    """

    caller: str
    operation: str
    number: int
    tensor: int


@dataclass(frozen=True)
class Slices:
    """A tensor that holds one slice for each member of a stack."""

    tensor: str
    axis: int


class Ancestry:
    """The operations of a pass by what they make and read.

    names: what modules are called.
    """

    def __init__(self, graph: Graph, names: dict[int, str] | None = None) -> None:
        self.graph, self._names = graph, names or {}
        self.made = {o: i for i, operation in enumerate(graph.operations) for o in operation.outputs if o >= 0}
        self.readers: dict[int, list[int]] = defaultdict(list)
        for index, operation in enumerate(graph.operations):
            for number in dict.fromkeys(operation.inputs):
                self.readers[number].append(index)

    def root(self, number: int) -> int:
        """The value that this one is a view of."""
        while (index := self.made.get(number)) is not None and self.graph.operations[index].name in VIEWS:
            number = self.graph.operations[index].inputs[0]
        return number

    def held(self, number: int) -> str | None:
        """The parameter or buffer that a value is a view of."""
        root = self.root(number)
        return self.graph.weights.get(root) or self.graph.buffers.get(root)

    def factors(self, operation: Operation) -> tuple[int, int] | None:
        """Of a product: the data, and the tensor of the model; their places among the inputs. None for any other."""
        places = PRODUCTS[operation.name]
        held = [self.held(operation.inputs[place]) is not None for place in places]
        if held == [False, True]:
            return places[0], places[1]
        return (places[1], places[0]) if held == [True, False] else None

    def sources(self, number: int, *, through: frozenset[str] | None = None) -> tuple[list[int], set[str], set[int]]:
        """The products from which a value comes without another one between, operations on the way, and what begins."""
        products: dict[int, None] = {}
        names: set[str] = set()
        leaves: set[int] = set()
        seen, left = {number}, [number]
        while left:
            value = left.pop()
            index = self.made.get(value)
            if index is None:
                leaves.add(value)
                continue
            operation = self.graph.operations[index]
            if operation.name in PRODUCTS:
                products[index] = None
                continue
            if through is not None and operation.name not in through:
                return [], set(), set()
            names.add(operation.name)
            for each in operation.inputs:
                if each not in seen:
                    seen.add(each)
                    left.append(each)
        return list(products), names, leaves

    def uses(self, number: int) -> Iterator[tuple[int, Operation]]:
        """The operations that use a choice, through views and one-hot tables."""
        seen, left, count = {number}, [number], 0
        while left and count < _FARTHEST:
            for index in self.readers.get(left.pop(), ()):
                operation = self.graph.operations[index]
                count += 1
                yield index, operation
                table = operation.name == "scatter" and len(operation.inputs) < 3  # of ones, not of activities
                if table or operation.name in VIEWS or operation.name in ("eq", "add", "mul", "div", "select"):
                    left += [o for o in operation.outputs if o not in seen]
                    seen.update(operation.outputs)

    def sight(self, index: int, tensor: int) -> Sight:
        """Where a later pass shows a tensor of this operation."""
        operation = self.graph.operations[index]
        first = 0
        for call in self.graph.calls:
            if call.module is operation.caller and call.first <= index and (call.last < 0 or index < call.last):
                first = call.first
        alike = [o for o in self.graph.operations[first:index] if o.caller is operation.caller]
        number = sum(each.name == operation.name for each in alike)
        return Sight(self.name_of(operation.caller), operation.name, number, tensor)

    def name_of(self, module: nn.Module | None) -> str:
        """What a module is called in the model."""
        return "" if module is None else self._names.get(id(module), "")

    def member(self, name: str, operation: Operation, place: int, size: int, *, made: bool) -> Slices:
        """Along which axis of a weight its product makes these numbers, or reads them."""
        shape = self.graph.parameters[name].shape
        if shape[0] != shape[1]:
            return Slices(name, 0 if shape[0] == size else 1)
        turned = operation.name == "linear"  # a square one: as it lies there
        number = operation.inputs[place]
        while (index := self.made.get(number)) is not None:
            turned ^= self.graph.operations[index].name in ("t", "transpose", "permute", "numpy_T", "mT")
            number = self.graph.operations[index].inputs[0]
        last = made == (place == max(PRODUCTS[operation.name]))
        return Slices(name, int(last != turned))

    def returned(self, number: int) -> bool:
        """Whether a value reaches the caller as it is, but for what parameters add."""
        ends = {
            *self.graph.returned.values(),
            *(o for call in self.graph.calls if not call.depth for o in call.outputs),
        }
        returned = ends | {self.root(number) for number in ends}
        left, seen = [number], {number}
        while left:
            value = left.pop()
            if value in returned:
                return True
            for index in self.readers.get(value, ()):
                operation = self.graph.operations[index]
                others = [n for n in operation.inputs if n != value]
                plain = operation.name in VIEWS or (
                    operation.name in ("add", "sub", "mul") and all(self.held(n) is not None for n in others)
                )
                if plain:
                    left += [o for o in operation.outputs if o not in seen]
                    seen.update(operation.outputs)
        return False

    def start(self, number: int) -> int:
        """Where a value comes from, through views and dropout."""
        number = self.root(number)
        while (index := self.made.get(number)) is not None and self.graph.operations[index].name == "native_dropout":
            number = self.root(self.graph.operations[index].inputs[0])
        return number
