"""Watching hidden neurons while a model trains, and replacing single ones.

Replacing a neuron redraws its incoming weights by the layer's own scheme and zeroes the outgoing ones, so that the
network's output does not jump; normalisation entries of the neuron start again, and so do exactly the optimizer's rows
and columns. Writes go through `index_copy_` and `index_fill_`: an indexed `w[:, mask].data.fill_(0)`, as in released
code of several papers, fills a copy and changes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rekindle import initial, optimizers
from rekindle.blocks.names import cleaner, unwrapped
from rekindle.consumers.wiring import Group, Wiring, WiringError, watch, wire
from rekindle.isolation import call as run
from rekindle.isolation import isolated
from rekindle.methods.caching import PerModel
from rekindle.methods.call import Call
from rekindle.methods.remedy import Observation, Remedy
from rekindle.optimizers import StateReset
from rekindle.projection.method import Batch, Loss
from rekindle.projection.receipt import BlockRecord, Receipt

Handle = torch.utils.hooks.RemovableHandle


def sizes(values: Tensor, axis: int = -1) -> Tensor:
    """Σ|v| over all axes but one, in one pass and at least in float32."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    total: Tensor = torch.linalg.vector_norm(values, 1, dim=others(values, axis), dtype=dtype)
    return total


def others(values: Tensor, axis: int = -1) -> list[int]:
    """All axes but one."""
    return [dim for dim in range(values.ndim) if dim != axis % values.ndim]


