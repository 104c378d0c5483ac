"""Who consumes a neuron's output.

Remedies that replace single neurons redraw incoming and clear outgoing weights, so they must know, for every row of a
layer, which columns of which other layers read it. That is seen in a recorded pass (`neurons` follows them), or stated
by the user. Nothing is guessed: a layer whose neurons meet a residual stream, attention or anything unknown is refused
with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.blocks.layers import PLAIN_CONVS, TRANSPOSED_CONVS, Layer, as_layer
from rekindle.recording.graph import Graph
from rekindle.recording.neurons import NeuronPaths, Read
from rekindle.recording.reading import Order, Reading, find_reading, order_of
from rekindle.recording.recorder import RecordingError, record


class WiringError(ValueError):
    """The consumers of a model's neurons cannot be determined; the message gives the reasons."""


@dataclass(frozen=True, eq=False)
class Consumer:
    """A layer that reads neurons: `table[n]` are the columns that read neuron n, several after a flatten."""

    layer: Layer
    table: Tensor
    order: Order | None  # how the columns lie, None if neither one by one nor in runs nor in turns

    @classmethod
    def of(cls, layer: Layer, width: int, line: Sequence[int]) -> Consumer | None:
        """From the neuron that each column reads (-1: none of these); None if not every neuron has as many columns.

        >>> flat = Consumer.of(as_layer("fc", nn.Linear(6, 1)), 2, (0, 0, 0, 1, 1, 1))
        >>> flat.columns(torch.tensor([1])).tolist(), flat.order
        ([3, 4, 5], 'major')
        """
        neurons = torch.tensor(line, device=layer.weight.device)
        known = (neurons >= 0).nonzero().flatten()
        counts = torch.bincount(neurons[known], minlength=width)
        if not len(known) or len(counts) != width or bool((counts != counts[0]).any()):
            return None
        table = known[torch.argsort(neurons[known], stable=True)].view(width, -1)
        return cls(layer, table, order_of(tuple(line), width))

    @property
    def spread(self) -> int:
        """How many columns belong to one neuron."""
        return self.table.shape[1]

    def columns(self, neurons: Tensor) -> Tensor:
        """The columns of the consumer's weight that read the given neurons (indices), neuron by neuron."""
        return self.table[neurons].flatten()


@dataclass(frozen=True)
class Group:
    """Hidden neurons: rows with one index in `makers` form one neuron, read by `consumers`.

    Most groups have one maker; a gated MLP has two, multiplied elementwise. `norms` are the normalization
    modules between makers and consumers that hold something for each neuron; `late` if one of them stands after
    the nonlinearity, so that consumers do not read the activity itself.
    """

    makers: tuple[Layer, ...]
    consumers: tuple[Consumer, ...]
    norms: tuple[tuple[str, nn.Module], ...]
    reading: Reading
    late: bool = False

    @property
    def name(self) -> str:
        """The first maker's name."""
        return self.makers[0].name

    @property
    def layers(self) -> list[Layer]:
        """The layers whose weights hold something of these neurons."""
        return [*self.makers, *(consumer.layer for consumer in self.consumers)]

    @property
    def width(self) -> int:
        """How many neurons there are."""
        return self.makers[0].out_size

    def __str__(self) -> str:
        makers = " × ".join(maker.name for maker in self.makers)
        between = "".join(f" → {name}" for name, _ in self.norms)
        readers = ", ".join(
            consumer.layer.name + (f" ({consumer.spread} columns each)" if consumer.spread > 1 else "")
            for consumer in self.consumers
        )
        return f"{makers} ({self.width} neurons){between} → {readers}"


