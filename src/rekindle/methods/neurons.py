"""Remedies that watch hidden neurons while a model trains, and replace single ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn

from rekindle.blocks.names import unwrapped
from rekindle.consumers.wiring import Group, Wiring, WiringError, watch, wire
from rekindle.isolation import call as run
from rekindle.isolation import isolated
from rekindle.methods.caching import PerModel
from rekindle.methods.call import Call
from rekindle.methods.remedy import Observation, Remedy
from rekindle.methods.replacement import Replacement
from rekindle.optimizers import StateReset
from rekindle.projection.method import Batch, Loss
from rekindle.projection.receipt import Receipt

Handle = torch.utils.hooks.RemovableHandle


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
        if not any(map(len, judged.neurons.values())):
            self.replaced(judged.neurons)
            skipped = {**wiring.refused, **judged.skipped}
            return Receipt(self.name, (), skipped, optimizer=StateReset("rows"), notes=tuple(judged.notes))
        with nullcontext() if call.batches is not None else super().transaction(call):
            receipt = Replacement(call.model, wiring, judged.neurons, judged.means, self._fresh, judged.skipped).apply(
                self.name,
                call.optimizer,
                lambda: call.generator,
                second_moment=self.second_moment,
                notes=judged.notes,
            )
            self.replaced(judged.neurons)
        return receipt

    def admit(self, model: nn.Module) -> None:
        """Done where the wiring is found."""

    def transaction(self, call: Call) -> AbstractContextManager[object]:
        """Around the writing alone where no batches are run: most steps replace no neuron."""
        return nullcontext() if call.batches is None else super().transaction(call)

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
            self.refuse(model)
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
                    self.watch(group, activity)

            return watch(inner, group, training)

        return Observation(recorder(group) for group in self.wiring(model, batches))

    def watch(self, group: Group, activity: Tensor) -> None:
        """What `observe` does with the activity of a training pass: record it, or a sample of them."""
        self.record(group, activity)

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


def _without_frozen(wiring: Wiring) -> Wiring:
    def frozen(group: Group) -> bool:
        layers = [*group.makers, *(consumer.layer for consumer in group.consumers)]
        return not all(layer.weight.requires_grad for layer in layers)

    kept = tuple(group for group in wiring if not frozen(group))
    if not kept:
        raise WiringError("every layer whose consumers are known is frozen, or feeds a frozen one")
    out = {m.name: "it is frozen, or feeds a frozen layer" for g in wiring if frozen(g) for m in g.makers}
    return Wiring(kept, {**wiring.refused, **out}, wiring.how)
