"""Watching hidden neurons while a model trains, and replacing single ones.

Replacing a neuron re-draws what comes in by the layer's own scheme and zeroes what goes out, so that the network's
output does not jump; normalisation entries of the neuron start again, and so do exactly the optimizer's rows and
columns. Writes go through `index_copy_` and `index_fill_`: an indexed `w[:, mask].data.fill_(0)`, as in released
code of several papers, fills a copy and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rekindle import initial
from rekindle.blocks.names import unwrapped
from rekindle.consumers.wiring import Group, Wiring, WiringError, watch, wire
from rekindle.isolation import call, isolated
from rekindle.methods.remedy import PerModel, Remedy
from rekindle.optimizers import StateReset
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.receipt import Batch, BlockRecord, Meter, Receipt

Handle = torch.utils.hooks.RemovableHandle


def sizes(values: Tensor, axis: int = -1) -> Tensor:
    """Σ|v| over all axes but one, in one pass and at least in float32."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    total: Tensor = torch.linalg.vector_norm(values, 1, dim=others(values, axis), dtype=dtype)
    return total


def others(values: Tensor, axis: int = -1) -> list[int]:
    """All axes but one."""
    return [dim for dim in range(values.ndim) if dim != axis % values.ndim]


class Removable(Protocol):
    """A hook's handle, or another observation."""

    def remove(self) -> None:
        """Take it off."""


class Observation:
    """Hooks that gather statistics; `remove()` them, or use it in a `with` statement."""

    def __init__(self, handles: Sequence[Removable]) -> None:
        self._handles = list(handles)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


