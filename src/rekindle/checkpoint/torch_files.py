"""torch.save files (.pt, .pth, .bin) and Lightning checkpoints (.ckpt), never unpickled beyond plain values.

A staged copy is changed in place: the pickle inside, ties, strides and everything that is not a weight stay as they
were. Only a change of structure (another dtype, an integer step count) makes it necessary to save the tree again.
`trees` knows where the numbers of a tensor are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import skip_data

from rekindle.checkpoint.archives import refresh_checksums
from rekindle.checkpoint.byte_files import ByteFile, copy_file, copy_range
from rekindle.checkpoint.byte_map import overlapping
from rekindle.checkpoint.parts import LONGEST_NAME, CheckpointError, TensorMeta, stored_as
from rekindle.checkpoint.trees import ByteRange, TorchTree, tensors_in
from rekindle.files import create_like

_WEIGHTS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")


class TorchPart:
    """One torch file. With `weights=False` it is an optimizer's file, whose tensors are not weights.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "run.ckpt")
    ...     torch.save({"state_dict": {"a.weight": torch.ones(2, 3)}, "epoch": 3}, path)
    ...     part = TorchPart(path)
    ...     part.names, part.meta("a.weight").shape
    (('a.weight',), (2, 3))
    """

    def __init__(self, path: Path, *, writable: bool = False, weights: bool = True) -> None:
        self.path, self.restructured, self._holds_weights = path, False, weights
        self.file = ByteFile(path, writable=writable)
        with self.file.opened() as file:
            self.tree = TorchTree(path, file)
        value = self.tree.value
        lightning = isinstance(value, Mapping) and "pytorch-lightning_version" in value
        self.kind = "lightning" if lightning else "torch"
        self._weights = _find_weights(path, value) if weights else {}
        usable = {name: value for name, value in self._weights.items() if self._usable(value)}
        self._tensors: dict[str, Tensor] = {str(name): value.detach() for name, value in usable.items()}
        if weights and not self._tensors:
            raise CheckpointError(f"{path}: holds no tensors that are weights")
        if len(self._tensors) < len(usable) or any(len(name) > LONGEST_NAME for name in self._tensors):
            raise CheckpointError(f"{path}: two tensors have the same name as a text, or one is endless")
        self.names = tuple(self._tensors)
        self.metadata: Mapping[str, str] = {}
        self.tied: Mapping[str, str] = self._same_views()
        self.shared: Mapping[str, str] = overlapping(self.tree, self._tensors, self.tied)

    def meta(self, name: str) -> TensorMeta:
        """Shape, dtype, bytes and file."""
        tensor = self._tensors[name]
        return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.numel() * tensor.element_size(), self.path.name)

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self.tree.read(self.file, self._tensors[name])

    def write(self, name: str, value: Tensor) -> None:
        """Put a tensor into its place."""
        self.tree.write(self.file, self._tensors[name], value)

    def reopened(self, path: Path) -> TorchPart:
        """A staged copy, to be written."""
        return TorchPart(path, writable=True, weights=self._holds_weights)

    def files(self) -> tuple[Path, ...]:
        """The file itself."""
        return (self.path,)

    def optimizers(self) -> list[Any]:
        """Every optimizer state dict in the tree, with where it was found."""
        found = _optimizers(self.tree.value)
        return [TreeStates(self, f"{self.path.name}{place}", table) for place, table in found]

    def others(self) -> list[str]:
        """Where else numbers are: a second network, an average of the weights, the state of an unknown optimizer."""
        tree, weights = self.tree, {self.tree.view(tensor) for tensor in self._tensors.values()}
        states = {id(tensor) for _, table in _optimizers(tree.value) for _, tensor in tensors_in(table)}
        floating = ((place, t) for place, t in tensors_in(tree.value) if t.is_floating_point() and id(t) not in states)
        places = [place for place, t in floating if tree.storage(t) is None or tree.view(t) not in weights]
        return list(dict.fromkeys(place.partition("][")[0].removesuffix("]") + "]" for place in places))

    def staged_size(self, dtype: torch.dtype | None) -> int:
        """Bytes that `stage` will write."""
        more = sum(t.numel() * (stored_as(t.dtype, dtype).itemsize - t.itemsize) for t in self._tensors.values())
        return self.path.stat().st_size + max(0, more)

    def stage(self, target: Path, changed: frozenset[str], dtype: torch.dtype | None) -> None:
        """Copy the file, or save its tree anew where its structure changes."""
        if self.restructured or dtype is not None:
            self._save_again(target, dtype)
        else:
            copy_file(self.path, target)

    def finish(self, provenance: Mapping[str, Any], metadata: Mapping[str, str], changed: Collection[str]) -> None:
        """Checksums of the records that changed. A pickle has no place for provenance that loaders would not see."""
        if self.tree.zipped:
            with self.file.opened() as file:
                refresh_checksums(file)

    def sync(self) -> None:
        """Flush everything to the disk."""
        self.file.sync()

    def _usable(self, value: Any) -> bool:
        plain = isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter) and not value.is_quantized
        return plain and self.tree.place(value) is not None

    def _same_views(self) -> dict[str, str]:
        """Names of the same memory, each with the first of them."""
        first: dict[tuple[Any, ...], str] = {}
        tied = {}
        for name, tensor in self._tensors.items():
            if tensor.numel():
                owner = first.setdefault(self.tree.view(tensor), name)
                if owner != name:
                    tied[name] = owner
        return tied

    def _save_again(self, target: Path, dtype: torch.dtype | None) -> None:
        """Let torch write the tree with room for the numbers, and copy or cast them into it one by one."""
        cast = {id(v) for v in self._weights.values() if self._usable(v) and stored_as(v.dtype, dtype) != v.dtype}
        renewal = _Renewal(self.tree, cast, dtype)
        with create_like(target, self.path) as file, skip_data():
            torch.save(renewal.renewed(self.tree.value), file)
        output = TorchPart(target, writable=True, weights=self._holds_weights)
        copied: dict[ByteRange, ByteRange] = {}
        for (where, old), (_, new) in zip(tensors_in(self.tree.value), tensors_in(output.tree.value), strict=True):
            place, room = self.tree.storage(old), output.tree.storage(new)
            if place is None and room is None and old.device == new.device and old.layout == new.layout:
                continue
            if place is None or room is None or old.shape != new.shape:
                raise CheckpointError(f"{self.path}: {where} is a special tensor that cannot be saved anew")
            if old.dtype == new.dtype:
                copied[room] = place
            else:
                self._cast(old, output, new)
        with self.file.opened() as source, output.file.opened() as file:
            for room, place in copied.items():
                copy_range(source.fileno(), file.fileno(), place.start, place.size, room.start)

    def _cast(self, old: Tensor, output: TorchPart, new: Tensor) -> None:
        place, room = self.tree.place(old), output.tree.place(new)
        if old.is_contiguous() and place is not None and room is not None:
            for start, piece in self.file.pieces(place.start, old.numel(), old.dtype):
                output.file.put(room.start + start * new.itemsize, piece.to(new.dtype))
        else:
            output.tree.write(output.file, new, self.tree.read(self.file, old))


class _Renewal:
    """A tree of the same structure whose tensors have memory of their own, which nobody fills: torch reserves room."""

    def __init__(self, tree: TorchTree, cast: set[int], dtype: torch.dtype | None) -> None:
        self._tree, self._cast, self._dtype = tree, cast, dtype
        self._containers: dict[int, Any] = {}
        self._tensors: dict[Any, Tensor] = {}
        self._storages: dict[ByteRange, torch.UntypedStorage] = {}

    def renewed(self, value: Any) -> object:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) not in (dict, OrderedDict, list, tuple):
            return value
        if id(value) not in self._containers:
            kind: Any = type(value)
            if isinstance(value, Mapping):
                made: Any = kind((key, self.renewed(inner)) for key, inner in value.items())
                if hasattr(value, "_metadata"):
                    made._metadata = value._metadata
            else:
                made = kind(map(self.renewed, value))
            self._containers[id(value)] = made
        return self._containers[id(value)]

    def _tensor(self, old: Tensor) -> Tensor:
        place = self._tree.storage(old)
        if place is None or old.is_quantized or old.is_conj() or old.is_neg():
            return old
        view = self._tree.view(old)
        if id(old) in self._cast:
            made = self._tensors.setdefault(view, torch.empty(old.shape, dtype=self._dtype))
        else:
            storage = self._storages.setdefault(place, torch.empty(place.size, dtype=torch.uint8).untyped_storage())
            offset, shape, stride = old.storage_offset(), old.shape, old.stride()
            made = torch.empty(0, dtype=old.dtype).set_(storage, offset, shape, stride)
        return nn.Parameter(made, old.requires_grad) if isinstance(old, nn.Parameter) else made


class TreeStates:
    """The states of a torch.optim state dict in a file."""

    def __init__(self, part: TorchPart, label: str, table: Mapping[str, Any]) -> None:
        self._part, self.label, self._state = part, label, table["state"]
        groups = table["param_groups"]
        valid = isinstance(groups, list) and all(isinstance(g, Mapping) for g in groups)
        if not valid or not all(isinstance(group.get("params"), list) for group in groups):
            raise CheckpointError(f"{label}: param_groups is not what torch.optim writes")
        if not all(isinstance(slots, Mapping) for slots in self._state.values()):
            raise CheckpointError(f"{label}: state is not what torch.optim writes")
        self.groups: Sequence[Mapping[str, Any]] = [self._numbers(group) for group in groups]
        self.keys = tuple(key for group in groups for key in group["params"])

    def slots(self, key: object) -> Mapping[str, Any]:
        """The slots of one parameter, tensors without their numbers."""
        found: Mapping[str, Any] = self._state.get(key, {})
        return found

    def read(self, key: object) -> dict[str, Any]:
        """The slots of one parameter."""
        found: dict[str, Any] = self._numbers(self.slots(key))
        return found

    def write(self, key: object, slots: Mapping[str, Any]) -> None:
        """Put the tensors back."""
        old = dict(tensors_in({slot: value for slot, value in self.slots(key).items() if slot in slots}))
        for place, value in tensors_in({slot: value for slot, value in slots.items() if slot in self.slots(key)}):
            if place in old:
                self._part.tree.write(self._part.file, old[place], value)

    def restructure(self, key: object, slots: Mapping[str, Any]) -> None:
        """Give a parameter these slots; the file will be saved anew."""
        self._state[key] = dict(slots)
        self._part.restructured = True

    def _numbers(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._part.tree.read(self._part.file, value)
        if isinstance(value, Mapping):
            return {key: self._numbers(inner) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self._numbers, value))
        return value


def _find_weights(path: Path, tree: object) -> Mapping[Any, Any]:
    """The state dict in a tree: the tree itself, or the one under a name that trainers use."""
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{path}: holds {type(tree).__name__}, not a state dict")
    if any(isinstance(value, Tensor) for value in tree.values()):
        return tree
    named = _named_weights(tree)
    if named is not None:
        return named
    candidates = {
        name: value
        for name, value in tree.items()
        if isinstance(value, Mapping) and value and all(isinstance(inner, Tensor) for inner in value.values())
    }
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    if candidates:
        names = ", ".join(map(repr, candidates))
        raise CheckpointError(f"{path}: which state dict is the model, {names}? Save that one alone")
    raise CheckpointError(f"{path}: holds no state dict (its keys: {', '.join(map(str, list(tree)[:8]))})")


def _named_weights(tree: Mapping[Any, Any], depth: int = 3) -> Mapping[Any, Any] | None:
    """The first state dict under names that trainers use, also one inside another (`model` → `state_dict`)."""
    for name in _WEIGHTS:
        inner = tree.get(name)
        if not isinstance(inner, Mapping) or _is_optimizer(inner):
            continue
        if any(isinstance(value, Tensor) for value in inner.values()):
            return inner
        found = _named_weights(inner, depth - 1) if depth else None
        if found is not None:
            return found
    return None


def _optimizers(tree: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if _is_optimizer(tree):
        yield "", tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            if _is_optimizer(value):
                yield f"[{name!r}]", value
            elif isinstance(value, list | tuple):
                yield from ((f"[{name!r}][{i}]", inner) for i, inner in enumerate(value) if _is_optimizer(inner))


def _is_optimizer(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("state"), Mapping) and "param_groups" in value
