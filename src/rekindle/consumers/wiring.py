"""Who consumes a neuron's output.

Remedies that replace single neurons redraw incoming and clear outgoing weights, so they must know, for every row of a
layer, which columns of which other layers read it. That is read off the model's own computation: a symbolic trace by
torch.fx of the model (or of each part of it that can be traced), then torch.export for what fx does not reach, where a
batch is given, or a map from the user. Nothing is guessed: a layer whose neurons meet a residual stream, a
concatenation, attention or anything unknown is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.blocks.names import PLAIN_CONVS, TRANSPOSED_CONVS, Layer, as_layer
from rekindle.consumers.graph import RECURRENT
from rekindle.consumers.paths import Order, Paths, Reading, export, trace


class WiringError(ValueError):
    """The consumers of a model's neurons cannot be determined; the message gives the reasons."""


@dataclass(frozen=True)
class Consumer:
    """A layer that reads neurons; each neuron may own several columns after a flatten."""

    layer: Layer
    width: int
    order: Order

    @property
    def spread(self) -> int:
        """How many columns belong to one neuron."""
        return self.layer.in_size // self.width

    def columns(self, neurons: Tensor) -> Tensor:
        """The columns of the consumer's weight that read the given neurons (indices).

        >>> flat = Consumer(as_layer("fc", nn.Linear(12, 1)), width=3, order="major")
        >>> flat.columns(torch.tensor([1])).tolist()
        [4, 5, 6, 7]
        """
        offsets = torch.arange(self.spread, device=neurons.device)
        if self.order == "minor":
            return (neurons[:, None] + offsets * self.width).flatten()
        return (neurons[:, None] * self.spread + offsets).flatten()


@dataclass(frozen=True)
class Group:
    """Hidden neurons: rows with one index in `makers` form one neuron, read by `consumers`.

    Most groups have one maker; a gated MLP has two, multiplied elementwise. `norms` are the normalisation
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
        lines = [f"{len(self.groups)} group{'s' * (len(self.groups) != 1)} of neurons wired by {self.how}"]
        lines += [f"  {group}" for group in self.groups]
        lines += [f"  {name}: refused, {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)

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
) -> Wiring:
    """Find the consumers of every hidden neuron, or raise :class:`WiringError` with the reasons.

    `model` is the user's own module, without wrappers (`rekindle.blocks.names.unwrapped`).
    `batches` (its first batch) lets torch.export see what torch.fx cannot trace; `consumers` is a map from layer
    to consuming layer or layers, taken as given after its shapes are checked.

    >>> print(wire(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2))))
    1 group of neurons wired by torch.fx
      0 (4 neurons) → 3 (9 columns each)
      3: refused, its neurons are the model's output
    """
    if consumers is not None:
        return _from_map(model, consumers)
    found = trace(model)
    if found.unreached and batches is not None:
        found = found.joined(export(model, next(iter(batches))))
    wiring = _wiring(found, model)
    if not wiring.groups:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in wiring.refused.items()) or "it has no layers"
        raise WiringError(
            f"no hidden neuron of {type(model).__name__} has known consumers ({reasons}); "
            "give batches= so that torch.export can look, or consumers={'layer': 'consuming layer'}"
        )
    return wiring


def _wiring(found: Paths, model: nn.Module) -> Wiring:
    """The groups that survived, and the reasons for all other layers."""
    layers = {n: layer for n, m in model.named_modules() if (layer := as_layer(n, m)) is not None}
    refused = {**found.unreached, **found.refused}
    for name, module in model.named_modules():
        if isinstance(module, RECURRENT):
            refused[name] = "its neurons feed back into its own gates"
    _refuse_shared(found, model, layers, refused)
    unions = _unions([sources for uses in found.consumed.values() for sources, _ in uses])
    groups = []
    for union in unions:
        bad = [s for s in union if s in refused]
        if bad:
            refused.update({s: refused[bad[0]] for s in union if s not in refused})
            continue
        groups.append(_group(found, union, layers))
    taken = {maker.name for group in groups for maker in group.makers}
    for name in layers:
        if name not in taken:
            refused.setdefault(name, "its output reaches no layer")
    order = list(layers)
    groups.sort(key=lambda group: order.index(group.name))
    kept = {n: r for n, r in refused.items() if n not in taken}
    return Wiring(tuple(groups), dict(sorted(kept.items(), key=lambda i: _rank(order, i[0]))), found.how)


def _refuse_shared(found: Paths, model: nn.Module, layers: dict[str, Layer], refused: dict[str, str]) -> None:
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    for name, layer in layers.items():
        reason = None
        if layer.module._parameters.get("weight") is None:
            reason = "its weight is parametrized"
        elif len(owners[id(layer.weight)]) > 1:
            reason = f"its weight is shared by {', '.join(owners[id(layer.weight)])}"
        if reason is not None:
            refused[name] = reason
        for sources, _ in found.consumed.get(name, []):
            if reason is not None:
                refused.update({s: f"it feeds {name}, but {reason}" for s in sources if s not in refused})
    for name, uses in found.consumed.items():
        if len({sources for sources, _ in uses}) > 1:
            for sources, _ in uses:
                refused.update(dict.fromkeys(sources, f"it feeds {name}, which reads several layers"))


def _group(found: Paths, union: frozenset[str], layers: dict[str, Layer]) -> Group:
    makers = tuple(layers[name] for name in layers if name in union)
    consumers, norms = {}, {}
    for name, uses in found.consumed.items():
        for sources, order in uses:
            if sources & union:
                consumers[name] = Consumer(layers[name], makers[0].out_size, order)
    for source in union:
        norms.update(found.norms.get(source, {}))
    reading = found.readings.get(union)
    if reading is None:
        first = next(iter(consumers.values()))
        reading = Reading(first.layer.name, "input", first.order)
    return Group(makers, tuple(consumers.values()), tuple(norms.items()), reading, bool(found.late & union))


def _rank(order: list[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _unions(sets: list[frozenset[str]]) -> list[frozenset[str]]:
    """Sources that are combined elementwise belong to one group."""
    whole: list[frozenset[str]] = []
    for one in filter(None, sets):
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
            flat: Order = "major" if convolved else "minor"
            same: Order = "channel" if isinstance(reader.module, (*PLAIN_CONVS, *TRANSPOSED_CONVS)) else "last"
            found.append(Consumer(reader, maker.out_size, same if reader.in_size == maker.out_size else flat))
        first = found[0]
        groups.append(Group((maker,), tuple(found), (), Reading(first.layer.name, "input", first.order)))
    named = {maker.name for group in groups for maker in group.makers}
    layers = [name for name, module in model.named_modules() if as_layer(name, module) is not None]
    return Wiring(tuple(groups), {n: "not in the given map" for n in layers if n not in named}, "the given map")


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
    >>> handle = watch(model, wire(model).groups[0], lambda activity: print(tuple(activity.shape)))
    >>> _ = model(torch.zeros(5, 2))
    (5, 3)
    >>> handle.remove()
    """
    reading, width = group.reading, group.width
    module = model.get_submodule(reading.module)
    if reading.side == "output":

        def after(_: nn.Module, __: Any, output: Tensor) -> None:
            record(reading.per_neuron(output.detach(), width))

        return module.register_forward_hook(after)

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        record(reading.per_neuron(inputs[0].detach(), width))

    return module.register_forward_pre_hook(before)