@dataclass(frozen=True)
class Wiring:
    """Every group of neurons whose consumers are known, and why the other layers' are not."""

    groups: tuple[Group, ...]
    refused: Mapping[str, str]
    how: str

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __str__(self) -> str:
        lines = [f"{len(self.groups)} group{'s' * (len(self.groups) != 1)} of neurons, as {self.how}"]
        lines += [f"  {group}" for group in self.groups]
        lines += [f"  {name}: refused, {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs to find the same neurons again."""
        return {
            "groups": [
                {
                    "makers": [maker.name for maker in group.makers],
                    "shapes": {e.name: list(e.weight.shape) for e in group.layers},
                    "consumers": [[consumer.layer.name, consumer.table.cpu()] for consumer in group.consumers],
                    "orders": [consumer.order for consumer in group.consumers],
                    "norms": [name for name, _ in group.norms],
                    "reading": [group.reading.module, group.reading.side, group.reading.order],
                    "late": group.late,
                }
                for group in self.groups
            ],
            "refused": dict(self.refused),
            "how": self.how,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], model: nn.Module) -> Wiring | None:
        """The inverse, for this model, which may have got new parts; None where their names or sizes are others."""
        modules = dict(model.named_modules())
        layers = {n: layer for n, m in modules.items() if (layer := as_layer(n, m)) is not None}
        groups = []
        for held in state["groups"]:
            names = {*held["norms"], held["reading"][0]}
            sizes = held["shapes"].items()
            if not names <= modules.keys() or not held["shapes"].keys() <= layers.keys():
                return None
            if any(list(layers[name].weight.shape) != shape for name, shape in sizes):
                return None
            pairs = zip(held["consumers"], held["orders"], strict=True)
            consumers = [Consumer(layers[n], t.to(layers[n].weight.device), order) for (n, t), order in pairs]
            makers, norms = [layers[n] for n in held["makers"]], [(n, modules[n]) for n in held["norms"]]
            reading = Reading(*held["reading"])
            groups.append(Group(tuple(makers), tuple(consumers), tuple(norms), reading, held["late"]))
        return cls(tuple(groups), dict(state["refused"]), state["how"])

    def only(self, matches: Callable[[str], bool]) -> Wiring:
        """The groups with a maker whose name matches; the others are refused as not asked for."""
        kept = tuple(group for group in self.groups if any(matches(maker.name) for maker in group.makers))
        out = {m.name: "not among the targets" for g in self.groups if g not in kept for m in g.makers}
        return Wiring(kept, {**self.refused, **out}, self.how)


def wire(
    model: nn.Module,
    batches: Any = None,
    *,
    consumers: Mapping[str, str | Sequence[str]] | None = None,
    graphs: Sequence[Graph] = (),
) -> Wiring:
    """Find the consumers of every hidden neuron, or raise :class:`WiringError` with the reasons.

    `model` is the user's own module, without wrappers (`rekindle.blocks.names.unwrapped`). It runs once on the first of
    the `batches`, in isolation, unless `graphs` were recorded before; `consumers` is a map from layer to consuming
    layer or layers, taken as given after its shapes are checked.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2))
    >>> print(wire(net, [torch.zeros(2, 1, 5, 5)]))
    1 group of neurons, as recorded
      0 (4 neurons) → 3 (9 columns each)
      3: refused, its neurons are the model's output
    """
    if consumers is not None:
        return _from_map(model, consumers)
    if not graphs:
        first = next(iter(batches), None) if batches is not None else None
        if first is None:
            raise WiringError(
                f"who consumes the neurons of {type(model).__name__} is seen when it runs: give batches=, train inside "
                "observe(model), or state consumers={'layer': 'consuming layer'}"
            )
        try:
            graphs = [record(model, first)]
        except RecordingError as error:
            raise WiringError(f"{error}; or state consumers={{'layer': 'consuming layer'}}") from error
    wiring = _wiring(model, [NeuronPaths(model, graph) for graph in graphs])
    if not wiring.groups:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in wiring.refused.items()) or "it has no layers"
        raise WiringError(
            f"no hidden neuron of {type(model).__name__} has known consumers ({reasons}); "
            "state them by consumers={'layer': 'consuming layer'}"
        )
    return wiring


def _wiring(model: nn.Module, passes: Sequence[NeuronPaths]) -> Wiring:
    """The groups that survived every pass, and the reasons for all other layers."""
    layers = {n: layer for n, m in model.named_modules() if (layer := as_layer(n, m)) is not None}
    refused: dict[str, str] = {}
    consumed: dict[str, list[Read]] = {}
    for paths in passes:
        for name, reason in paths.refused.items():
            refused.setdefault(name, reason)
        for name, uses in paths.consumed.items():
            known = consumed.setdefault(name, [])
            known += [read for read in uses if read not in known]
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            refused[name] = "its neurons feed back into its own gates"
    _refuse_shared(model, layers, consumed, refused)
    groups = []
    for union in _unions([sources for uses in consumed.values() for read in uses for sources in read]):
        bad = [s for s in union if s in refused]
        group = refused[bad[0]] if bad else _group(passes, union, layers, consumed)
        if isinstance(group, str):
            refused.update({s: group for s in union if s not in refused})
        else:
            groups.append(group)
    taken = {maker.name for group in groups for maker in group.makers}
    for name in layers:
        if name not in taken:
            ran = name in consumed
            refused.setdefault(name, "its output reaches no layer" if ran else "it did not run on the batch")
    order = list(layers)
    groups.sort(key=lambda group: order.index(group.name))
    rest = {name: reason for name, reason in refused.items() if name not in taken}
    rank = {name: i for i, name in enumerate(order)}
    return Wiring(tuple(groups), dict(sorted(rest.items(), key=lambda i: rank.get(i[0], len(rank)))), "recorded")