class NeuronRemedy(Remedy):
    """A remedy that judges and replaces single hidden neurons.

    `targets` are globs of layer names ("auto": every layer whose neurons' consumers are known). `consumers` is the
    map for models that cannot be traced (`rekindle.consumers.wiring.wire`). Layers that cannot be wired are in the
    receipt with the reason; a model without any is refused. `second_moment` is what Adam's second moment becomes in the
    replaced rows and columns: its step count is one number a parameter, so single rows cannot be quite fresh, and
    with a zero second moment their next step would be 3 to 6.5 times too large. `fresh` is a factory of a new model,
    from which incoming weights are taken where the model initialises itself in its `__init__`: else they are drawn by
    the modules' own `reset_parameters` (or transformers' scheme), which is not always the same.
    """

    def __init__(
        self,
        *,
        targets: str | Sequence[str] = "auto",
        consumers: Mapping[str, str | Sequence[str]] | None = None,
        second_moment: Literal["mean", "zero"] = "mean",
        fresh: Callable[[], nn.Module] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(seed=seed)
        if second_moment not in ("mean", "zero"):
            raise ValueError(f"second_moment={second_moment!r} is neither 'mean' nor 'zero'")
        self.targets = targets if isinstance(targets, str) else tuple(targets)
        self.second_moment = second_moment
        self._consumers, self._fresh = consumers, fresh
        self._wirings: PerModel[Wiring] = PerModel()

    def wiring(self, model: nn.Module, batches: Iterable[Batch] | None = None) -> Wiring:
        """The model's wiring, narrowed to the targets; found once a model."""
        if model not in self._wirings:
            found = wire(unwrapped(model), batches, consumers=self._consumers)
            if self.targets != "auto":
                globs = [self.targets] if isinstance(self.targets, str) else list(self.targets)
                found = found.only(lambda name: any(fnmatchcase(name, glob) for glob in globs))
                if not found.groups:
                    raise WiringError(f"targets={globs} match no layer whose consumers are known\n{found}")
            self._wirings[model] = _without_frozen(found)
        return self._wirings[model]

    def observe(self, model: nn.Module, batches: Iterable[Batch] | None = None) -> Observation:
        """Gather statistics at every forward pass in training mode until the result is removed.

        `batches` only helps to wire a model that torch.fx cannot trace.
        """
        inner = unwrapped(model)

        def recorder(group: Group) -> Handle:
            def training(activity: Tensor) -> None:
                if inner.training and torch.is_grad_enabled():
                    self.record(group, activity)

            return watch(inner, group, training)

        return Observation([recorder(group) for group in self.wiring(model, batches)])

    def record(self, group: Group, activity: Tensor) -> None:
        """Take in the activity (…, neurons) of one forward pass."""

    def look(self, model: nn.Module, batches: Iterable[Batch]) -> None:
        """Record the activity on `batches` in evaluation mode, leaving no trace on the model."""
        wiring = self.wiring(model, batches)
        seen: set[str] = set()

        def recorder(group: Group) -> Handle:
            def note(activity: Tensor) -> None:
                seen.add(group.name)
                self.record(group, activity)

            return watch(unwrapped(model), group, note)

        with isolated(model), torch.no_grad(), Observation([recorder(group) for group in wiring]):
            for batch in batches:
                call(model, batch)
        blind = [group.name for group in wiring if group.name not in seen]
        if blind:
            raise WiringError(f"the activity of {blind[0]!r} was not seen on the given batches: it is not measured")


def _without_frozen(wiring: Wiring) -> Wiring:
    def frozen(group: Group) -> bool:
        layers = [*group.makers, *(consumer.layer for consumer in group.consumers)]
        return not all(layer.weight.requires_grad for layer in layers)

    kept = tuple(group for group in wiring if not frozen(group))
    if not kept:
        raise WiringError("every layer whose consumers are known is frozen, or feeds a frozen one")
    out = {m.name: "it is frozen, or feeds a frozen layer" for g in wiring if frozen(g) for m in g.makers}
    return Wiring(kept, {**wiring.refused, **out}, wiring.how)


@dataclass
class _Places:
    """Rows and columns of one parameter that changed."""

    parameter: Parameter
    rows: Tensor | None = None
    row_dim: int = 0
    columns: Tensor | None = None
    column_dim: int = 1


@dataclass
class Replacement:
    """Which neurons of which groups go, and everything that follows from it."""

    model: nn.Module
    wiring: Wiring
    neurons: Mapping[str, Tensor]  # group name → indices
    means: Mapping[str, Tensor] = field(default_factory=dict)  # group name → mean activity of all its neurons
    fresh: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        self.groups = [g for g in self.wiring if len(self.neurons.get(g.name, ())) > 0]

    def apply(
        self,
        method: str,
        optimizer: Any,
        generator: torch.Generator,
        *,
        second_moment: Literal["mean", "zero"] = "mean",
        settings: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
        meter: Meter | None = None,
    ) -> Receipt:
        """Check, re-draw, cut, tidy the optimizer, and say so."""
        meter = meter or Meter()
        places = self._places()
        optimizers.check(optimizer, {name: place.parameter for name, place in places.items()})
        for name, place in places.items():
            if not bool(torch.isfinite(place.parameter).all()):
                raise ValueError(f"{name!r} holds NaN or Inf; nothing was changed")
        drawn = self._draw(generator)
        notes = [*notes]
        with torch.no_grad():
            for group in self.groups:
                self._hand_over(group, notes)
            for group in self.groups:
                self._renew(group, drawn)
            for group in self.groups:
                self._cut(group)
        return Receipt(
            method,
            tuple(record for group in self.groups for record in self._records(group)),
            dict(self.wiring.refused),
            settings or {},
            self._reset(optimizer, places, second_moment),
            gradients_cleared=self._clear(places),
            seconds=meter.seconds,
            memory=meter.memory,
            notes=tuple(dict.fromkeys(notes)),
        )

    def index(self, group: Group) -> Tensor:
        """The neurons to replace, on the device of their weights."""
        return self.neurons[group.name].to(group.makers[0].weight.device)

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        names = [f"{maker.name}.weight" for group in self.groups for maker in group.makers]
        return initial.draw(unwrapped(self.model), generator=generator, fresh=self.fresh, names=names) if names else {}

    def _hand_over(self, group: Group, notes: list[str]) -> None:
        """Give the consumers' biases what the leaving neurons contributed on average (Dohare et al., 2024)."""
        if group.name not in self.means:
            return
        if group.late:
            notes.append(f"{group.name}: a norm follows the activation, so no mean could be handed over")
            return
        index = self.index(group)
        mean = self.means[group.name].to(group.makers[0].weight)[index]
        for consumer in group.consumers:
            layer = consumer.layer
            if layer.bias is None:
                notes.append(f"{layer.name} has no bias to hand the mean over to")
                continue
            by_input = layer.weight.movedim(layer.in_axis, 0)[consumer.columns(index)]
            if by_input.ndim > 2:  # the taps of a convolution all see the mean
                by_input = by_input.flatten(2).sum(2)
            layer.bias.add_(mean.repeat_interleave(consumer.spread) @ by_input)

    def _renew(self, group: Group, drawn: Mapping[str, Tensor]) -> None:
        index = self.index(group)
        for maker in group.makers:
            rows = drawn[f"{maker.name}.weight"].index_select(maker.out_axis, index)
            maker.weight.index_copy_(maker.out_axis, index, rows.to(maker.weight))
            if maker.bias is not None:
                maker.bias.index_fill_(0, index, 0)
        for _, norm in group.norms:
            for name, value in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
                tensor = getattr(norm, name, None)
                if isinstance(tensor, Tensor):
                    tensor.index_fill_(0, index, value)

    def _cut(self, group: Group) -> None:
        for consumer in group.consumers:
            consumer.layer.weight.index_fill_(consumer.layer.in_axis, consumer.columns(self.index(group)), 0)

    def _places(self) -> dict[str, _Places]:
        places: dict[str, _Places] = {}
        for group in self.groups:
            index = self.index(group)
            for maker in group.makers:
                weight = places.setdefault(f"{maker.name}.weight", _Places(maker.weight))
                weight.rows, weight.row_dim = index, maker.out_axis
                if maker.bias is not None:
                    places[f"{maker.name}.bias"] = _Places(maker.bias, index)
            for name, norm in group.norms:
                for part in ("weight", "bias"):
                    tensor = getattr(norm, part, None)
                    if isinstance(tensor, Parameter):
                        places[f"{name}.{part}"] = _Places(tensor, index)
            for consumer in group.consumers:
                layer = consumer.layer
                weight = places.setdefault(f"{layer.name}.weight", _Places(layer.weight))
                weight.columns, weight.column_dim = consumer.columns(index), layer.in_axis
        return places

    def _reset(
        self, optimizer: Any, places: Mapping[str, _Places], second_moment: Literal["mean", "zero"]
    ) -> StateReset:
        total = StateReset("rows")
        for name, place in places.items():
            total += optimizers.reset_rows(
                optimizer,
                place.parameter,
                place.rows,
                place.columns,
                row_dim=place.row_dim,
                column_dim=place.column_dim,
                second_moment=second_moment,
                name=name,
            )
        return total

    def _clear(self, places: Mapping[str, _Places]) -> int:
        stale = [place for place in places.values() if place.parameter.grad is not None]
        for place in stale:
            assert place.parameter.grad is not None
            for index, dim in ((place.rows, place.row_dim), (place.columns, place.column_dim)):
                if index is not None:
                    place.parameter.grad.index_fill_(dim, index, 0)
        return len(stale)

    def _records(self, group: Group) -> list[BlockRecord]:
        neurons = len(self.neurons[group.name])
        made = [
            BlockRecord(
                f"{maker.name}.weight",
                out=maker.out_size,
                in_=maker.weight.numel() // maker.out_size,
                counts={"neurons": neurons if maker is group.makers[0] else 0, "rows": neurons},
            )
            for maker in group.makers
        ]
        read = [
            BlockRecord(
                f"{consumer.layer.name}.weight",
                out=consumer.layer.out_size,
                in_=consumer.layer.weight.numel() // consumer.layer.out_size,
                counts={"columns": neurons * consumer.spread},
            )
            for consumer in group.consumers
        ]
        return made + read
