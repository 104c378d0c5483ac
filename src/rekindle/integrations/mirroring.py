"""EMA and target networks beside a model that is changed by a method.

By default entries that the method changed are copied; all others keep the mirror's own average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from rekindle.initial import tensors_of
from rekindle.projection.snapshots import snapshot
from rekindle.sharding.team import distributed, local, settle

Mirror = nn.Module | Callable[[], nn.Module | None]
Copy = Literal["changed", "everything"]


class Mirrors:
    """Modules that must follow a model, or functions that return them (None: not there yet).

    mirrors: one, several, or a dict from a part of the model to the module that follows that part.
    copy: "changed" copies the entries that differ, "everything" the whole part.

    >>> model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> mirrors = Mirrors([average])
    >>> follow = mirrors.before(model)
    >>> _ = nn.init.zeros_(model.weight)
    >>> follow()
    1
    >>> average.weight.abs().sum().item(), torch.equal(average.bias, model.bias)
    (0.0, False)
    """

    def __init__(self, mirrors: Mirror | Sequence[Mirror] | Mapping[str, Mirror], copy: Copy = "changed") -> None:
        if copy not in get_args(Copy):
            raise ValueError(f'mirrors_copy is "changed" or "everything", got {copy!r}')
        if isinstance(mirrors, nn.Module) or callable(mirrors):  # first: parameters of torchrl are a mapping too
            rows = [("", mirrors)]
        elif isinstance(mirrors, Mapping):
            rows = list(mirrors.items())
        else:
            rows = [("", mirror) for mirror in mirrors]
        for part, mirror in rows:
            if not callable(mirror) or not isinstance(part, str):
                raise TypeError(f"a mirror is a module, or a function that returns one; got {type(mirror).__name__}")
        self._rows, self._copy = rows, copy

    def __bool__(self) -> bool:
        return bool(self._rows)

    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that are there now."""
        return tuple(mirror for _, _, mirror in self._present())

    def check(self, model: nn.Module) -> bool:
        """Raise if a mirror does not fit the part that it follows; whether each has all of its tensors."""
        for part, _ in self._rows:
            _part(model, part)
        present = self._present()
        if not present:
            return True
        complete = True
        team, _ = distributed(model, copies=False)
        with team.together():
            for label, part, mirror in present:
                wanted, own = _own(_part(model, part)), _own(mirror)
                shared = [name for name in wanted if name in own]
                if not shared:
                    raise ValueError(f"{label} ({type(mirror).__name__}) has none of the model's tensors")
                for name in shared:
                    if own[name].shape != wanted[name].shape:
                        raise ValueError(_unlike(label, mirror, name, own[name], wanted[name]))
                complete = complete and len(shared) == len(wanted)
        return complete

    def before(self, model: nn.Module, optimizer: object = None) -> Callable[..., int]:
        """Check the mirrors and copy the model's present state; calling the result lets them follow what has changed.

        It returns how many followed. Called with True, mirrors are moved by what the model was moved by, which keeps
        the distance of an average. A mirror may lack a tensor, which is an error only if just that one changes. Then
        the model, the mirrors and the optimizer are put back.
        """
        present = self._present()
        if not present:
            return lambda moved=False: 0
        restore = None if self.check(model) else snapshot((model, *self.modules()), optimizer)
        kept = [{name: tensor.clone() for name, tensor in _own(_part(model, part)).items()} for _, part, _ in present]

        @torch.no_grad()
        def follow(moved: bool = False) -> int:
            count = 0
            for (label, part, mirror), before in zip(present, kept, strict=True):
                changed = _changed(_own(_part(model, part)), before)
                own = _own(mirror)
                for name, (_, tensor) in changed.items():
                    if name not in own or own[name].shape != tensor.shape:
                        text = _unlike(label, mirror, name, own.get(name), tensor)
                        if restore is not None:
                            restore()
                        raise ValueError(text)
                count += bool(changed)
                for name, (where, tensor) in changed.items():
                    if moved and tensor.is_floating_point():
                        own[name].add_((tensor - before[name]).to(own[name]))
                    else:
                        own[name].copy_(torch.where(where.to(own[name].device), tensor.to(own[name]), own[name]))
                if changed and self._copy == "everything" and not moved:
                    for name, tensor in _own(_part(model, part)).items():
                        if name in own:
                            own[name].copy_(tensor)
            return count

        return follow

    def _present(self) -> list[tuple[str, str, nn.Module]]:
        rows = []
        for number, (part, mirror) in enumerate(self._rows):
            module = mirror if isinstance(mirror, nn.Module) else mirror()
            if module is not None:
                rows.append((f"mirror {part!r}" if part else f"mirror {number}", part, module))
        return rows


def _part(model: nn.Module, part: str) -> nn.Module:
    try:
        return model.get_submodule(part)
    except AttributeError as error:
        names = ", ".join(name for name, _ in model.named_children())
        raise ValueError(f"mirrors: the model has no part {part!r}; it has {names}") from error


def _changed(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Where each tensor differs, and its value now."""
    changed = {}
    for name, tensor in now.items():
        if name in before and before[name].shape == tensor.shape:
            where = tensor != before[name]
            if bool(where.any()):
                changed[name] = where, tensor
    return changed


def _unlike(label: str, mirror: nn.Module, name: str, own: Tensor | None, wanted: Tensor) -> str:
    has = "no such tensor" if own is None else f"one of shape {tuple(own.shape)}"
    shape = tuple(wanted.shape)
    return f"{label} ({type(mirror).__name__}): the model has {name!r} of shape {shape}, the mirror {has}"


def _own(model: nn.Module) -> dict[str, Tensor]:
    """What this rank holds of each tensor: a mirror of a model in shards is cut like the model."""
    settle(model)
    return {name: local(tensor) for name, tensor in tensors_of(model).items()}
