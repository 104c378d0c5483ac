"""The autograd graph of a real run: its products with parameters, and which elements of a parameter a place depends on.

Shares nothing with `rekindle`. Each node of the graph can be called with a gradient, so a mask that is sent back from a
place through every split, slice or permutation names exactly the rows of the weight that arrive there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

Node = Any  # torch.autograd.graph.Node, whose saved attributes have no types
Place = tuple[Node, int]  # a node that reads a value, and which of its operands that is

PRODUCT = re.compile(
    r"(Addmm|Mm|Bmm|Baddbmm|Addbmm|\w*Convolution\w*|Mv|Addmv|Dot|Linear|Cdist|EuclideanDist|MkldnnRnnLayer|_?GroupedMm|Trilinear"
    r"|_?ScaledDotProduct\w*)Backward\d*"
)
ATTENTION = re.compile(r"_?ScaledDotProduct\w*")
ADDS_FIRST = re.compile(r"(Addmm|Baddbmm|Addbmm|Addmv)Backward\d*")
LOOKUP = re.compile(r"Embedding\w*Backward\d*")
# Operations that move, repeat, pool or sum elements: their own backward is the way back for a mask.
MOVE = re.compile(
    r"(\w*View\w*|Reshape\w*|T|Transpose|Permute|Split\w*|UnsafeSplit\w*|Slice|Select|Unbind|Squeeze|Unsqueeze|Expand"
    r"|Clone|Alias|ToCopy|Cat|Stack|Index|IndexSelect|Gather|Narrow|Flip|Roll|Repeat\w*|Unfold|Im2Col|Col2Im|AsStrided"
    r"|ConstantPadNd|Pixel\w+|ChannelShuffle\w*|Mean|Sum|AvgPool\w*|AdaptiveAvgPool\w*|MkldnnAdaptiveAvgPool\w*"
    r"|Upsample\w*|Pad\w*|Diagonal\w*|ReflectionPad\w*|ReplicationPad\w*|MkldnnMaxPool\w*|MaxPool\w*|Movedim"
    r"|ViewAsComplex|ViewAsReal|Topk|Sort|Max|Min|Scatter|IndexPut|IndexAdd|MaskedScatter|Cumsum)Backward\d*"
)
CUT = re.compile(
    r"(Split\w*|UnsafeSplit\w*|Slice|Select|Unbind|Index|IndexSelect|Gather|Narrow|AsStrided|Unfold|Glu)Backward\d*"
)
LINEAR = re.compile(
    r"(Add|Sub|Rsub|Neg|Mul|Div|MulScalar|CopySlices|Copy|Dropout\w*|NativeDropout|MaskedFill)Backward\d*"
)
JOIN = re.compile(r"(Mul|Div|Maximum|Minimum|Where|Complex|Atan2|Polar|Addcmul|Lerp)Backward\d*")
# A value keeps its place: activations, softmax, and norms (whose own backward would spread a mask).
KEEPS = re.compile(
    r"(Relu\w*|Gelu|Silu|Mish|Sigmoid|LogSigmoid|Tanh|Hardtanh|Hardswish|Hardsigmoid|Elu|Celu|LeakyRelu\w*|Prelu\w*"
    r"|Softplus|Exp|Expm1|Log\w*|Sqrt|Rsqrt|Reciprocal|Pow|Square|Abs|Sin|Cos|Erf|Clamp\w*|Softmax|LogSoftmax|Threshold"
    r"|Native\w*Norm|NativeLayerNorm|Fused\w*Norm\w*|CudnnBatchNorm|MkldnnBatchNorm|Sgn|Sign|Floor|Round)Backward\d*"
)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor that a call returned, in lists, dicts, dataclasses and distributions."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, torch.distributions.Distribution):
        yield from tensors_in([getattr(value, name) for name in value.arg_constraints if name in value.__dict__])
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        yield from tensors_in([inner for inner in vars(value).values() if not callable(inner)])


class Graph:
    """The nodes behind some tensors, from these tensors back to the leaves, each before the nodes that it reads."""

    def __init__(self, returned: Iterable[Tensor], parameters: dict[str, Tensor]) -> None:
        self.returned = [t for t in returned if t.grad_fn is not None]
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.matrices = frozenset(name for name, parameter in parameters.items() if parameter.dim() > 1)
        self.nodes = self._sorted([t.grad_fn for t in self.returned])
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.readers: dict[Node, list[tuple[Node, int, int]]] = defaultdict(list)  # (reader, operand, which output)
        for node in self.nodes:
            for operand, (source, output) in enumerate(node.next_functions):
                if source is not None:
                    self.readers[source].append((node, operand, output))
        self._sources: dict[Node, tuple[frozenset[str], bool]] = {}

    @staticmethod
    def _sorted(roots: Iterable[Node]) -> list[Node]:
        done: dict[Node, None] = {}
        stack = [(root, False) for root in roots]
        while stack:
            node, finished = stack.pop()
            if finished:
                done.setdefault(node)
            elif node not in done:
                stack.append((node, True))
                stack += [
                    (source, False) for source, _ in node.next_functions if source is not None and source not in done
                ]
        return list(reversed(done))

    @cached_property
    def products(self) -> dict[Node, dict[int, frozenset[str]]]:
        """Products with parameters: which operands are parameters alone (masked, turned, normalized), and which."""
        found = {node: self._weights(node) for node in self.nodes if PRODUCT.fullmatch(node.name())}
        return {node: weights for node, weights in found.items() if weights}

    def parameter(self, leaf: Node) -> str | None:
        """The name of the parameter that a leaf is, if it is one."""
        variable = getattr(leaf, "variable", None)
        return None if variable is None else self.names.get(id(variable))

    def _weights(self, node: Node) -> dict[int, frozenset[str]]:
        found = {}
        for operand, (source, _) in enumerate(node.next_functions):
            if source is None or (operand == 0 and ADDS_FIRST.fullmatch(node.name())):
                continue
            names, data = self.source(source)
            bias = operand == 2 and node.name().startswith("Convolution")
            if names and not data and not bias:  # a vector in a product is a matrix of one row, beside a matrix a gain
                found[operand] = names & self.matrices or names
        recurrent = node.name().startswith("Mkldnn") and "Rnn" in node.name()
        return found if recurrent or len(found) < 2 else dict([max(found.items())])  # learned queries times a weight

    def source(self, node: Node) -> tuple[frozenset[str], bool]:
        """The parameters that a value is made of without a product, and whether it holds data as well."""
        if node in self._sources:
            return self._sources[node]
        for inner in reversed(self._sorted([node])):
            if inner in self._sources:
                continue
            if not inner.next_functions:
                name = self.parameter(inner)
                variable = getattr(inner, "variable", None)
                held = name is not None and variable is not None and variable.dim() > 0
                self._sources[inner] = (frozenset([name] if held and name else []), name is None)
                continue
            parts = [self._sources[s] for s, _ in inner.next_functions if s is not None]
            data = bool(LOOKUP.fullmatch(inner.name())) or any(d for _, d in parts)
            product = bool(PRODUCT.fullmatch(inner.name())) or data
            self._sources[inner] = (frozenset() if product else frozenset().union(*(n for n, _ in parts)), data)
        return self._sources[node]

    def region(self, product: Node) -> dict[Node, list[Place]]:
        """Every node between a product and the next ones, and for each the places that read it."""
        reached: dict[Node, list[Place]] = {}
        stack = [product]
        while stack:
            node = stack.pop()
            if node in reached:
                continue
            reached[node] = [(reader, operand) for reader, operand, _ in self.readers[node]]
            stack += [r for r, operand in reached[node] if self.passes(r, operand)]
        return reached

    def passes(self, reader: Node, operand: int) -> bool:
        """Whether a value goes on through this operand without meeting a matrix or other data in a product."""
        name = reader.name()
        if PRODUCT.fullmatch(name):
            return operand == 0 and bool(ADDS_FIRST.fullmatch(name))
        return bool(MOVE.fullmatch(name) or LINEAR.fullmatch(name) or JOIN.fullmatch(name) or KEEPS.fullmatch(name))

    def elements(self, product: Node, place: Place | tuple[Node, None, int], region: dict[Node, list[Place]]) -> Any:
        """Which elements of the product's parameters a place in its region depends on, {name: mask}; None if unknown.

        A place is an operand of a node, or one output of a node: (node, None, which).
        """
        if place[1] is None:
            start, output = place[0], place[2]  # type: ignore[misc]
        else:
            start, output = place[0].next_functions[place[1]]
        shape = start._input_metadata[output].shape
        return self._back(product, start, output, torch.rand(tuple(shape)) + 0.5, region)

    def _back(self, product: Node, start: Node, output: int, seed: Tensor, region: dict[Node, list[Place]]) -> Any:
        sent: dict[Node, dict[int, Tensor]] = {start: {output: seed}}
        for node in sorted(region, key=lambda n: self.order[n]):
            if node not in sent or node is product:
                continue
            grads = sent.pop(node)
            for operand, part in enumerate(self._through(node, grads)):
                source, index = node.next_functions[operand]
                if source in region and part is not None:
                    held = sent.setdefault(source, {})
                    held[index] = held[index] + part if index in held else part
        if product not in sent:
            return {}
        try:
            return self._onto_parameters(product, sent[product])
        except RuntimeError:  # a saved value was changed in place since
            return None

    def _through(self, node: Node, grads: dict[int, Tensor]) -> list[Tensor | None]:
        name = node.name()
        if MOVE.fullmatch(name):
            count = len(node._input_metadata)
            try:
                parts = node(*[grads.get(i) for i in range(count)])
            except RuntimeError:
                return []
            return list(parts) if isinstance(parts, tuple) else [parts]
        total = grads[0] if 0 in grads else next(iter(grads.values()))
        return [
            None if source is None else _fitted(total, tuple(source._input_metadata[index].shape))
            for source, index in node.next_functions
        ]

    def _onto_parameters(self, product: Node, grads: dict[int, Tensor]) -> dict[str, Tensor]:
        parts = self._onto_operands(product, grads)
        masks: dict[str, Tensor] = {}
        for operand in self.products[product]:
            source, index = product.next_functions[operand]
            sent: dict[Node, dict[int, Tensor]] = {source: {index: parts[operand]}}
            for node in sorted(self._sorted([source]), key=lambda n: self.order[n]):
                if node not in sent:
                    continue
                name = self.parameter(node)
                if name is not None:
                    masks[name] = sent[node][0] != 0
                    continue
                if MOVE.fullmatch(node.name()):
                    outs = node(*[sent[node].get(i) for i in range(len(node._input_metadata))])
                    outs = list(outs) if isinstance(outs, tuple) else [outs]
                else:
                    outs = self._through(node, sent[node])
                for (deeper, i), part in zip(node.next_functions, outs, strict=False):
                    if deeper is not None and part is not None:
                        held = sent.setdefault(deeper, {})
                        held[i] = held[i] + part if i in held else part
        return masks

    def _onto_operands(self, product: Node, grads: dict[int, Tensor]) -> dict[int, Tensor] | tuple[Tensor, ...]:
        """The gradient of each operand that is a parameter; where a row of it is reached, all of the row.

        A product's own backward multiplies by what it read, and an input that a ReLU had set to zero would look like
        a column that is not used.
        """
        name, grad = product.name(), grads.get(0)
        rows = grad is not None and RECTANGULAR.match(name)
        if not rows or grad is None:
            return product(*[grads.get(i) for i in range(len(product._input_metadata))])
        reached = grad != 0
        parts = {}
        for operand in self.products[product]:
            source, index = product.next_functions[operand]
            shape = tuple(source._input_metadata[index].shape)
            if name.startswith("Convolution"):
                channels = reached.transpose(0, 1).flatten(1).any(1)  # (out)
                if product._saved_transposed:
                    channels = channels.view(-1, shape[1]).any(0)
                mask = channels.view([1, -1] if product._saved_transposed else [-1, 1])
                parts[operand] = mask.view([*mask.shape, *[1] * (len(shape) - 2)]).expand(shape).float()
                continue
            last = operand == len(product.next_functions) - 1  # x @ W: columns of the result; W @ x: rows
            lines = reached.any(-2, keepdim=True) if last else reached.any(-1, keepdim=True)
            parts[operand] = lines.expand(shape).float()
        return parts


RECTANGULAR = re.compile(r"(Addmm|Mm|Bmm|Baddbmm|Convolution)Backward\d*$")


def _fitted(mask: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The mask for an operand of this shape: summed where it was broadcast; None where shapes do not fit."""
    try:
        return mask.sum_to_size(shape) if mask.shape != shape else mask
    except RuntimeError:
        return None
