"""What every remedy has: the call itself, what it needs of a trainer, its own generator, and a state.

A remedy implements `apply(call)`, which changes the model and returns a Receipt; settings, time and memory are filled
in here. The class attributes say what a trainer must do for it, so that no trainer needs to know any remedy by name:

- `moment`: "event" (at a task's start, on a trigger), "step" (after every optimizer step), "backward" (between
  backward and optimizer step) or "loss" (not called, but its `loss_term(model)` is added to the training loss);
- `batches`: "none", "any" (a few batches to look at) or "all" (all examples at hand in one batch);
- `watches`: it must see every training step inside `with method.observe(model):`;
- `period`: every how many steps an "event" comes, where its paper says so;
- `remember(model)`, where it exists, is called while the model is new.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from rekindle import initial
from rekindle.engine.devices import full_precision
from rekindle.isolation import check_batches, undone
from rekindle.methods.caching import PerModel
from rekindle.methods.call import Call
from rekindle.projection.method import Batch, Loss
from rekindle.projection.receipt import Meter, Receipt
from rekindle.projection.snapshots import snapshot
from rekindle.projection.transaction import Transaction
from rekindle.recording.first_batch import knowing
from rekindle.sharding.team import Needs, refuse_hidden, refuse_shards, settle

Moment = Literal["event", "step", "backward", "loss"]
Batches = Literal["none", "any", "all"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


def moments(method: object) -> dict[Moment, Any]:
    """What of a method acts at each moment: all of it at one for most, several parts for a `Compose` of several kinds.

    A method of another class may state its only moment; without one it acts at events.

    >>> from rekindle.methods import FIRE, Compose, WeightClip
    >>> list(moments(Compose([FIRE(), WeightClip()])))
    ['event', 'step']
    """
    if not isinstance(method, Remedy):
        return {getattr(method, "moment", "event"): method}
    return {moment: part for moment in MOMENTS if (part := method.at(moment)) is not None}


class Remedy:
    """A method as docs/methods.md means it; subclasses implement `apply`.

    >>> class Halve(Remedy):
    ...     name = "halve"
    ...     def apply(self, call):
    ...         with torch.no_grad():
    ...             for parameter in call.inner.parameters():
    ...                 parameter.mul_(0.5)
    ...         return Receipt(self.name)
    >>> Halve()(nn.Linear(1, 1)).seconds > 0
    True
    """

    name: ClassVar[str] = "remedy"
    moment: Moment = "event"
    batches: Batches = "none"
    watches: bool = False
    period: int | None = None
    sharded: ClassVar[bool] = False  # whether it works on DTensor parameters
    atomic: ClassVar[bool] = False  # whether a failed call is taken back, because half of it means nothing

    def __init__(self, *, seed: int = 0) -> None:
        self._own = torch.Generator().manual_seed(seed)
        self._admitted: PerModel[None] = PerModel()

    def __call__(
        self,
        model: nn.Module,
        optimizer: object = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Change `model` in place and report what was done.

        generator: where random numbers come from; without one, the method's own, which is part of its state.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"the order is (model, optimizer), got {type(model).__name__} as the model")
        if batches is not None and not isinstance(batches, list):
            check_batches(batches)
        meter = Meter(memory=self.moment == "event")
        self.admit(model)
        call = Call(model, optimizer, batches, loss, self._own, generator)
        with self.transaction(call), knowing(call.model, batches, loss), full_precision():
            done = self.apply(call)
            if not done.settings and (done.records or self.moment == "event"):
                object.__setattr__(done, "settings", self.settings())
            return meter.stop(done)

    def transaction(self, call: Call) -> AbstractContextManager[object]:
        """What wraps a call: an error or Ctrl-C inside leaves a true receipt or everything as it was."""
        restore = snapshot([call.model], call.optimizer, self) if self.atomic else None
        return Transaction(self.name, [call.model], call.optimizer, restore=restore)

    def admit(self, model: nn.Module) -> None:
        """Refuse a model that this method cannot change; looked at once, and again when a part was replaced.

        A method of every step that keeps something else about each model does it there: one look less per step.
        """
        if not self.sharded:
            self._admitted.get(model, lambda: self.refuse(model))

    def refuse(self, model: nn.Module) -> None:
        """Raise for a model that this method cannot change."""
        refuse_hidden(model, f"{type(self).__name__}(...)(model.module, optimizer)")
        settle(model)
        refuse_shards(model, type(self).__name__, self.needs)

    @property
    def needs(self) -> Needs:
        """What it needs of a model besides its whole parameters."""
        if self.watches or self.moment == "backward":
            return "steps"
        return "parameters" if self.batches == "none" else "batches"

    def apply(self, call: Call) -> Receipt:
        """Change the model of the call; everything that can be checked is checked before the first write."""
        raise NotImplementedError

    def check(self, call: Call) -> None:
        """Raise what cannot work whatever values the weights have. Trainers ask when training starts."""

    def at(self, moment: Moment) -> Remedy | None:
        """What a trainer has to apply at this moment, None if nothing.

        >>> Remedy().at("event"), Remedy().at("step")
        (Remedy(), None)
        """
        return self if moment == self.moment else None

    def settings(self) -> dict[str, Any]:
        """The plain values that the method was made with."""
        plain = (bool, int, float, str, type(None))
        own = {k: v for k, v in vars(self).items() if not k.startswith("_") and k != "moment"}
        return {k: v for k, v in own.items() if isinstance(v, plain)}

    def state_dict(self) -> dict[str, Any]:
        """What a later continuation needs: the generator's state and whatever was gathered."""
        return {"generator": self._own.get_state(), **self.gathered()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict()` was taken."""
        self._own.set_state(state["generator"])
        self.restore({key: value for key, value in state.items() if key != "generator"})

    def gathered(self) -> dict[str, Any]:
        """Statistics and stored tensors; none for most methods."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `gathered()` gave."""

    def resume(self, model: nn.Module) -> None:
        """After `load_state_dict`: write what the state holds and a trainer's checkpoint may not; most have nothing."""

    def __repr__(self) -> str:
        """As one would write it: without the options that have their default.

        >>> from rekindle.methods import FullReset
        >>> FullReset("he")
        FullReset(start='he')
        """
        makers = [vars(kind)["__init__"] for kind in reversed(type(self).__mro__) if "__init__" in vars(kind)]
        usual = {name: one.default for made in makers for name, one in inspect.signature(made).parameters.items()}
        given = {name: value for name, value in self.settings().items() if usual.get(name, usual) != value}
        inside = ", ".join(f"{name}={value!r}" for name, value in given.items() if name != "recalibrate" or value)
        return f"{type(self).__name__}({inside})"


class FromStart(Remedy):
    """A remedy that goes towards a start of the model: a stored one, or a fresh draw by the model's own scheme.

    The stored start is `initial` (from `rekindle.initial.snapshot`), or what `remember(model)` saw.
    """

    def __init__(
        self,
        *,
        initial: Mapping[str, Tensor] | None = None,
        fresh: Callable[[], nn.Module] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(seed=seed)
        self._initial = dict(initial) if initial is not None else None
        self._fresh = fresh

    def remember(self, model: nn.Module) -> None:
        """Store the model's present parameters and buffers as its start."""
        refuse_shards(model, type(self).__name__, call="method.remember(model)")
        self._initial = initial.snapshot(model)

    def stored(self, model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
        """The stored start of these tensors, checked against the model."""
        if self._initial is None:
            raise initial.UnknownStart(
                f"{type(self).__name__} goes to the stored start, but none is stored: call remember(model) while "
                "the model is new, or give initial=rekindle.initial.snapshot(model)"
            )
        initial.check_start(model, self._initial, names)
        own = initial.tensors_of(model)
        return {name: self._initial[name].to(own[name].device, own[name].dtype) for name in names}

    def drawn(self, call: Call, names: Collection[str]) -> dict[str, Tensor]:
        """A fresh draw of these tensors; a model may have a factory of its own (`fresh`), as an agent's networks do."""
        fresh = self._fresh if self._fresh is not None else vars(call.inner).get("fresh")
        return initial.draw(call.model, generator=call.generator, fresh=fresh, names=names)

    def gathered(self) -> dict[str, Any]:
        """The stored start."""
        return {"initial": None if self._initial is None else dict(self._initial)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back the stored start."""
        self._initial = None if state["initial"] is None else dict(state["initial"])


@contextmanager
def taken_off(hooks: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """An error inside takes these hooks off, so that a call that failed does not act at the optimizer's next step.

    >>> layer, handles = nn.Linear(1, 1), []
    >>> try:
    ...     with taken_off(lambda: handles):
    ...         handles.append(layer.register_forward_hook(print))
    ...         raise OSError
    ... except OSError:
    ...     len(layer._forward_hooks)
    0
    """
    try:
        yield
    except BaseException:
        for hook in hooks():
            hook.remove()
        raise


class Observation:
    """Hooks that gather statistics; `remove()` them, or use it in a `with` statement."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self._handles: list[Any] = []
        try:
            self._handles.extend(handles)
        except BaseException:  # the second hook could not be made: the first must not stay
            self.remove()
            raise

    def hold(self, handles: Iterable[Any]) -> None:
        """Take off these too, in the end."""
        self._handles.extend(handles)

    def remove(self) -> None:
        """Take all hooks off."""
        with undone() as stack:
            for handle in self._handles:
                stack.callback(handle.remove)
        self._handles.clear()

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.remove()
        finally:
            self.remove()  # what an interrupt has left over
