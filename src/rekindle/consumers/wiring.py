"""Who consumes a neuron's output.

Remedies that replace single neurons re-draw what comes in and clear what goes out, so they must know, for every
row of a layer, which columns of which other layers read it. That is read off the model's own computation: a
symbolic trace by torch.fx of the model (or of each part of it that can be traced), then torch.export for what
fx does not reach, where a batch is at hand, or a map that the user gives. Nothing is guessed: a layer whose
neurons meet a residual stream, a concatenation, attention or anything unknown is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Order = Literal["channel", "last", "major", "minor"]

_PLAIN_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, *_PLAIN_CONV, *_TRANSPOSED)


class WiringError(ValueError):
    """The consumers of a model's neurons cannot be told; the message carries the reasons."""


@dataclass(frozen=True)
class Layer:
    """A layer as maker or reader of neurons: its module and where its weight has outputs and inputs."""

    name: str
    module: nn.Module = field(repr=False, compare=False)
    out_axis: int
    in_axis: int

    @property
    def weight(self) -> nn.Parameter:
        """The weight that holds a row for each neuron made and a column for each one read."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, where there is one."""
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, nn.Parameter) else None

    @property
    def out_size(self) -> int:
        """How many neurons the layer makes."""
        return self.weight.shape[self.out_axis]

    @property
    def in_size(self) -> int:
        """How many values the layer reads."""
        return self.weight.shape[self.in_axis]


def as_layer(name: str, module: nn.Module) -> Layer | None:
    """The module as a :class:`Layer`, or None if its class is none whose rows and columns are known.

    >>> as_layer("fc", nn.Linear(3, 5)).out_size
    5
    >>> as_layer("norm", nn.LayerNorm(3)) is None
    True
    """
    if isinstance(module, (nn.Linear, *_PLAIN_CONV)):
        return Layer(name, module, 0, 1)
    if isinstance(module, _TRANSPOSED) or is_transposed_linear(module):
        return Layer(name, module, 1, 0)
    return None


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether this is GPT-2's `Conv1D`, a Linear whose weight is stored as (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "weight")


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
class Reading:
    """Where neurons' activity can be read: the first input of a module, or its output."""

    module: str
    side: Literal["input", "output"]
    order: Order

    def per_neuron(self, value: Tensor, width: int) -> Tensor:
        """The value with the neurons as its last axis; a view where strides allow, so that watching stays cheap.

        >>> Reading("relu", "output", "channel").per_neuron(torch.zeros(2, 5, 3, 3), 5).shape
        torch.Size([2, 3, 3, 5])
        """
        if self.order == "channel":
            return value.movedim(1, -1)
        if self.order == "major":
            return value.reshape(value.shape[0], width, -1).movedim(1, -1)
        return value.reshape(value.shape[0], -1, width) if self.order == "minor" else value


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


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside `torch.compile` and DDP."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model._modules.get("module")
        if inner is None:
            return model
        model = inner


def wire(
    model: nn.Module,
    batches: Any = None,
    *,
    consumers: Mapping[str, str | Sequence[str]] | None = None,
) -> Wiring:
    """Find the consumers of every hidden neuron, or raise :class:`WiringError` with the reasons.

    `batches` (its first batch) lets torch.export see what torch.fx cannot trace; `consumers` is a map from layer
    to consuming layer or layers, taken as given after its shapes are checked.

    >>> print(wire(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2))))
    1 group of neurons wired by torch.fx
      0 (4 neurons) → 3 (9 columns each)
      3: refused, its neurons are the model's output
    """
    from rekindle.consumers import tracing

    inner = unwrapped(model)
    if consumers is not None:
        return _from_map(inner, consumers)
    found = tracing.trace(inner)
    if found.unreached and batches is not None:
        found = found.joined(tracing.export(inner, next(iter(batches))))
    wiring = found.wiring(inner)
    if not wiring.groups:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in wiring.refused.items()) or "it has no layers"
        raise WiringError(
            f"no hidden neuron of {type(inner).__name__} has known consumers ({reasons}); "
            "give batches= so that torch.export can look, or consumers={'layer': 'consuming layer'}"
        )
    return wiring


def _from_map(model: nn.Module, consumers: Mapping[str, str | Sequence[str]]) -> Wiring:
    groups = []
    for maker_name, readers in consumers.items():
        maker = _named_layer(model, maker_name)
        found = []
        for reader_name in [readers] if isinstance(readers, str) else readers:
            reader = _named_layer(model, reader_name)
            if reader.in_size % maker.out_size:
                raise WiringError(
                    f"consumers: {reader_name!r} reads {reader.in_size} values, no multiple of the "
                    f"{maker.out_size} neurons of {maker_name!r}"
                )
            convolved = isinstance(maker.module, (*_PLAIN_CONV, *_TRANSPOSED))
            flat: Order = "major" if convolved else "minor"
            same: Order = "channel" if isinstance(reader.module, (*_PLAIN_CONV, *_TRANSPOSED)) else "last"
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
    module = unwrapped(model).get_submodule(reading.module)
    if reading.side == "output":

        def after(_: nn.Module, __: Any, output: Tensor) -> None:
            record(reading.per_neuron(output.detach(), width))

        return module.register_forward_hook(after)

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        record(reading.per_neuron(inputs[0].detach(), width))

    return module.register_forward_pre_hook(before)
