"""Following every layer's neurons through a graph, in the order of computation, to the layers that read them.

Neurons pass elementwise functions, normalisation, pooling and flattening; their path ends in the layers that consume
them. Where it meets anything else (another stream, a concatenation, attention, the model's output) their layer is
refused, with that as the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, fx, nn

from rekindle.blocks.names import Layer, as_layer
from rekindle.consumers.graph import (
    ACTIVATIONS,
    BINARY,
    CHANNEL_NORMS,
    DROPOUTS,
    NONLINEAR,
    POOL_MODULES,
    POOLS,
    SHAPE_ONLY,
    TRANSPARENT,
    Untraceable,
    can_trace,
    exported,
    graph_of,
    is_number,
    operation,
    parts_of,
    restored,
    shapes_of,
)

Order = Literal["channel", "last", "major", "minor"]


@dataclass(frozen=True)
class Reading:
    """Where neurons' activity can be read: the first input of a module, or its output."""

    module: str
    side: Literal["input", "output"]
    order: Order

    def per_neuron(self, value: Tensor, width: int) -> Tensor:
        """The value with the neurons as its last axis; a view where strides allow, so that watching stays cheap.

        >>> import torch
        >>> Reading("relu", "output", "channel").per_neuron(torch.zeros(2, 5, 3, 3), 5).shape
        torch.Size([2, 3, 3, 5])
        """
        if self.order == "channel":
            return value.movedim(1, -1)
        if self.order == "major":
            return value.reshape(value.shape[0], width, -1).movedim(1, -1)
        return value.reshape(value.shape[0], -1, width) if self.order == "minor" else value


@dataclass(frozen=True)
class Flow:
    """Neurons along a path: which layers they belong to, how the tensor is laid out, where they can be read next."""

    sources: frozenset[str]
    width: int
    order: Order
    pending: bool = True  # the next module that takes this value shows the neurons' activity
    active: bool = False  # a nonlinearity has been passed
    spatial: int = 0  # how many axes follow the channels


@dataclass
class Paths:
    """What following one or more graphs has found; layer names are those of the whole model."""

    how: str
    consumed: dict[str, list[tuple[frozenset[str], Order]]] = field(default_factory=dict)
    norms: dict[str, dict[str, nn.Module]] = field(default_factory=dict)
    readings: dict[frozenset[str], Reading] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    unreached: dict[str, str] = field(default_factory=dict)

    def refuse(self, flow: Flow, reason: str) -> None:
        """No layer of this flow can be wired."""
        for source in flow.sources:
            self.refused.setdefault(source, reason)

    def joined(self, other: Paths) -> Paths:
        """This trace, and the other's findings about layers that this one did not reach."""
        new = set(self.unreached) - set(other.unreached)
        if not new:
            return replace(self, unreached={n: f"{r}; {other.unreached.get(n, '')}" for n, r in self.unreached.items()})
        merged = replace(self, how=f"{self.how} and {other.how}", unreached=dict(other.unreached))
        for name, uses in other.consumed.items():
            if any(sources & new for sources, _ in uses):
                merged.consumed[name] = uses  # the other saw the whole model, this one perhaps a part
        merged.norms.update({k: v for k, v in other.norms.items() if k in new})
        merged.late.update(other.late & new)
        merged.refused.update({k: v for k, v in other.refused.items() if k in new})
        merged.readings.update({k: v for k, v in other.readings.items() if k <= new})
        return merged


def trace(model: nn.Module) -> Paths:
    """Trace the model by torch.fx, or, where that fails, each of its parts that can be traced on its own."""
    found = Paths("torch.fx")
    with restored(model):
        _trace_part(model, "", found, "the model's output")
    return found


def _trace_part(module: nn.Module, path: str, found: Paths, end: str) -> None:
    """Trace a module; failing that, with its untraceable parts as opaque modules; failing that, the parts alone."""
    top = path == ""
    try:
        Walk(module, path, graph_of(module, top), found, end).run()
        return
    except Untraceable as error:
        reason = str(error)
    found.how = "torch.fx, part by part"
    parts = list(parts_of(module, path))
    closed = {part: name for name, part in parts if not can_trace(part)}
    if closed:
        try:
            Walk(module, path, graph_of(module, top, frozenset(closed)), found, end).run()
        except Untraceable:
            pass
        else:
            for part, name in closed.items():
                _trace_part(part, name, found, f"what leaves {name}")
            return
    for name, part in parts:
        if as_layer(name, part) is not None:
            found.unreached[name] = reason
        elif any(as_layer(n, m) for n, m in part.named_modules()):
            _trace_part(part, name, found, f"what leaves {name}")
    known_inside(module, path, found)


