"""Stacks of which a pass uses a part: experts, codes, latents, ranks, rows of a table; found by what they do.

A *choice* (topk, argmax) among n scores that come from a product with a weight is a router where the model holds n
experts, and a nearest neighbor where the chosen numbers look up rows of what was compared. Latents are activities that
are wholly zero for most inputs: of a choice, or of a rectifier between two products that map an input to itself. A pair
of products beside a third one on the same input is an adapter, whose inner numbers are ranks.

>>> import torch
>>> from rekindle.recording.recorder import record
>>> class Quantizer(nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.codes = nn.Parameter(torch.randn(8, 4))
...     def forward(self, x):
...         return self.codes[torch.cdist(x, self.codes).argmin(-1)]
>>> [(stack.kind, stack.name, stack.size) for stack in stacks_in(record(Quantizer(), torch.randn(5, 4))).stacks]
[('codes', 'codes', 8)]
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from torch import nn

from rekindle.recording.ancestry import DISTANCES, PRODUCTS, VIEWS, Ancestry, Sight, Slices
from rekindle.recording.graph import Graph, Operation
from rekindle.recording.steps import stepped

Kind = Literal["experts", "codes", "latents", "ranks", "rows"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_CHOICES = {"topk": 1, "argmax": 0, "argmin": 0, "max": 1, "min": 1, "sort": 1, "multinomial": 0}  # output: indices
_LOOKUPS = {"gather": 0, "index": 0, "index_select": 0, "embedding": 0}
# Operations that may give zeros.
_GATES = {"relu", "relu6", "threshold", "topk", "sort", "kthvalue", "gt", "ge", "lt", "le", "clamp_min", "clamp"}
_ADDED = {"add", "addmm", "linear"}
_FEWEST = 8  # inputs of an autoencoder that only a rectifier tells
_STEPPED = "its codes are made by rounding, signs or levels (as in FSQ, LFQ): there is no table whose entries could die"


@dataclass(frozen=True)
class UnitStack:
    """`size` units of one kind; of codes, in so many `books` of equal size.

    holds: the tensors that hold the members, by what they are: "codes"; "router" and the parameters of experts (or
        "modules", the prefix of a ModuleList); "encoder" and "decoder"; "bias …" and "vector …", of one number each;
        "down", "up" and "base", to which `factor` times their product is added.
    chosen: where numbers of members are chosen (indices). active: where their activity shows (zero: not used).
    inputs: what they are compared with; outputs: what is made of them.
    gated: whether latents are chosen (TopK) and not only rectified. sure: whether the pass alone shows that they are
        latents; else it depends on what the decoder makes. refusal: why they cannot be changed.
    """

    kind: Kind
    name: str
    size: int
    holds: Mapping[str, Slices] = field(default_factory=dict)
    chosen: tuple[Sight, ...] = ()
    active: tuple[Sight, ...] = ()
    inputs: Sight | None = None
    outputs: Sight | None = None
    books: int = 1
    factor: float = 1.0
    gated: bool = False
    sure: bool = True
    refusal: str = ""


@dataclass(frozen=True)
class Stacks:
    """All stacks of a model, and what looks like one and cannot be measured, with the reason."""

    stacks: tuple[UnitStack, ...] = ()
    unmeasured: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.stacks or self.unmeasured)


def stacks_in(graph: Graph, units: Mapping[str, str | None] | None = None, model: nn.Module | None = None) -> Stacks:
    """The stacks that a recorded pass shows.

    units: kinds by hand, for parameters or buffers that hold members: {"codebook.embed": "codes"}; None: leave it out.
    model: names the modules; by default those of the recording are asked for theirs.
    """
    for name, kind in (units or {}).items():
        if kind is not None and kind not in KINDS:
            raise ValueError(f"units: {name!r} is of a kind {kind!r}; the kinds are {', '.join(KINDS)}")
    return _Search(graph, dict(units or {}), model).result()


class _Search:
    def __init__(self, graph: Graph, units: dict[str, str | None], model: nn.Module | None) -> None:
        self.graph, self.units = graph, units
        names = {} if model is None else {id(module): name for name, module in model.named_modules()}
        self.ancestry = Ancestry(graph, names)
        self.lists = {} if model is None else _lists(model)
        self.found: dict[tuple[str, str], UnitStack] = {}
        self.unmeasured: dict[str, str] = {}

    def result(self) -> Stacks:
        for index, operation in enumerate(self.graph.operations):
            if operation.name in _CHOICES:
                self._choice(index, operation)
            elif operation.name in PRODUCTS:
                self._latents(index, operation)
            elif operation.name == "add":
                self._ranks(operation)
            elif operation.name == "embedding":
                self._rows(index, operation)
        for name in stepped(self.ancestry):
            self.unmeasured[name or "(model)"] = _STEPPED
        used: dict[str, list[str]] = defaultdict(list)
        for stack in self.found.values():
            for member in stack.holds.values():
                used[member.tensor].append(stack.name)
        shared = {tensor: names for tensor, names in used.items() if len({*names}) > 1}
        stacks = [replace(s, refusal=s.refusal or _tied(s, shared)) for s in self.found.values()]
        known = {member.tensor for stack in stacks for member in stack.holds.values()} | {s.name for s in stacks}
        for name, kind in self.units.items():
            if kind is not None and name not in known:
                self.unmeasured[name] = f"it was named as {kind}, and the pass does not use it as such"
        left = tuple(stack for stack in stacks if not self._left_out(stack))
        return Stacks(left, self.unmeasured)

    def _left_out(self, stack: UnitStack) -> bool:
        names = {stack.name, *(member.tensor for member in stack.holds.values())}
        return any(name in self.units and self.units[name] is None for name in names)

    def _named(self, kind: Kind, *tensors: str | None) -> bool:
        """Whether the caller says that one of these holds units of this kind."""
        return any(tensor is not None and self.units.get(tensor) == kind for tensor in tensors)

    def _add(self, stack: UnitStack) -> None:
        """One more; a second choice among the same members is another place where the same stack shows."""
        key = (stack.kind, stack.name)
        old = self.found.get(key)
        if old is not None:
            sights = tuple(dict.fromkeys((*old.chosen, *stack.chosen)))
            callers = list(dict.fromkeys(sight.caller for sight in sights))
            shared = f"{stack.name} is shared by {', '.join(callers)}" if len(callers) > 1 else ""
            active = tuple(dict.fromkeys((*old.active, *stack.active)))
            stack = replace(old, chosen=sights, active=active, refusal=old.refusal or shared)
        self.found[key] = stack

    # The kinds

    def _choice(self, index: int, operation: Operation) -> None:
        shape = self.graph.shapes[operation.inputs[0]]
        output = _CHOICES[operation.name]
        if not shape or output >= len(operation.outputs) or not _along_last(operation, len(shape)):
            return
        size, chosen = shape[-1], self.ancestry.sight(index, -1 - output)
        if size < 2:
            return
        products, _, leaves = self.ancestry.sources(operation.inputs[0])
        for source in products:
            product = self.graph.operations[source]
            if self.graph.shapes[product.outputs[0]][-1:] != (size,):
                continue
            factors, places = self.ancestry.factors(product), PRODUCTS[product.name]
            for data, table in [factors] if factors is not None else [places, places[::-1]]:
                root = self.ancestry.root(product.inputs[table])
                stack = self._codes(operation.outputs[output], root, size)
                if stack is None and factors is not None:
                    stack = self._experts(self.graph.weights.get(root), size, self._vectors(product, leaves, size))
                if stack is not None:
                    self._add(replace(stack, chosen=(chosen,), inputs=self.ancestry.sight(source, data)))
                    return

    def _codes(self, indices: int, table: int, size: int) -> UnitStack | None:
        """A nearest neighbor: the chosen numbers look up what was compared."""
        held = self.graph.weights.get(table) or self.graph.buffers.get(table)
        shape = self.graph.shapes[table]
        looked_up = self._named("codes", held) or any(
            self.ancestry.root(use.inputs[place]) == table
            for _, use in self.ancestry.uses(indices)
            for place in ((_LOOKUPS[use.name],) if use.name in _LOOKUPS else PRODUCTS.get(use.name, ()))
            if place < len(use.inputs)
        )
        if not looked_up or size not in (shape[:-1] or shape):
            return None
        if held is None:
            if table not in self.ancestry.made:
                return None
            name = self.ancestry.name_of(self.graph.operations[self.ancestry.made[table]].caller)
            return UnitStack("codes", name or "codes", size, refusal="its codes are computed from other weights")
        axis = max(i for i, n in enumerate(shape[:-1] or shape) if n == size)
        books = math.prod(shape[:axis])
        return UnitStack("codes", held, size * books, {"codes": Slices(held, axis)}, books=books)

    def _experts(self, router: str | None, size: int, added: dict[str, Slices]) -> UnitStack | None:
        """A router: the nearest module around it that holds `size` of something. `added` to its scores."""
        if router is None:
            return None
        shape = self.graph.parameters[router].shape
        axis = next((i for i, n in enumerate(shape) if n == size), None)
        if axis is None:
            return None
        parts = router.split(".")
        for depth in range(len(parts) - 1, -1, -1):
            prefix = "".join(f"{part}." for part in parts[:depth])
            held = {  # one slice for each expert
                name: parameter
                for name, parameter in self.graph.parameters.items()
                if name.startswith(prefix) and name != router and parameter.shape[:1] == (size,)
            }
            homes = {
                name.rpartition(".")[0]
                for name, parameter in held.items()
                if parameter.ndim > 2 or (parameter.ndim == 2 and parameter.shape[1] != shape[1 - axis])
            }
            others = {member.tensor for member in added.values()}
            stacked = {n: Slices(n, 0) for n in held if n.rpartition(".")[0] in homes and n not in others}
            lists = [path for path, each in self.lists.items() if f"{path}.".startswith(prefix) and len(each) == size]
            if stacked or lists:
                modules = {} if stacked else {"modules": Slices(lists[0], 0)}
                holds = {"router": Slices(router, axis), **added, **stacked, **modules}
                one = bool(modules) and len({*map(id, self.lists[lists[0]])}) < size
                refusal = f"several experts of {lists[0]} are one module" if one else ""
                return UnitStack("experts", prefix.rstrip(".") or router, size, holds, refusal=refusal)
        if self._named("experts", router):
            return UnitStack(
                "experts", router, size, {"router": Slices(router, axis)}, refusal="its experts are not found"
            )
        return None

    def _latents(self, index: int, operation: Operation) -> None:
        """Activities that are zero for most inputs, read by a second product."""
        factors = self.ancestry.factors(operation)
        if factors is None or operation.name in DISTANCES:
            return
        data, place = factors
        decoder = self.graph.weights.get(self.ancestry.root(operation.inputs[place]))
        if decoder is None or len(self.graph.shapes[self.ancestry.root(operation.inputs[place])]) != 2:
            return
        activity = operation.inputs[data]
        size = self.graph.shapes[activity][-1]
        sources, names, leaves = self.ancestry.sources(activity)
        encoders = [i for i in sources if self.graph.shapes[self.graph.operations[i].outputs[0]][-1:] == (size,)]
        if len(encoders) != 1 or not names & _GATES:
            return
        first = self.graph.operations[encoders[0]]
        factors = self.ancestry.factors(first)
        encoder = None if factors is None else self.graph.weights.get(self.ancestry.root(first.inputs[factors[1]]))
        if factors is None or encoder is None or self.graph.parameters[encoder].ndim != 2:
            return
        read, made = self.graph.shapes[first.inputs[factors[0]]][-1], self.graph.shapes[operation.outputs[0]][-1]
        chosen = bool(names & {"topk", "sort", "kthvalue"}) and size > 2
        rectified = _FEWEST <= read == made < size and self.ancestry.returned(operation.outputs[0])
        sure = (chosen and len(sources) == 1) or self._named("latents", encoder, decoder)
        if not (sure or rectified):
            return
        holds = {"encoder": self.ancestry.member(encoder, first, factors[1], size, made=True)}
        holds |= self._vectors(first, leaves, size)
        tied = encoder == decoder
        if not tied:
            holds["decoder"] = self.ancestry.member(decoder, operation, place, size, made=False)
        refusal = f"encoder and decoder are one weight ({encoder})" if tied else ""
        name = encoder.rpartition(".")[0] or encoder
        sights = (self.ancestry.sight(index, data),)
        inputs, outputs = self.ancestry.sight(encoders[0], factors[0]), self.ancestry.sight(index, -1)
        self._add(
            UnitStack(
                "latents",
                name,
                size,
                holds,
                active=sights,
                inputs=inputs,
                outputs=outputs,
                gated=chosen,
                sure=sure,
                refusal=refusal,
            )
        )

    def _vectors(self, product: Operation, leaves: set[int], size: int) -> dict[str, Slices]:
        """Biases, thresholds: one number for each member, which enters between a product and what is made of it."""
        if product.name in ("addmm", "linear") and len(product.inputs) > 2:
            leaves = leaves | {product.inputs[0 if product.name == "addmm" else 2]}
        found = {}
        for number in sorted(leaves):
            own = self.ancestry.held(number)
            if own is not None and self.graph.shapes[self.ancestry.root(number)] == (size,):
                readers = {self.graph.operations[i].name for i in self.ancestry.readers.get(number, ())}
                found[f"{'bias' if readers & _ADDED else 'vector'} {own}"] = Slices(own, 0)
        return found

    def _ranks(self, operation: Operation) -> None:
        """x·W + (x·A)·B: the inner numbers of the pair."""
        if len(operation.inputs) != 2:
            return
        way = frozenset(VIEWS | {"mul", "div", "native_dropout"})
        ends = [self.ancestry.sources(number, through=way)[0] for number in operation.inputs]
        if any(len(each) != 1 for each in ends):
            return
        for up, base in ((ends[0][0], ends[1][0]), (ends[1][0], ends[0][0])):
            second, beside = self.graph.operations[up], self.graph.operations[base]
            outer, whole = self.ancestry.factors(second), self.ancestry.factors(beside)
            if outer is None or whole is None:
                continue
            inner = self.ancestry.sources(second.inputs[outer[0]], through=way)[0]
            if len(inner) != 1 or inner[0] == base:
                continue
            first = self.graph.operations[inner[0]]
            factors = self.ancestry.factors(first)
            if factors is None or self.ancestry.start(beside.inputs[whole[0]]) != self.ancestry.start(
                first.inputs[factors[0]]
            ):
                continue
            names = [
                self.ancestry.held(o.inputs[f[1]]) for o, f in ((first, factors), (second, outer), (beside, whole))
            ]
            size = self.graph.shapes[second.inputs[outer[0]]][-1]
            weights = [self.graph.parameters.get(name or "") for name in names]
            down, upper, wide = weights
            if down is None or upper is None or wide is None or not (down.ndim == upper.ndim == 2 and size):
                continue
            if size >= min(max(down.shape), max(upper.shape)):
                continue
            holds = {
                "down": self.ancestry.member(str(names[0]), first, factors[1], size, made=True),
                "up": self.ancestry.member(str(names[1]), second, outer[1], size, made=False),
                "base": self.ancestry.member(
                    str(names[2]), beside, whole[1], self.graph.shapes[beside.outputs[0]][-1], made=True
                ),
            }
            factor = 1.0  # alpha / rank
            number = operation.inputs[0 if up == ends[0][0] else 1]
            while (step := self.ancestry.made.get(number)) is not None and step != up:
                passed = self.graph.operations[step]
                if passed.name == "mul" and len(passed.args) > 1 and isinstance(passed.args[1], int | float):
                    factor *= passed.args[1]
                number = passed.inputs[0]
            self._add(UnitStack("ranks", str(names[0]), size, holds, factor=factor))
            return

    def _rows(self, index: int, operation: Operation) -> None:
        name = self.ancestry.held(operation.inputs[0])
        if name in self.graph.parameters and ("codes", str(name)) not in self.found:
            size = self.graph.shapes[operation.inputs[0]][0]
            if size > 1:
                self._add(
                    UnitStack("rows", str(name), size, {"rows": Slices(str(name), 0)}, (self.ancestry.sight(index, 1),))
                )


def _along_last(operation: Operation, ndim: int) -> bool:
    """Whether a choice is made along the last axis."""
    place = {"topk": 2, "max": 1, "min": 1, "sort": 1, "argmax": 1, "argmin": 1, "multinomial": 9}[operation.name]
    dim = operation.kwargs.get("dim", operation.args[place] if len(operation.args) > place else -1)
    return dim in (-1, ndim - 1)


def _tied(stack: UnitStack, shared: Mapping[str, Iterable[str]]) -> str:
    for member in stack.holds.values():
        if member.tensor in shared and stack.kind not in ("rows",):
            return f"{member.tensor} is shared by {', '.join(dict.fromkeys(shared[member.tensor]))}"
    return ""


def _lists(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Lists and dicts of like modules, by path."""
    found = {}
    for name, module in model.named_modules():
        members = list(module._modules.values()) if isinstance(module, nn.ModuleList | nn.ModuleDict) else []
        shapes = {tuple((n, tuple(p.shape)) for n, p in member.named_parameters()) for member in members}
        if len(members) > 1 and len(shapes) == 1 and next(iter(shapes)):
            found[name] = members
    return found
