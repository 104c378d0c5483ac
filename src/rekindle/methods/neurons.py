"""Remedies that watch hidden neurons while a model trains, and replace single ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn

from rekindle.blocks.names import unwrapped
from rekindle.isolation import call as run
from rekindle.isolation import isolated
from rekindle.methods.caching import PerModel
from rekindle.methods.call import Call
from rekindle.methods.remedy import Observation, Remedy
from rekindle.methods.replacement import Replacement
from rekindle.optimizers import StateReset
from rekindle.projection.method import Batch, Loss
from rekindle.projection.receipt import Receipt
from rekindle.recording.first_pass import FirstPass
from rekindle.recording.graph import Graph
from rekindle.recording.wiring import Group, Wiring, WiringError, watch, wire

Handle = torch.utils.hooks.RemovableHandle
_NO_ROWS = StateReset("rows")


class NeuronOptions(TypedDict, total=False):
    """What every neuron remedy takes, see `NeuronRemedy`."""

    targets: str | Sequence[str]
    consumers: Mapping[str, str | Sequence[str]] | None
    second_moment: Literal["mean", "zero"]
    fresh: Callable[[], nn.Module] | None
    seed: int


@dataclass
class Judgment:
    """Which neurons are to be replaced, by layer, and the notes for the receipt."""

    neurons: Mapping[str, Tensor]
    means: Mapping[str, Tensor] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


class NeuronRemedy(Remedy):
    """A remedy that judges and replaces single hidden neurons; subclasses implement `record` and `judge`.

    `targets` are globs of layer names ("auto": every layer whose neurons' consumers are known). `consumers` is the
    map for models that cannot be recorded (`rekindle.recording.wiring.wire`). Layers that cannot be wired are in the
    receipt with the reason; a model without any is refused. `second_moment` is what Adam's second moment becomes in the
    replaced rows and columns: its step count is one number per parameter, so single rows cannot be fully reset, and
    with a zero second moment their next step would be 3 to 6.5 times too large. `fresh` is a factory of a new model,
    from which incoming weights are taken where the model initializes itself in its `__init__`: else they are drawn by
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
        self._kept: dict[str, Any] | None = None  # the wiring, as a checkpoint has it
        self._loaded: dict[str, Any] | None = None  # that of an earlier run, for the first model that is asked about

    def apply(self, call: Call) -> Receipt:
        """Judge by the batches of the call or by what `observe` saw, and replace."""
        wiring = self.wiring(call.model, call.batches)
        self.measure(call)
        judged = self.judge(call, wiring)
        if not any(map(len, judged.neurons.values())):
            self.replaced(judged.neurons)
            skipped = {**wiring.refused, **judged.skipped} if judged.skipped else wiring.refused
            return Receipt(self.name, (), skipped, optimizer=_NO_ROWS, notes=tuple(judged.notes))
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

    def judge(self, call: Call, wiring: Wiring) -> Judgment:
        """Which neurons are replaced; the same on every replica of the model."""
        raise NotImplementedError

    def replaced(self, neurons: Mapping[str, Tensor]) -> None:
        """Start anew with what was gathered about these neurons."""

    def forget(self, layers: Collection[str] | None = None) -> None:
        """Drop what was gathered, of these layers or of all."""

    def state_dict(self) -> dict[str, Any]:
        """As for every remedy, with the wiring: a run that goes on may act before its first pass."""
        return {**super().state_dict(), "wiring": self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict()` was taken."""
        self._loaded = self._kept = state["wiring"]
        super().load_state_dict({key: value for key, value in state.items() if key != "wiring"})

    def wiring(self, model: nn.Module, batches: Iterable[Batch] | None = None, graphs: Sequence[Graph] = ()) -> Wiring:
        """The model's wiring, narrowed to the targets; recorded once per model, and again when parts were replaced.

        What was gathered about a layer whose weight was replaced is dropped then.
        """
        inner = unwrapped(model)
        if not graphs and (same := self._wirings.current(inner)) is not None:
            return same[0]
        old: list[tuple[Wiring, dict[str, weakref.ref[Tensor]]]] = []

        def find() -> tuple[Wiring, dict[str, weakref.ref[Tensor]]]:
            self.refuse(model)
            state = None if graphs or batches is not None else old[0][0].state() if old else self._loaded
            found = None if state is None else Wiring.of_state(state, inner)
            if found is None:
                found = wire(inner, batches, consumers=self._consumers, graphs=graphs)
                if self.targets != "auto":
                    globs = [self.targets] if isinstance(self.targets, str) else list(self.targets)
                    found = found.only(lambda name: any(fnmatchcase(name, glob) for glob in globs))
                    if not found.groups:
                        raise WiringError(f"targets={globs} match no layer whose consumers are known\n{found}")
            found = _without_frozen(found)
            self._loaded, self._kept = None, found.state()
            return found, {maker.name: weakref.ref(maker.weight) for group in found for maker in group.makers}

        if graphs:
            self._wirings.clear()
        wiring, owners = self._wirings.get(inner, find, old.append)
        if old:
            self.forget(
                [name for name, owner in old[0][1].items() if name not in owners or owners[name]() is not owner()]
            )
        return wiring

    def observe(self, model: nn.Module, batches: Iterable[Batch] | None = None) -> Observation:
        """Gather statistics at every forward pass in training mode until the result is removed.

        Who consumes the neurons is seen on the first of the `batches`; without any, at the first of these passes.
        """
        if batches is not None or self._consumers is not None or unwrapped(model) in self._wirings:
            return Observation(self.watchers(model, self.wiring(model, batches)))
        self.refuse(model)
        watching: list[Handle] = []

        def recorded(graph: Graph) -> None:
            try:
                wiring = self.wiring(model, graphs=[graph])
            except WiringError:
                if graph.calls[0].module is unwrapped(model):
                    raise
                return  # of an agent's networks, another one may have hidden neurons
            for handle in watching:
                handle.remove()
            watching[:] = self.watchers(model, wiring)
            observation.hold(watching)

        observation = Observation([FirstPass(unwrapped(model), recorded, called=model)])
        return observation

    def watchers(self, model: nn.Module, wiring: Wiring) -> Iterator[Handle]:
        """The hooks that gather statistics of these neurons."""
        inner = unwrapped(model)
        for group in wiring:

            def training(activity: Tensor, group: Group = group) -> None:
                if inner.training and torch.is_grad_enabled():
                    self.watch(group, activity)

            yield watch(inner, group, training)

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
        return not all(layer.weight.requires_grad for layer in group.layers)

    kept = tuple(group for group in wiring if not frozen(group))
    if not kept:
        raise WiringError("every layer whose consumers are known is frozen, or feeds a frozen one")
    out = {m.name: "it is frozen, or feeds a frozen layer" for g in wiring if frozen(g) for m in g.makers}
    return Wiring(kept, {**wiring.refused, **out}, wiring.how)
