"""Values that are made by steps (signs, rounding, levels) and go on in place of the data: codes without a table.

>>> import torch
>>> from torch import nn
>>> from rekindle.recording.recorder import record
>>> class Signs(nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.into, self.out = nn.Linear(4, 3), nn.Linear(3, 4)
...     def forward(self, x):
...         return self.out(self.into(x).sign())
>>> model = Signs()
>>> stepped(Ancestry(record(model, torch.randn(5, 4)), {id(model): "codes"}))
['codes']
"""

from __future__ import annotations

from rekindle.recording.ancestry import PRODUCTS, Ancestry

_STEPS = {"sign", "sgn", "heaviside", "round", "floor", "ceil", "trunc", "bernoulli", "bucketize", "searchsorted"}
_STEPS |= {"gt", "ge", "lt", "le"}
_LEVELS = {"index", "index_select", "take"}
_SHAPED = {"ones_like", "zeros_like", "full_like", "empty_like", "rand_like", "randn_like"}  # like it, not made of it
_SHAPED |= {"new_ones", "new_zeros", "new_full", "new_empty"}


def stepped(ancestry: Ancestry) -> list[str]:
    """The modules whose steps make values of a finite set that a weight, or the way around the step, takes for data.

    A mask is no such value: it is multiplied with data. Nor is a rounded weight, which is made of no data.
    """
    graph = ancestry.graph
    # Whether a value is made of numbers, not of ids alone; and of which steps, if of nothing else.
    known: dict[int, tuple[bool, frozenset[int]]] = {}

    def data(number: int) -> tuple[bool, frozenset[int]] | None:
        """None: a constant."""
        if number in ancestry.made or ancestry.held(number) is not None or len(graph.shapes[number]) < 2:
            return known.get(number)
        return graph.floating[number], frozenset()

    found: dict[int, None] = {}
    for index, operation in enumerate(graph.operations):
        read = {n: each for n in operation.inputs if (each := data(n)) is not None}
        if not read or operation.name in _SHAPED:
            continue
        numbers = any(made for made, _ in read.values())
        steps = frozenset[int]().union(*(of for _, of in read.values())) if all(of for _, of in read.values()) else None
        if operation.name in PRODUCTS:
            factors = ancestry.factors(operation)
            if steps and factors is not None:
                found |= dict.fromkeys(steps)
            steps = None
        elif not steps:
            levels = operation.name in _LEVELS and len(graph.shapes[operation.inputs[0]]) == 1
            if numbers and (levels or (operation.name in _STEPS and graph.floating[operation.inputs[0]])):
                steps = frozenset([index])
            elif operation.name == "add" and len(operation.inputs) == 2:
                found |= dict.fromkeys(_around(ancestry, known, *operation.inputs))
                found |= dict.fromkeys(_around(ancestry, known, *operation.inputs[::-1]))
        known |= {o: (numbers or graph.floating[o], steps or frozenset()) for o in operation.outputs}
    return list(dict.fromkeys(ancestry.name_of(graph.operations[index].caller) for index in sorted(found)))


def _around(ancestry: Ancestry, known: dict[int, tuple[bool, frozenset[int]]], data: int, rest: int) -> frozenset[int]:
    """Of z + (steps − z), with no gradient through the bracket: these steps."""
    index = ancestry.made.get(ancestry.root(rest))
    if index is None or ancestry.graph.operations[index].name != "sub":
        return frozenset()
    inputs = ancestry.graph.operations[index].inputs
    same = len(inputs) == 2 and ancestry.root(inputs[1]) == ancestry.root(data)
    return known.get(inputs[0], (False, frozenset[int]()))[1] if same else frozenset()
