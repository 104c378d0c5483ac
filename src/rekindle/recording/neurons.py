"""Following every layer's neurons through a recorded pass to the layers that read them.

Beside each value stands which neuron is behind each of its elements, moved by the same operations. Neurons pass
functions that work element by element, norms, pooling, and whatever only moves elements; their path ends in the layers
that consume them. Where it meets anything else (another stream, attention, the model's output) their layer is refused,
with that as the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rekindle.blocks.layers import Layer, as_layer
from rekindle.recording import operations as kinds
from rekindle.recording.graph import Graph, Operation, Ref
from rekindle.recording.reading import Flow, line_along
from rekindle.recording.shadows import reduced, reshaped, resized, varies
from rekindle.recording.traces import axes_of, cat

_MET = "it is added to another stream (a residual connection)"
# What a neuron has in a module between its layer and its consumers, and with what it starts.
STARTS = {
    **dict.fromkeys(("weight", "scale", "gamma", "running_var", "ra_var"), 1.0),
    **dict.fromkeys(("bias", "beta", "running_mean", "ra_mean"), 0.0),
}


@dataclass(eq=False)
class _Content:
    """What one value holds: neurons, or the weight of a layer with its axes, or something of the input (`data`)."""

    flows: tuple[Flow, ...] = ()
    data: bool = False
    weight: tuple[str, tuple[int, ...]] | None = None
    changed: frozenset[str] = frozenset()  # weights of layers that it was computed from
    held: bool = False  # computed from parameters or buffers


Read = dict[frozenset[str], tuple[int, ...]]  # of each column of a layer: which neuron of these makers it reads


class NeuronPaths:
    """One pass over the graph, in order; layers are named by the first of their names in the model."""

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self.graph = graph
        self.names = {id(module): name for name, module in model.named_modules()}
        self.layers = {n: layer for n, m in model.named_modules() if (layer := as_layer(n, m)) is not None}
        self.consumed: dict[str, list[Read]] = {}
        self.norms: dict[str, dict[str, nn.Module]] = {}
        self.readings: dict[frozenset[str], list[tuple[int, Flow]]] = {}  # values that show the activity, best first
        self.late: set[str] = set()
        self.refused: dict[str, str] = {}
        self._owners = _owners(self.layers, graph)
        self._values: dict[int, _Content] = {}
        for operation in graph.operations:
            made = self._step(operation)
            for i, output in enumerate(operation.outputs):
                if output >= 0:
                    self._values[output] = made[min(i, len(made) - 1)]
        for number in _ends(graph):
            self._refuse(self._content(number).flows, "its neurons are the model's output")

    # What a value holds

    def _content(self, number: int) -> _Content:
        known = self._values.get(number)
        if known is None:
            name = self.graph.weights.get(number)
            if name in self._owners:
                known = _Content(weight=(name, tuple(range(len(self.graph.shapes[number])))), held=True)
            elif name is not None or number in self.graph.buffers:
                known = _Content(held=True)
            else:
                known = _Content(data=True)
            self._values[number] = known
        return known

    def _refuse(self, flows: tuple[Flow, ...], reason: str) -> None:
        for flow in flows:
            for source in flow.sources:
                self.refused.setdefault(source, reason)

    # What operations do

    def _step(self, operation: Operation) -> list[_Content]:
        name = operation.name
        contents = [self._content(i) for i in operation.inputs]
        flows = tuple(flow for content in contents for flow in content.flows)
        if name in kinds.SHAPES:
            return [_Content()]
        if name in kinds.PRODUCTS and (layer := self._layer_of(operation, contents)) is not None:
            return [self._consume(operation, layer)]
        changed = frozenset().union(*(c.changed | ({c.weight[0]} if c.weight else set()) for c in contents))
        if changed and not all(c.weight or c.held for c in contents):
            for weight in changed:
                self.refused.setdefault(self._owners[weight], "its weight is changed, or used in another way too")
        if not flows:
            if len(contents) == 1 and contents[0].weight is not None:
                return [self._moved_weight(operation, *contents[0].weight)]
            data, held = any(c.data for c in contents), any(c.held for c in contents)
            return [_Content(data=data, changed=frozenset() if data else changed, held=held and not data)]
        made = self._pass(operation, contents, flows)
        if isinstance(made, str):
            self._refuse(flows, made)
            return [_Content(data=True)]
        for content, output in zip(made, operation.outputs, strict=False):
            for flow in content.flows:
                if flow.active:
                    self.readings.setdefault(flow.sources, []).append((output, flow))
        return made

    def _moved_weight(self, operation: Operation, name: str, axes: tuple[int, ...]) -> _Content:
        if operation.name in kinds.SAME:
            return _Content(weight=(name, axes), held=True)
        if operation.name in ("t", "transpose", "permute", "numpy_T", "mT"):
            marks = torch.empty([2] * len(axes), device="meta")  # only its strides count
            moved = operation.function(marks, *operation.args[1:], **operation.kwargs)
            steps = list(marks.stride())
            return _Content(weight=(name, tuple(axes[steps.index(s)] for s in moved.stride())), held=True)
        return _Content(changed=frozenset({name}), held=True)

    def _layer_of(self, operation: Operation, contents: list[_Content]) -> Layer | None:
        """The layer whose weight, as its class has it, is a factor of this product, None if there is none."""
        first, second = (operation.args[i] for i in kinds.PRODUCTS[operation.name])
        held = self._content(second.number).weight
        if held is None or self._content(first.number).weight is not None:
            return None
        name, axes = held
        layer = self.layers[self._owners[name]]
        if operation.name in kinds.CONVOLUTIONS or operation.name == "linear":
            fits = axes == tuple(range(len(axes)))
        else:
            fits = axes == (layer.in_axis, layer.out_axis)
        extra = [self._content(i) for i in operation.inputs if i not in (first.number, second.number)]
        return layer if fits and not any(c.flows or c.data for c in extra) else None

    def _consume(self, operation: Operation, layer: Layer) -> _Content:
        convolves = operation.name in kinds.CONVOLUTIONS
        number = operation.args[kinds.PRODUCTS[operation.name][0]].number
        axis = 1 if convolves else len(self.graph.shapes[number]) - 1
        shape = self.graph.shapes[operation.outputs[0]]
        width = shape[1] if convolves else shape[-1]  # of a transposed convolution in groups the weight has fewer
        rows = torch.arange(width)
        rows = rows.view(-1, *[1] * (len(shape) - 2)) if convolves else rows
        made = Flow(frozenset({layer.name}), width, rows.expand(shape))
        self.readings.setdefault(made.sources, []).append((operation.outputs[0], made))
        groups = getattr(layer.module, "groups", 1)
        flows = self._content(number).flows
        read: Read = {}
        for flow in flows:
            columns = line_along(flow.shadow, axis)
            if groups != 1:
                self._refuse((flow,), f"it feeds {layer.name}, a convolution in {groups} groups")
            elif columns is None:
                self._refuse((flow,), f"{layer.name} reads it along another axis")
            else:
                read[flow.sources] = tuple(columns.tolist())
            self.readings.setdefault(flow.sources, []).append((number, flow))
        if groups != 1:
            self._refuse((made,), f"it is a convolution in {groups} groups")
        uses = self.consumed.setdefault(layer.name, [])
        if read not in uses:
            uses.append(read)
        return _Content(flows=(made,))

    def _pass(self, operation: Operation, contents: list[_Content], flows: tuple[Flow, ...]) -> list[_Content] | str:
        """What the operation makes of the neurons, or why they are lost."""
        name = operation.name
        shapes = [self.graph.shapes[o] if o >= 0 else () for o in operation.outputs]
        if name in kinds.MOVES or name in kinds.RESHAPES or name in kinds.SAME:
            return self._move(operation, contents, shapes)
        if name in kinds.JOINS:
            return self._join(operation, shapes[0])
        if name in kinds.NORMS:
            return self._normalize(operation, contents[0], shapes[0])
        if name in kinds.ELEMENTWISE:
            return self._meet(operation, contents, shapes[0])
        if name in kinds.PRODUCTS or name in kinds.ATTENTION or name in kinds.OPAQUE:
            where = self.names.get(id(operation.caller), "")
            return f"its neurons enter {where or 'the model'} ({type(operation.caller).__name__}: {name.lstrip('_')})"
        if len(contents) > 1 and any(c.flows or c.data for c in contents[1:]):
            return f"its neurons meet others in {name.lstrip('_')}"
        out = []
        for flow in flows:
            moved = self._alone(operation, flow, shapes[0])
            if isinstance(moved, str):
                return moved
            out.append(moved)
        return [_Content(flows=tuple(out))]

    def _alone(self, operation: Operation, flow: Flow, shape: tuple[int, ...]) -> Flow | str:
        """Neurons through a function of one argument."""
        name, shadow = operation.name, flow.shadow
        if name in kinds.FUNCTIONS:
            return replace(flow, active=True)
        if name in kinds.TRANSPARENT:
            return flow
        if name in kinds.POOLS:
            pooled = None if any(varies(shadow, -i - 1) for i in range(kinds.POOLS[name])) else resized(shadow, shape)
            return "it is pooled across its neurons" if pooled is None else replace(flow, shadow=pooled)
        if name in kinds.SUMS or name in kinds.EXTREMES:
            axes = axes_of(operation, shadow.dim())
            keep = len(shape) == shadow.dim()
            small = None if axes is None else reduced(shadow, axes, keep)
            small = None if small is None else resized(small, shape)
            return (
                "its neurons are summed or averaged with each other" if small is None else replace(flow, shadow=small)
            )
        return f"its neurons pass through {name.lstrip('_')}"

    def _move(
        self, operation: Operation, contents: list[_Content], shapes: list[tuple[int, ...]]
    ) -> list[_Content] | str:
        if any(c.flows for c in contents[1:]):
            return f"its neurons are indices in {operation.name}"
        made: list[list[Flow]] = [[] for _ in shapes]
        for flow in contents[0].flows:
            moved = self._moved(operation, flow.shadow, shapes)
            if moved is None:
                return f"its neurons are rearranged by {operation.name}"
            for i, shadow in enumerate(moved):
                if bool((shadow >= 0).any()):
                    made[i].append(replace(flow, shadow=shadow))
        return [_Content(flows=tuple(held)) for held in made]

    def _moved(self, operation: Operation, shadow: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor] | None:
        """The shadow after the same operation, None where that is not seen."""
        if operation.name in kinds.SAME:
            return [shadow]
        if operation.name in kinds.RESHAPES:
            moved = reshaped(shadow, shapes[0])
            return None if moved is None else [moved]
        if any(isinstance(a, Ref) for arg in operation.args[1:] for a in (arg if isinstance(arg, tuple) else (arg,))):
            return self._indexed(operation, shadow, shapes[0])
        rest = list(operation.args[1:])
        if operation.name == "constant_pad_nd":
            rest = [rest[0], -1]
        try:
            result = operation.function(shadow, *rest, **operation.kwargs)
        except (RuntimeError, IndexError, TypeError, NotImplementedError):
            return None
        made = [result] if isinstance(result, Tensor) else list(result)
        return made if [tuple(m.shape) for m in made] == shapes else None

    def _indexed(self, operation: Operation, shadow: Tensor, shape: tuple[int, ...]) -> list[Tensor] | None:
        """Rows chosen by an index (tokens, examples): the neurons stay where they are if their axis is not indexed."""
        if operation.name != "index" or shadow.dim() == 0 or varies(shadow, 0) or not shape:
            return None
        indices = operation.args[1]
        if len(indices) >= shadow.dim() or any(varies(shadow, i) for i in range(len(indices))):
            return None
        rest = shadow[(0,) * len(indices)]
        fits = tuple(rest.shape) == shape[len(shape) - rest.dim() :]
        return [rest.expand(shape)] if fits and all(i is not None for i in indices) else None

    def _join(self, operation: Operation, shape: tuple[int, ...]) -> list[_Content] | str:
        numbers = [arg.number for arg in operation.args[0]]
        contents, shapes = [self._content(n) for n in numbers], [self.graph.shapes[n] for n in numbers]
        made: dict[tuple[frozenset[str], bool], list[Tensor | None]] = {}
        widths: dict[frozenset[str], int] = {}
        for i, content in enumerate(contents):
            for flow in content.flows:
                held = made.setdefault((flow.sources, flow.active), [None] * len(contents))
                held[i], widths[flow.sources] = flow.shadow, flow.width
        flows = []
        for (sources, active), held in made.items():
            shadow = cat(operation, held, shapes, operation.args[1:], operation.kwargs, shape)
            if shadow is None:
                return "its neurons are concatenated with others"
            flows.append(Flow(sources, widths[sources], shadow, active))
        return [_Content(flows=tuple(flows))]

    def _normalize(self, operation: Operation, content: _Content, shape: tuple[int, ...]) -> list[_Content] | str:
        """A norm: of each channel by itself, or of all neurons of one example."""
        caller = operation.caller
        what = type(caller).__name__ if caller is not None else operation.name
        if len(content.flows) != 1:
            return f"{what} normalizes it together with others"
        (flow,) = content.flows
        axis = 1 if kinds.NORMS[operation.name] == "channel" else flow.shadow.dim() - 1
        line = line_along(flow.shadow, axis)
        whole = line is not None and line.tolist() == list(range(flow.width))
        if line is None or not (whole or operation.name in kinds.BATCH_NORMS):
            return f"{what} normalizes it along another axis"
        refusal = self._hold(caller, flow)
        return refusal or [_Content(flows=(flow,))]

    def _hold(self, module: nn.Module | None, flow: Flow) -> str:
        """Note a module that holds a number per neuron; says why it cannot, if so."""
        if module is None or id(module) not in self.names:
            return ""
        held = {**module._parameters, **module._buffers}
        sized = {n: t.shape[0] for n, t in held.items() if t is not None and t.dim() == 1 and t.shape[0] > 1}
        name = self.names[id(module)]
        if any(size != flow.width for size in sized.values()):
            return f"{name} ({type(module).__name__}) normalizes it along another axis"
        unknown = [n for n in sized if n not in STARTS]
        if unknown:
            return f"it meets {name + '.' if name else ''}{unknown[0]}, whose start is not known"
        for source in flow.sources if sized else ():
            self.norms.setdefault(source, {})[name] = module
        if sized and flow.active:
            self.late.update(flow.sources)
        if not flow.active:  # before the nonlinearity, the normalized value is nearer to what consumers see
            self.readings.pop(flow.sources, None)
        return ""

    def _meet(self, operation: Operation, contents: list[_Content], shape: tuple[int, ...]) -> list[_Content] | str:
        """Several values element by element: with constants, with itself, or with other neurons."""
        name, multiplies = operation.name, operation.name in kinds.MULTIPLIES
        flowing = [c for c in contents if c.flows]
        masks = contents[1:2] if name == "masked_fill" else contents[:1] if name == "where" else []
        others = [c for c in contents if not c.flows and c not in masks]
        if not multiplies and any(c.data for c in others):
            return _MET if name in kinds.ADDS else f"its neurons meet others in {name}"
        sized = [i for i in operation.inputs if self._content(i).held and self.graph.shapes[i] not in ((), (1,))]
        for flow in flowing[0].flows:
            owner = operation.caller
            if sized and not any(self.layers[s].module is owner for s in flow.sources):
                refusal = self._hold(owner, flow)
                if refusal:
                    return refusal
        first = flowing[0].flows
        merged: list[Flow] = []
        if all(len(c.flows) == len(first) for c in flowing):
            for together in zip(*(c.flows for c in flowing), strict=True):
                alike = all(f.same(together[0]) for f in together)
                sources = frozenset().union(*(f.sources for f in together))
                apart = any(f.sources != sources for f in together)
                if not alike or (apart and not (multiplies and len(first) == 1)):
                    break
                most = max(f.shadow.numel() for f in together)
                full = [f for f in together if f.shadow.numel() == most]  # the others are statistics of it
                shadow = resized(full[0].shadow, shape)
                if shadow is None:
                    break
                passed = name not in kinds.LINEAR or (multiplies and len(full) > 1) or any(f.active for f in full)
                merged.append(Flow(sources, together[0].width, shadow, passed))
        if len(merged) == len(first):
            return [_Content(flows=tuple(merged))]
        if name in kinds.ADDS:
            return _MET
        return f"its neurons meet others in {name}" if not multiplies else "it is multiplied by other neurons"


def _ends(graph: Graph) -> set[int]:
    """The values that the caller gets: of the pass, or of networks that are called one by one and feed no other one."""
    top = [call for call in graph.calls if call.depth == 0]
    read = {number for call in top for number in call.inputs}
    return set(graph.returned.values()) or {number for call in top for number in call.outputs} - read


def _owners(layers: dict[str, Layer], graph: Graph) -> dict[str, str]:
    """By the name of its weight in the recording: the layer that holds it."""
    names = {id(parameter): name for name, parameter in graph.parameters.items()}
    found: dict[str, str] = {}
    for path, layer in layers.items():
        weight: object = layer.module._parameters.get("weight")
        if weight is not None and id(weight) in names:
            found.setdefault(names[id(weight)], path)
    return found