@dataclass
class Sums:
    """Sums over passes of one row or more of numbers per neuron, by name.

    A pass that holds NaN or Inf is left out and counted: one bad batch must not decide about every neuron. Nothing is
    read back from the device before `over` is called.
    """

    values: dict[str, Tensor] = field(default_factory=dict)  # (…, neurons)
    seen: dict[str, Tensor] = field(default_factory=dict)  # how many values each sum is of
    left_out: dict[str, Tensor] = field(default_factory=dict)  # passes

    def add(self, name: str, values: Tensor, count: int = 1) -> None:
        """Add one pass of `count` values per neuron."""
        finite = values.isfinite().all()
        kept = torch.where(finite, values, torch.zeros_like(values))
        known = name in self.values
        self.values[name] = self.values[name] + kept if known else kept
        self.seen[name] = (self.seen[name] if known else 0) + finite.double() * count
        self.left_out[name] = (self.left_out[name] if known else 0) + (~finite).double()

    def over(self, call: Call, sizes: Mapping[str, tuple[int, ...]]) -> Sums:
        """The sums over all replicas of the model, of these names; one that saw nothing adds nothing."""
        if call.replicas is None:
            return self
        device = next(call.inner.parameters()).device
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        flat = []
        for name, size in sizes.items():
            flat += [self.values.get(name, torch.zeros(size, device=device))]
            flat += [self.seen.get(name, nothing), self.left_out.get(name, nothing)]
        flat = call.total(flat)
        named = {name: flat[3 * at : 3 * at + 3] for at, name in enumerate(sizes)}
        known = {name: three for name, three in named.items() if float(three[1] + three[2])}
        return Sums(*({name: three[at] for name, three in known.items()} for at in range(3)))

    def notes(self) -> list[str]:
        """What was left out, as text."""
        bad = {name: int(count) for name, count in self.left_out.items() if float(count)}
        return [f"{name}: {count} passes with NaN or Inf were left out" for name, count in bad.items()]

    def clear(self, names: Collection[str] | None = None) -> None:
        """Start counting anew, of these names or of all."""
        for each in (self.values, self.seen, self.left_out):
            for name in list(each) if names is None else names:
                each.pop(name, None)

    def state(self) -> dict[str, Any]:
        """What a state dict keeps."""
        return {"sums": dict(self.values), "seen": dict(self.seen), "left_out": dict(self.left_out)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Sums:
        """Back from `state()`."""
        values = dict(state["sums"])
        seen = {name: torch.as_tensor(count, dtype=torch.float64) for name, count in state.get("seen", {}).items()}
        left_out = state.get("left_out", {})
        return cls(
            values,
            {name: seen.get(name, torch.ones((), dtype=torch.float64)) for name in values},
            {name: left_out.get(name, torch.zeros((), dtype=torch.float64)) for name in values},
        )


class NeuronOptions(TypedDict, total=False):
    """What every neuron remedy takes, see `NeuronRemedy`."""

    targets: str | Sequence[str]
    consumers: Mapping[str, str | Sequence[str]] | None
    second_moment: Literal["mean", "zero"]
    fresh: Callable[[], nn.Module] | None
    seed: int


@dataclass
class Judgement:
    """Which neurons are to be replaced, by layer, and the notes for the receipt."""

    neurons: Mapping[str, Tensor]
    means: Mapping[str, Tensor] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


class NeuronRemedy(Remedy):
    """A remedy that judges and replaces single hidden neurons; subclasses implement `record` and `judge`.

    `targets` are globs of layer names ("auto": every layer whose neurons' consumers are known). `consumers` is the
    map for models that cannot be traced (`rekindle.consumers.wiring.wire`). Layers that cannot be wired are in the
    receipt with the reason; a model without any is refused. `second_moment` is what Adam's second moment becomes in the
    replaced rows and columns: its step count is one number per parameter, so single rows cannot be fully reset, and
    with a zero second moment their next step would be 3 to 6.5 times too large. `fresh` is a factory of a new model,
    from which incoming weights are taken where the model initialises itself in its `__init__`: else they are drawn by
    the modules' own `reset_parameters` (or transformers' scheme), which is not always the same.
    """

    def __init__(self, **options: Unpack[NeuronOptions]) -> None:
        super().__init__(seed=options.pop("seed", 0))
        targets, second_moment = options.pop("targets", "auto"), options.pop("second_moment", "mean")
        if second_moment not in ("mean", "zero"):
            raise ValueError(f"second_moment={second_moment!r} is neither 'mean' nor 'zero'")
        self.targets = targets if isinstance(targets, str) else tuple(targets)
        self.second_moment = second_moment
        self._consumers, self._fresh = options.pop("consumers", None), options.pop("fresh", None)
        if options:
            raise TypeError(f"{type(self).__name__} takes no {next(iter(options))!r}")
        self._wirings: PerModel[tuple[Wiring, dict[str, weakref.ref[Tensor]]]] = PerModel()

    def apply(self, call: Call) -> Receipt:
        """Judge by the batches of the call or by what `observe` saw, and replace."""
        wiring = self.wiring(call.model, call.batches)
        self.measure(call)
        judged = self.judge(call, wiring)
        receipt = Replacement(call.model, wiring, judged.neurons, judged.means, self._fresh, judged.skipped).apply(
            self.name,
            call.optimizer,
            lambda: call.generator,
            second_moment=self.second_moment,
            notes=judged.notes,
        )
        self.replaced(judged.neurons)
        return receipt

    def judge(self, call: Call, wiring: Wiring) -> Judgement:
        """Which neurons are replaced; the same on every replica of the model."""
        raise NotImplementedError

    def replaced(self, neurons: Mapping[str, Tensor]) -> None:
        """Start anew with what was gathered about these neurons."""

    def forget(self, layers: Collection[str] | None = None) -> None:
        """Drop what was gathered, of these layers or of all."""

    def wiring(self, model: nn.Module, batches: Iterable[Batch] | None = None) -> Wiring:
        """The model's wiring, narrowed to the targets; found once per model, and again when a part was replaced.

        What was gathered about a layer whose weight was replaced is dropped then.
        """

        def find() -> tuple[Wiring, dict[str, weakref.ref[Tensor]]]:
            found = wire(unwrapped(model), batches, consumers=self._consumers)
            if self.targets != "auto":
                globs = [self.targets] if isinstance(self.targets, str) else list(self.targets)
                found = found.only(lambda name: any(fnmatchcase(name, glob) for glob in globs))
                if not found.groups:
                    raise WiringError(f"targets={globs} match no layer whose consumers are known\n{found}")
            found = _without_frozen(found)
            return found, {maker.name: weakref.ref(maker.weight) for group in found for maker in group.makers}

        old: list[tuple[Wiring, dict[str, weakref.ref[Tensor]]]] = []
        wiring, owners = self._wirings.get(model, find, old.append)
        if old:
            self.forget(
                [name for name, owner in old[0][1].items() if name not in owners or owners[name]() is not owner()]
            )
        return wiring

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

        return Observation(recorder(group) for group in self.wiring(model, batches))

    def record(self, group: Group, activity: Tensor) -> None:
        """Take in the activity (…, neurons) of one forward pass."""

    def look(self, model: nn.Module, batches: Iterable[Batch], loss: Loss | None = None) -> None:
        """Record what `batches` show, in evaluation mode and without a trace on the model."""
        self.measure(Call(model, batches=batches, loss=loss))

    def measure(self, call: Call) -> None:
        """Record the activity on the call's batches, if there are any."""
        if call.batches is None:
            return
        wiring = self.wiring(call.model, call.batches)
        seen: set[str] = set()

        def recorder(group: Group) -> Handle:
            def note(activity: Tensor) -> None:
                seen.add(group.name)
                self.record(group, activity)

            return watch(call.inner, group, note)

        with isolated(call.inner), torch.no_grad(), Observation(recorder(group) for group in wiring):
            for batch in call.batches:
                run(call.inner, batch)
        blind = [group.name for group in wiring if group.name not in seen]
        if blind:
            raise WiringError(f"the activity of {blind[0]!r} was not seen on the given batches: it is not measured")


def check_finite(parameters: Mapping[str, Tensor]) -> None:
    """Raise if a weight holds NaN or Inf."""
    for name, parameter in parameters.items():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"{name!r} holds NaN or Inf; nothing was changed")


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
        optimizer: Any,
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
            {**self.wiring.refused, **self.skipped},
            optimizer=self._reset(optimizer, places, second_moment),
            gradients_cleared=self._clear(places),
            notes=tuple(dict.fromkeys(notes)),
        )

    def index(self, group: Group) -> Tensor:
        """The neurons to replace, on the device of their weights."""
        return self.neurons[group.name].to(group.makers[0].weight.device)

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
                weight = places.setdefault(self._clean(f"{maker.name}.weight"), _Places(maker.weight))
                weight.rows, weight.row_dim = index, maker.out_axis
                if maker.bias is not None:
                    places[self._clean(f"{maker.name}.bias")] = _Places(maker.bias, index)
            for name, norm in group.norms:
                for part in ("weight", "bias"):
                    tensor = getattr(norm, part, None)
                    if isinstance(tensor, Parameter):
                        places[self._clean(f"{name}.{part}")] = _Places(tensor, index)
            for consumer in group.consumers:
                layer = consumer.layer
                weight = places.setdefault(self._clean(f"{layer.name}.weight"), _Places(layer.weight))
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
        ]
        return made + read