def known_inside(module: nn.Module, path: str, found: Paths) -> bool:
    """torch's own transformer layers branch on their inputs, so fx cannot trace them; their MLP is fixed."""
    if not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return False
    prefix = f"{path}." if path else ""
    maker, reader = f"{prefix}linear1", f"{prefix}linear2"
    for name, child in module.named_modules():
        if as_layer(name, child) is not None:
            found.unreached.pop(prefix + name, None)
            found.refused[prefix + name] = "it writes into the residual stream"
    found.refused.pop(maker)
    sources = frozenset({maker})
    found.consumed.setdefault(reader, []).append((sources, "last"))
    found.readings[sources] = Reading(reader, "input", "last")
    return True


def look_inside(module: nn.Module, path: str, found: Paths) -> None:
    """A module of torch's own is one step of a trace: its inside is known by its class, or not reached."""
    for name, inner in module.named_modules():
        whole = f"{path}.{name}" if name else path
        if name and as_layer(whole, inner) is not None:
            found.unreached[whole] = f"it is inside {type(module).__name__}, which is not traced"
    for name, inner in module.named_modules():
        known_inside(inner, f"{path}.{name}" if name else path, found)


class Walk:
    """One pass over one graph, in the order of computation."""

    def __init__(
        self, root: nn.Module, path: str, graph: fx.Graph, found: Paths, end: str, held: dict[str, str] | None = None
    ) -> None:
        self.root, self.path, self.graph, self.found, self.end = root, path, graph, found, end
        self.held = held or {}
        self.flows: dict[fx.Node, Flow] = {}
        self.modules = dict(root.named_modules())
        self.uses: dict[str, int] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                self.uses[str(node.target)] = self.uses.get(str(node.target), 0) + 1

    def _whole(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path and name else self.path or name

    def run(self) -> None:
        """Visit every node; what is found goes into the trace."""
        for node in self.graph.nodes:
            incoming = [self.flows[n] for n in node.all_input_nodes if n in self.flows]
            if node.op == "output":
                for flow in incoming:
                    self._leave(flow)
            elif node.op == "call_module":
                self._call_module(node, incoming)
            elif node.op in ("call_function", "call_method"):
                self._call_function(node, incoming)

    def _leave(self, flow: Flow) -> None:
        if self.path:  # a trace of a larger part may still show who reads it
            self.found.unreached.update(dict.fromkeys(flow.sources, f"its neurons are {self.end}"))
        else:
            self.found.refuse(flow, f"its neurons are {self.end}")

    def _call_module(self, node: fx.Node, incoming: list[Flow]) -> None:
        name = str(node.target)
        module = self.modules[name]
        whole = self._whole(name)
        layer = as_layer(whole, module)
        flow = self.flows.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if flow is not None and flow.pending and self.uses[name] == 1:
            self.found.readings.setdefault(flow.sources, Reading(whole, "input", flow.order))
            flow = replace(flow, pending=False)
        if layer is not None:
            self._consume(node, layer, flow)
        elif not incoming:
            look_inside(module, whole, self.found)
        elif flow is None or len(incoming) > 1:
            self._refuse_all(incoming, f"its neurons enter {whole} ({type(module).__name__}) beside another value")
        elif isinstance(module, ACTIVATIONS):
            # A module used once shows its output; one used twice would mix two layers' neurons.
            alone = self.uses[name] == 1
            self.found.readings.pop(flow.sources, None)
            if alone:
                self.found.readings[flow.sources] = Reading(whole, "output", flow.order)
            self.flows[node] = replace(flow, pending=not alone, active=True)
        elif isinstance(module, DROPOUTS) or (isinstance(module, POOL_MODULES) and flow.order == "channel"):
            self.flows[node] = flow
        elif isinstance(module, nn.PReLU) and module.num_parameters == 1:
            self.flows[node] = replace(flow, pending=True, active=True)
        elif isinstance(module, nn.Flatten):
            self._flatten(node, flow, module.start_dim)
        elif isinstance(module, (*CHANNEL_NORMS, nn.LayerNorm, nn.RMSNorm)):
            self._norm(node, flow, whole, module)
        else:
            look_inside(module, whole, self.found)
            self._refuse_all(incoming, f"its neurons enter {whole} ({type(module).__name__})")

    def _consume(self, node: fx.Node, layer: Layer, flow: Flow | None) -> None:
        self.found.unreached.pop(layer.name, None)
        uses = self.found.consumed.setdefault(layer.name, [])
        groups = getattr(layer.module, "groups", 1)
        convolves = isinstance(layer.module, nn.modules.conv._ConvNd)
        order: Order = "channel" if convolves else "last"
        spatial = layer.weight.ndim - 2 if convolves else 0
        self.flows[node] = Flow(frozenset({layer.name}), layer.out_size, order, spatial=spatial)
        if groups != 1:
            self.found.refuse(self.flows[node], f"it is a convolution in {groups} groups")
        if flow is None:
            uses.append((frozenset(), "last"))
            return
        fits = flow.order == "channel" if convolves else flow.order != "channel"
        if groups != 1:
            self.found.refuse(flow, f"it feeds {layer.name}, a convolution in {groups} groups")
        elif (
            not fits
            or layer.in_size % flow.width
            or (flow.order in ("channel", "last") and layer.in_size != flow.width)
        ):
            self.found.refuse(flow, f"{layer.name} reads it along another axis")
        elif (flow.sources, flow.order) not in uses:
            uses.append((flow.sources, flow.order))

    def _norm(self, node: fx.Node, flow: Flow, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.GroupNorm):
            size, fits = module.num_channels, flow.order == "channel"
        elif isinstance(module, CHANNEL_NORMS):
            size, fits = int(module.num_features), flow.order in ("channel", "last", "major")  # type: ignore[arg-type]
        else:
            shape = module.normalized_shape
            size, fits = int(shape[-1]), len(shape) == 1 and flow.order == "last"  # type: ignore[index,arg-type]
        if not fits or size != flow.width:
            self.found.refuse(flow, f"{name} ({type(module).__name__}) normalises it along another axis")
            return
        for source in flow.sources:
            self.found.norms.setdefault(source, {})[name] = module
        if flow.active:
            self.found.late.update(flow.sources)
        else:  # before the nonlinearity, the normalised value is nearer to what consumers see
            self.found.readings.pop(flow.sources, None)
            flow = replace(flow, pending=True)
        self.flows[node] = flow

    def _flatten(self, node: fx.Node, flow: Flow, start: int) -> None:
        if start not in (1, -1) and not (start > 1 and flow.order == "channel"):
            self.found.refuse(flow, "its neurons are flattened together with the batch")
        elif flow.order == "channel":
            kept = replace(flow, spatial=start - 1)
            self.flows[node] = kept if start > 1 else replace(flow, order="major", spatial=0)
        elif flow.order == "last":
            self.flows[node] = replace(flow, order="minor" if start == 1 else "last")
        else:
            self.flows[node] = flow

    def _refuse_all(self, flows: list[Flow], reason: str) -> None:
        for flow in flows:
            self.found.refuse(flow, reason)

    def _call_function(self, node: fx.Node, incoming: list[Flow]) -> None:
        name = operation(node)
        if self.held and self._aten_layer(node, name):
            return
        if not incoming or name in SHAPE_ONLY:
            return
        flow = incoming[0]
        if name in BINARY:
            self._binary(node, incoming, BINARY[name])
        elif len(incoming) > 1:
            kind = "are concatenated with others" if name in ("cat", "concat", "stack") else f"meet others in {name}"
            self._refuse_all(incoming, f"its neurons {kind}")
        elif name in NONLINEAR:
            self.found.readings.pop(flow.sources, None)
            self.flows[node] = replace(flow, pending=True, active=True)
        elif name in TRANSPARENT or _is_pooled(node, name, flow):
            self.flows[node] = flow
        elif name in ("flatten", "view", "reshape", "_unsafe_view", "squeeze"):
            self._reshape(node, flow, name)
        elif name == "mean":
            self._mean(node, flow)
        else:
            self._refuse_all(incoming, f"its neurons pass through {name}")

    def _binary(self, node: fx.Node, incoming: list[Flow], kind: str) -> None:
        tensors = [a for a in node.args[:2] if isinstance(a, fx.Node) and not is_number(a)]
        flow = incoming[0]
        same = all(f.order == flow.order and f.width == flow.width for f in incoming)
        if len(tensors) == 1 or (
            all(f.sources == flow.sources for f in incoming) and len(incoming) == len(set(tensors))
        ):
            if same:  # a constant, or an activation written out: neurons stay separate
                self.flows[node] = replace(flow, pending=True)
                return
        elif kind == "mul" and same and len(incoming) == 2:
            self.flows[node] = replace(
                flow, sources=incoming[0].sources | incoming[1].sources, pending=True, active=True
            )
            return
        meet = (
            "is added to another stream (a residual connection)" if kind == "add" else "is multiplied by another value"
        )
        self._refuse_all(incoming, f"it {meet}")

    def _reshape(self, node: fx.Node, flow: Flow, name: str) -> None:
        known = shapes_of(node)
        if known is not None:
            before, after = known
            if flow.order == "last" and before[-1] == after[-1]:
                self.flows[node] = flow
            elif len(after) == 2 and before[0] == after[0] and len(before) > 1:
                self._flatten(node, flow, 1)
            elif flow.order == "channel" and before[:2] == after[:2]:
                self.flows[node] = replace(flow, spatial=len(after) - 2)
            else:
                self.found.refuse(flow, f"its neurons are rearranged by {name}")
        elif name == "flatten":
            start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
            ended = len(node.args) > 2 or "end_dim" in node.kwargs
            self._flatten(node, flow, -2 if ended or not isinstance(start, int) else start)
        elif name in ("view", "reshape"):
            sizes = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else node.args[1:]
            if isinstance(sizes, (tuple, list)) and len(sizes) == 2 and sizes[1] == -1 and sizes[0] != -1:
                self._flatten(node, flow, 1)
            else:
                self.found.refuse(flow, f"its neurons are rearranged by {name}")
        else:
            self.found.refuse(flow, f"its neurons pass through {name}")

    def _mean(self, node: fx.Node, flow: Flow) -> None:
        given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        dims = {d for d in (given if isinstance(given, (tuple, list)) else [given]) if isinstance(d, int)}
        keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
        space = set(range(2, 2 + flow.spatial))
        if flow.order == "channel" and {d % (2 + flow.spatial) for d in dims} == space:
            self.flows[node] = flow if keep else replace(flow, order="last", spatial=0)
        elif flow.order == "last" and dims in ({1}, {-2}):
            self.flows[node] = flow
        else:
            self.found.refuse(flow, "its neurons are averaged along an unknown axis")

    def _aten_layer(self, node: fx.Node, name: str) -> bool:
        """Whether this aten call is one of the model's layers or norms, recognised by its parameters."""
        owners = {self.held[a.name].rpartition(".")[0] for a in node.all_input_nodes if a.name in self.held}
        if len(owners) != 1:
            return False
        owner = owners.pop()
        module = self.modules.get(owner)
        if module is None:
            return False
        values = [a for a in node.all_input_nodes if a.name not in self.held]
        flow = self.flows.get(values[0]) if len(values) == 1 else None
        layer = as_layer(owner, module)
        if layer is not None and name in (
            "linear",
            "addmm",
            "conv1d",
            "conv2d",
            "conv3d",
            "convolution",
            "conv_transpose2d",
        ):
            self._consume(node, layer, flow)
            return True
        if isinstance(module, (*CHANNEL_NORMS, nn.LayerNorm, nn.RMSNorm)) and flow is not None:
            self._norm(node, flow, owner, module)
            return True
        return False


def _is_pooled(node: fx.Node, name: str, flow: Flow) -> bool:
    """Whether this pools a convolution's channels, or takes the values of a pooling that also gives indices."""
    if name == "getitem":
        return bool(node.args[1] == 0) and "with_indices" in operation(node.all_input_nodes[0])
    return name in POOLS and flow.order == "channel"


def export(model: nn.Module, batch: Any) -> Paths:
    """Follow the neurons through the graph that torch.export makes of the model on one batch."""
    found = Paths("torch.export")
    try:
        graph, held = exported(model, batch)
    except Untraceable as error:
        found.unreached = {n: str(error) for n, m in model.named_modules() if as_layer(n, m) is not None}
        return found
    Walk(model, "", graph, found, "the model's output", held).run()
    return found
