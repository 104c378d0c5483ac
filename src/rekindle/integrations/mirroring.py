"""EMA and target networks beside a model that is changed by a method.

Entries that the method changed are copied; all others keep the mirror's own average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.initial import tensors_of
from rekindle.projection.transaction import snapshot
from rekindle.sharding.team import distributed, local, settle

Mirror = nn.Module | Callable[[], nn.Module | None]


class Mirrors:
    """Modules that must follow a model, or functions that return them (None: not there yet).

    >>> model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> mirrors = Mirrors([average])
    >>> follow = mirrors.before(model)
    >>> _ = nn.init.zeros_(model.weight)
    >>> follow()
    >>> average.weight.abs().sum().item(), torch.equal(average.bias, model.bias)
    (0.0, False)
    """

    def __init__(self, mirrors: Mirror | Sequence[Mirror]) -> None:
        given = [mirrors] if isinstance(mirrors, nn.Module) or callable(mirrors) else list(mirrors)
        for each in given:
            if not callable(each):
                raise TypeError(f"a mirror is a module, or a function that returns one; got {type(each).__name__}")
        self._given = given

    def found(self) -> tuple[nn.Module, ...]:
        """The modules that are there now."""
        made = [each if isinstance(each, nn.Module) else each() for each in self._given]
        return tuple(each for each in made if each is not None)

    def check(self, model: nn.Module, mirrors: Sequence[nn.Module] | None = None) -> bool:
        """Raise if a mirror has a tensor of the model in another shape, or none of them; whether each has all of them.

        mirrors: what `found()` gave; without it those that were given as modules, which are there from the start.
        """
        complete = True
        chosen = [each for each in self._given if isinstance(each, nn.Module)] if mirrors is None else mirrors
        if not chosen:
            return True
        team, _ = distributed(model, copies=False)
        with team.together():
            wanted = _own(model)
            for number, mirror in enumerate(chosen):
                own = _own(mirror)
                shared = [name for name in wanted if name in own]
                if not shared:
                    raise ValueError(f"mirror {number} ({type(mirror).__name__}) has none of the model's tensors")
                for name in shared:
                    if own[name].shape != wanted[name].shape:
                        raise ValueError(_unlike(number, mirror, name, own[name], wanted[name]))
                complete = complete and len(shared) == len(wanted)
        return complete

    def before(self, model: nn.Module, optimizer: Any = None) -> Callable[[], None]:
        """Check the mirrors and copy the model's present state; calling the result copies there what has changed since.

        A mirror may lack a tensor, which is an error only if just that one changes. Then the model, the mirrors and
        the optimizer are put back.
        """
        mirrors = self.found()
        if not mirrors:
            return lambda: None
        restore = None if self.check(model, mirrors) else snapshot((model, *mirrors), optimizer)
        kept = {name: tensor.clone() for name, tensor in _own(model).items()}

        @torch.no_grad()
        def follow() -> None:
            changed = {}
            for name, tensor in _own(model).items():
                if name in kept and kept[name].shape == tensor.shape:
                    where = tensor != kept[name]
                    if bool(where.any()):
                        changed[name] = where, tensor
            for number, mirror in enumerate(mirrors):
                own = _own(mirror)
                for name, (where, tensor) in changed.items():
                    if name not in own or own[name].shape != tensor.shape:
                        text = _unlike(number, mirror, name, own.get(name), tensor)
                        if restore is not None:
                            restore()
                        raise ValueError(text)
                    own[name].copy_(torch.where(where.to(own[name].device), tensor.to(own[name]), own[name]))

        return follow


def _unlike(number: int, mirror: nn.Module, name: str, found: Tensor | None, wanted: Tensor) -> str:
    has = "no such tensor" if found is None else f"one of shape {tuple(found.shape)}"
    shape = tuple(wanted.shape)
    return f"mirror {number} ({type(mirror).__name__}): the model has {name!r} of shape {shape}, the mirror {has}"


def _own(model: nn.Module) -> dict[str, Tensor]:
    """What this rank holds of each tensor: a mirror of a model in shards is cut like the model."""
    settle(model)
    return {name: local(tensor) for name, tensor in tensors_of(model).items()}
