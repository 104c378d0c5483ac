"""Replacing single neurons of a model, and everything that follows from it.

Incoming weights are drawn again by the layer's own scheme and outgoing ones become zero, so that the network's output
does not jump; normalization entries of the neuron start again, and so do exactly the optimizer's rows and columns. A
weight between two replaced neurons is drawn again: it is cut off from the output by the second one, and with a zero
there a chain of dead layers would stay dead. Writes go through `index_copy_` and `index_fill_`: an indexed
`w[:, mask].data.fill_(0)`, as in released code of several papers, fills a copy and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rekindle import initial, optimizers
from rekindle.blocks.names import cleaner, unwrapped
from rekindle.optimizers import StateReset
from rekindle.optimizers.rows import put_rows
from rekindle.projection.receipt import BlockRecord, Receipt
from rekindle.recording.neurons import STARTS
from rekindle.recording.wiring import Group, Wiring


def check_finite(parameters: Mapping[str, Tensor]) -> None:
    """Raise if a weight holds NaN or Inf."""
    for name, parameter in parameters.items():
        if not math.isfinite(float(parameter.detach().sum())) and not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"{name!r} holds NaN or Inf; nothing was changed")


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
    """Which neurons of which groups are replaced, and everything that follows from it."""

    model: nn.Module
    wiring: Wiring
    neurons: Mapping[str, Tensor]  # group name → indices
    means: Mapping[str, Tensor] = field(default_factory=dict)  # group name → mean activity of all its neurons
    fresh: Callable[[], nn.Module] | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.groups = [g for g in self.wiring if len(self.neurons.get(g.name, ())) > 0]
        self._clean = cleaner(unwrapped(self.model))  # a part may be compiled by itself

    def apply(
        self,
        method: str,
        optimizer: object,
        generator: Callable[[], torch.Generator],
        *,
        second_moment: Literal["mean", "zero"] = "mean",
        notes: Sequence[str] = (),
    ) -> Receipt:
        """Check, redraw, zero, reset optimizer rows, and report; the generator is used only if there are neurons."""
        places = self._places()
        optimizers.check(optimizer, {name: place.parameter for name, place in places.items()})
        check_finite({name: place.parameter for name, place in places.items()})
        drawn = self._draw(generator) if self.groups else {}
        notes = [*notes, *self._notes_of_whole()]
        with torch.no_grad():
            for group in self.groups:
                self._hand_over(group, notes)
            for group in self.groups:
                self._cut(group)
            for group in self.groups:  # last: what is drawn between two replaced neurons stays
                self._renew(group, drawn)
        return Receipt(
            method,
            tuple(record for group in self.groups for record in self._records(group)),
            {**self.wiring.refused, **self.skipped},
            optimizer=self._reset(optimizer, places, second_moment),
            gradients_cleared=self._clear(places),
            notes=tuple(dict.fromkeys(notes)),
        )

    def index(self, group: Group) -> Tensor:
        """The neurons to replace, on the device of their weights."""
        return self.neurons[group.name].to(group.makers[0].weight.device)

    def _notes_of_whole(self) -> list[str]:
        """Which layers were replaced as a whole, as text."""
        whole = [group.name for group in self.groups if self._all_of(group)]
        return [f"replaced as a whole: {', '.join(whole)}"] if whole else []

    def _all_of(self, group: Group) -> bool:
        return len(self.neurons[group.name]) == group.width

    def _draw(self, generator: Callable[[], torch.Generator]) -> dict[str, Tensor]:
        names = [self._clean(f"{maker.name}.weight") for group in self.groups for maker in group.makers]
        return initial.draw(unwrapped(self.model), generator=generator(), fresh=self.fresh, names=names)

    def _hand_over(self, group: Group, notes: list[str]) -> None:
        """Add the mean contribution of the replaced neurons to the consumers' biases (Dohare et al., 2024)."""
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
            rows = drawn[self._clean(f"{maker.name}.weight")].index_select(maker.out_axis, index)
            put_rows(maker.weight, maker.out_axis, index, rows.to(maker.weight))
            if maker.bias is not None:
                put_rows(maker.bias, 0, index, 0)
        for _, norm in group.norms:
            for name, value in STARTS.items():
                tensor = getattr(norm, name, None)
                if isinstance(tensor, Tensor):
                    put_rows(tensor, 0, index, value)

    def _cut(self, group: Group) -> None:
        for consumer in group.consumers:
            put_rows(consumer.layer.weight, consumer.layer.in_axis, consumer.columns(self.index(group)), 0)

    def _places(self) -> dict[str, _Places]:
        places: dict[str, _Places] = {}
        for group in self.groups:
            index = self.index(group)
            for maker in group.makers:
                weight = places.setdefault(self._clean(f"{maker.name}.weight"), _Places(maker.weight))
                weight.rows, weight.row_dim = index, maker.out_axis
                if maker.bias is not None:
                    places[self._clean(f"{maker.name}.bias")] = _Places(maker.bias, index)
            for name, norm in group.norms:
                for part in STARTS:
                    tensor = getattr(norm, part, None)
                    if isinstance(tensor, Parameter):
                        places[self._clean(f"{name}.{part}")] = _Places(tensor, index)
            for consumer in group.consumers:
                layer = consumer.layer
                weight = places.setdefault(self._clean(f"{layer.name}.weight"), _Places(layer.weight))
                weight.columns, weight.column_dim = consumer.columns(index), layer.in_axis
        return places

    def _reset(
        self, optimizer: object, places: Mapping[str, _Places], second_moment: Literal["mean", "zero"]
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
        drawn = {maker.name for other in self.groups if self._all_of(other) for maker in other.makers}
        made = [
            BlockRecord(
                self._clean(f"{maker.name}.weight"),
                out=maker.out_size,
                in_=maker.weight.numel() // maker.out_size,
                counts={"neurons": neurons if maker is group.makers[0] else 0, "rows": neurons},
            )
            for maker in group.makers
        ]
        read = [
            BlockRecord(
                self._clean(f"{consumer.layer.name}.weight"),
                out=consumer.layer.out_size,
                in_=consumer.layer.weight.numel() // consumer.layer.out_size,
                counts={"columns": neurons * consumer.spread},
            )
            for consumer in group.consumers
            if consumer.layer.name not in drawn
        ]
        return made + read