def _refuse_shared(
    model: nn.Module, layers: dict[str, Layer], consumed: dict[str, list[Read]], refused: dict[str, str]
) -> None:
    """Weights that two modules hold, or that are computed; layers that read one thing here and another there."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    for name, layer in layers.items():
        reason = ""
        weight = layer.module._parameters.get("weight")
        if weight is None:
            reason = "its weight is parametrized"
        elif len(owners[id(weight)]) > 1:
            reason = f"its weight is shared by {', '.join(owners[id(weight)])}"
        elif "its weight is changed" in refused.get(name, ""):
            reason = refused[name]
        uses = consumed.get(name, [])
        if reason:
            refused[name] = reason
        elif len(uses) > 1:
            reason = f"it feeds {name}, which reads several layers"
        for source in {s for read in uses for sources in read for s in sources} if reason else ():
            refused.setdefault(source, reason if name in reason else f"it feeds {name}, but {reason}")


def _group(
    passes: Sequence[NeuronPaths], union: frozenset[str], layers: dict[str, Layer], consumed: dict[str, list[Read]]
) -> Group | str:
    """The neurons that these layers make together, or why they are none."""
    makers = tuple(layers[name] for name in layers if name in union)
    width = makers[0].out_size
    consumers: dict[str, Consumer] = {}
    columns: dict[str, tuple[int, ...]] = {}
    for name, uses in consumed.items():
        read = next(iter(uses), {})
        held = {line for sources, line in read.items() if sources & union}
        if len(held) > 1:
            return f"{name} reads its neurons at two places"
        for line in held:
            consumer = Consumer.of(layers[name], width, line)
            if consumer is None:
                return f"{name} reads only some of its neurons"
            consumers[name], columns[name] = consumer, line
    first = next(iter(consumers))
    sources = union if any(union in paths.readings for paths in passes) else frozenset({makers[0].name})
    ran = next(paths for paths in passes if sources in paths.readings)
    norms = {n: m for paths in passes for source in union for n, m in paths.norms.get(source, {}).items()}
    late = any(paths.late & union for paths in passes)
    reading = find_reading(ran.graph, ran.names, ran.readings[sources], first, columns[first])
    return Group(makers, tuple(consumers.values()), tuple(norms.items()), reading, late)


def _unions(sets: list[frozenset[str]]) -> list[frozenset[str]]:
    """Sources that are combined element by element belong to one group."""
    whole: list[frozenset[str]] = []
    for one in sets:
        meeting = [other for other in whole if other & one]
        whole = [other for other in whole if not other & one] + [one.union(*meeting)]
    return whole


def _from_map(model: nn.Module, consumers: Mapping[str, str | Sequence[str]]) -> Wiring:
    groups = []
    for maker_name, readers in consumers.items():
        maker = _named_layer(model, maker_name)
        found = []
        for reader_name in [readers] if isinstance(readers, str) else readers:
            reader = _named_layer(model, reader_name)
            if reader.in_size % maker.out_size:
                raise WiringError(
                    f"consumers: {reader_name!r} reads {reader.in_size} values, not a multiple of the "
                    f"{maker.out_size} neurons of {maker_name!r}"
                )
            convolved = isinstance(maker.module, (*PLAIN_CONVS, *TRANSPOSED_CONVS))
            spread = reader.in_size // maker.out_size
            line = [i // spread if convolved else i % maker.out_size for i in range(reader.in_size)]
            consumer = Consumer.of(reader, maker.out_size, line)
            assert consumer is not None
            found.append(consumer)
        first = found[0]
        channel = isinstance(first.layer.module, (*PLAIN_CONVS, *TRANSPOSED_CONVS))
        order: Order = "channel" if channel else first.order or "last"
        groups.append(Group((maker,), tuple(found), (), Reading(first.layer.name, "input", order)))
    named = {maker.name for group in groups for maker in group.makers}
    layers = [name for name, module in model.named_modules() if as_layer(name, module) is not None]
    return Wiring(tuple(groups), {n: "not in the given map" for n in layers if n not in named}, "stated")


def _named_layer(model: nn.Module, name: str) -> Layer:
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise WiringError(f"consumers: the model has no module {name!r}") from error
    layer = as_layer(name, module)
    if layer is None:
        raise WiringError(f"consumers: {name!r} is {type(module).__name__}, neither Linear nor convolution")
    return layer


def watch(model: nn.Module, group: Group, record: Callable[[Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    """Call `record` with the activity (…, neurons) of a group at every forward pass.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> group = wire(model, [torch.zeros(5, 2)]).groups[0]
    >>> handle = watch(model, group, lambda activity: print(tuple(activity.shape)))
    >>> _ = model(torch.zeros(5, 2))
    (5, 3)
    >>> handle.remove()
    """
    reading, width = group.reading, group.width
    module = model.get_submodule(reading.module)
    if reading.side == "output":

        def after(_: nn.Module, __: object, output: Tensor) -> None:
            record(reading.per_neuron(output.detach(), width))

        return module.register_forward_hook(after)

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        record(reading.per_neuron(inputs[0].detach(), width))

    return module.register_forward_pre_hook(before)
