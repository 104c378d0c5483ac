"""What every remedy has: a name, a moment at which it belongs, random numbers of its own, and a state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from rekindle import initial
from rekindle.projection.receipt import Batch, Loss, Receipt

Moment = Literal["event", "step", "backward", "loss"]


Value = TypeVar("Value")


class PerModel(weakref.WeakKeyDictionary[nn.Module, Value], Generic[Value]):
    """What a method has worked out about each model, forgotten with the model; a pickled one is empty.

    >>> import pickle
    >>> cache = PerModel()
    >>> cache[nn.Linear(1, 1)] = 1
    >>> len(pickle.loads(pickle.dumps(cache)))
    0
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return (PerModel, ())


class Remedy:
    """A method as DESIGN.md means it; subclasses say what `__call__` does.

    `moment` says when a trainer should call it: "event" (at a task's start, on a trigger), "step" (after every
    optimizer step), "backward" (between backward and optimizer step) or "loss" (not called, but its `loss_term(model)`
    is added to the training loss).
    """

    name: ClassVar[str] = "remedy"
    moment: Moment = "event"

    def __init__(self, *, seed: int = 0) -> None:
        self._own = torch.Generator().manual_seed(seed)

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Change `model` in place and say what was done."""
        raise NotImplementedError

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

    def draws(self, generator: torch.Generator | None) -> torch.Generator:
        """The given generator, or the method's own: never the global one."""
        return self._own if generator is None else generator

    def __repr__(self) -> str:
        inside = ", ".join(f"{key}={value!r}" for key, value in self.settings().items())
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

    def drawn(self, model: nn.Module, names: Collection[str], generator: torch.Generator) -> dict[str, Tensor]:
        """A fresh draw of these tensors."""
        return initial.draw(model, generator=generator, fresh=self._fresh, names=names)

    def gathered(self) -> dict[str, Any]:
        """The stored start."""
        return {"initial": None if self._initial is None else dict(self._initial)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back the stored start."""
        self._initial = None if state["initial"] is None else dict(state["initial"])
