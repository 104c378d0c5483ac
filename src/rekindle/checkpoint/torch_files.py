"""torch.save files (.pt, .pth, .bin) and Lightning checkpoints (.ckpt), never unpickled beyond plain values.

A zip file is mapped, so its tensors are views of the file, and a staged copy is changed in place: the pickle inside,
ties, strides and everything that is not a weight stay as they were. Only a change of structure (another dtype, an
integer step count) or the format of before torch 1.6 makes it necessary to save the tree again.

`archives` knows the zip archive itself.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import set_default_mmap_options

from rekindle.checkpoint.archives import check_storages, records, refresh_checksums
from rekindle.checkpoint.byte_map import overlapping
from rekindle.checkpoint.mapping import copy_file
from rekindle.checkpoint.parts import LONGEST_NAME, CheckpointError, TensorMeta, clearly, stored_as
from rekindle.files import create_like

_WEIGHTS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")
_ZIP = b"PK\x03\x04"


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
        with path.open("rb") as file:
            self.zipped = file.read(4) == _ZIP
            if self.zipped:
                try:
                    with clearly(path, "reading the archive"):
                        found = records(file)
                except CheckpointError as error:
                    known = str(error).startswith(str(path))
                    raise CheckpointError(error if known else f"{path}: {error}") from error
                if any(record.name.endswith("constants.pkl") for record in found):
                    raise CheckpointError(f"{path}: a TorchScript program, not a checkpoint: save its state_dict()")
                with _safely(path):
                    check_storages(path, file, found)
        self.tree = _load(path, self.zipped, writable)
        self.kind = "torch"
        if isinstance(self.tree, Mapping) and "pytorch-lightning_version" in self.tree:
            self.kind = "lightning"
        self._weights = _find_weights(path, self.tree) if weights else {}
        usable = {name: value for name, value in self._weights.items() if _usable(value)}
        self._tensors: dict[str, Tensor] = {str(name): value.detach() for name, value in usable.items()}
        if weights and not self._tensors:
            raise CheckpointError(f"{path}: holds no tensors that are weights")
        if len(self._tensors) < len(usable) or any(len(name) > LONGEST_NAME for name in self._tensors):
            raise CheckpointError(f"{path}: two tensors have the same name as a text, or one is endless")
        self.names = tuple(self._tensors)
        self.metadata: Mapping[str, str] = {}
        self.tied: Mapping[str, str] = _tied(self._tensors)
        self.shared: Mapping[str, str] = overlapping(path, self._tensors, self.tied, self.tree)

    def meta(self, name: str) -> TensorMeta:
        """Shape, dtype, bytes and file."""
        tensor = self._tensors[name]
        return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.numel() * tensor.element_size(), self.path.name)

    def read(self, name: str) -> Tensor:
        """One tensor, a view of the mapped file."""
        return self._tensors[name]

    def write(self, name: str, value: Tensor) -> None:
        """Copy a tensor into its place; nothing happens if it is the very view of that place."""
        place = self._tensors[name]
        if value.data_ptr() != place.data_ptr():
            place.copy_(value)

    def reopened(self, path: Path) -> TorchPart:
        """A staged copy, to be written."""
        return TorchPart(path, writable=True, weights=self._holds_weights)

    def files(self) -> tuple[Path, ...]:
        """The file itself."""
        return (self.path,)

    def optimizers(self) -> list[Any]:
        """Every optimizer state dict in the tree, with where it was found."""
        return [TreeStates(f"{self.path.name}{place}", table) for place, table in _optimizers(self.tree)]

    def staged_size(self, dtype: torch.dtype | None) -> int:
        """Bytes that `stage` will write, the scratch file of a cast included."""
        size = self.path.stat().st_size
        if dtype is None:
            return size
        cast = sum(t.numel() * stored_as(t.dtype, dtype).itemsize for t in self._tensors.values())
        return size + 2 * cast

    def stage(self, target: Path, changed: frozenset[str], dtype: torch.dtype | None) -> None:
        """Copy the file, or save its tree anew where its structure changes."""
        if self.zipped and not self.restructured and dtype is None:
            copy_file(self.path, target)
            return
        scratch = target.with_name(f"{target.name}-cast")
        try:
            tree = self.tree if dtype is None else _cast(self.tree, self._weights, dtype, scratch, self.path)
            with create_like(target, self.path) as file:
                torch.save(tree, file)
        finally:
            scratch.unlink(missing_ok=True)

    def finish(self, provenance: Mapping[str, Any]) -> None:
        """Checksums of the records that changed. A pickle has no place for provenance that loaders would not see."""
        with self.path.open("r+b") as file:
            refresh_checksums(file)

    def sync(self) -> None:
        """Flush everything to the disk; pages of torch's shared mapping belong to the file and are flushed with it."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        """Release the tensors; the file is unmapped with the last of them."""
        self._tensors, self._weights, self.tree = {}, {}, None


class TreeStates:
    """The states of a torch.optim state dict; its tensors are views of the mapped file, so `write` does nothing.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> adam = torch.optim.Adam([("weight", weight)])
    >>> weight.sum().backward(); adam.step()
    >>> states = TreeStates("run.ckpt", adam.state_dict())
    >>> states.keys, list(states.read(0)), states.groups[0]["param_names"]
    ((0,), ['step', 'exp_avg', 'exp_avg_sq'], ['weight'])
    """

    def __init__(self, label: str, table: Mapping[str, Any]) -> None:
        self.label, self.state = label, table["state"]
        groups = table["param_groups"]
        valid = isinstance(groups, list) and all(isinstance(g, Mapping) for g in groups)
        if not valid or not all(isinstance(group.get("params"), list) for group in groups):
            raise CheckpointError(f"{label}: param_groups is not what torch.optim writes")
        if not all(isinstance(slots, Mapping) for slots in self.state.values()):
            raise CheckpointError(f"{label}: state is not what torch.optim writes")
        self.groups: Sequence[Mapping[str, Any]] = groups
        self.keys = tuple(key for group in groups for key in group["params"])

    def read(self, key: Any) -> dict[str, Any]:
        """The slots of one parameter, views of the file."""
        found: dict[str, Any] = self.state.get(key, {})
        return found

    def write(self, key: Any, slots: Mapping[str, Any]) -> None:
        """Nothing: the views were written."""


def _load(path: Path, zipped: bool, writable: bool) -> Any:
    with _safely(path):
        if zipped and writable:
            with set_default_mmap_options(mmap.MAP_SHARED):
                return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return torch.load(path, map_location="cpu", mmap=zipped, weights_only=True)


@contextmanager
def _safely(path: Path) -> Iterator[None]:
    """Say in one line why a pickle is refused: it needs code, or it is damaged."""
    try:
        yield
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        text = str(error)
        if "GLOBAL" in text:
            wanted = text.partition("GLOBAL ")[2].partition(" ")[0] or "an unknown class"
            raise CheckpointError(
                f"{path}: needs code to be read ({wanted}), which could be harmful; load it where you trust it and "
                "save its state_dict alone"
            ) from error
        raise CheckpointError(f"{path}: damaged, or not a torch file ({text[:200]})") from error
    except Exception as error:
        raise CheckpointError(f"{path}: damaged, or not a torch file ({type(error).__name__}: {error})") from error


def _find_weights(path: Path, tree: Any) -> Mapping[Any, Any]:
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


def _usable(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter) and _plain(value)


def _plain(value: Tensor) -> bool:
    return value.layout == torch.strided and not value.is_quantized and value.device.type == "cpu"


def _tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of the same memory, each with the first of them."""
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if place in first:
                tied[name] = first[place]
            first.setdefault(place, name)
    return tied


def _optimizers(tree: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if _is_optimizer(tree):
        yield "", tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            if _is_optimizer(value):
                yield f"[{name!r}]", value
            elif isinstance(value, list | tuple):
                yield from ((f"[{name!r}][{i}]", inner) for i, inner in enumerate(value) if _is_optimizer(inner))


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("state"), Mapping) and "param_groups" in value


def _cast(tree: Any, weights: Mapping[Any, Any], dtype: torch.dtype, scratch: Path, like: Path) -> Any:
    """The tree with its weights in another dtype, in a scratch file instead of memory; ties stay ties."""
    sources = {n: v for n, v in weights.items() if _usable(v) and stored_as(v.dtype, dtype) != v.dtype}
    places: dict[tuple[Any, ...], Tensor] = {}
    size = sum(value.numel() for value in sources.values()) * dtype.itemsize
    if not size:
        return tree
    create_like(scratch, like).close()  # torch would follow a link
    room = torch.UntypedStorage.from_file(str(scratch), True, size)
    start = 0
    new = weights.__class__() if type(weights) is not dict else {}
    replaced: dict[Any, Any] = dict(weights)
    for name, value in sources.items():
        identity = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        if identity not in places:
            # A storage of its own for each, or every tensor's record would contain the whole scratch file.
            piece = room[start * dtype.itemsize : (start + value.numel()) * dtype.itemsize]
            places[identity] = torch.empty(0, dtype=dtype).set_(piece, 0, value.shape)  # type: ignore[call-overload]
            places[identity].copy_(value.detach())
            start += value.numel()
        replaced[name] = places[identity]
    new.update(replaced)  # type: ignore[attr-defined]
    if hasattr(weights, "_metadata"):
        new._metadata = weights._metadata  # type: ignore[attr-defined]
    return _with(tree, weights, new)


def _with(tree: Any, old: Any, new: Any, depth: int = 4) -> Any:
    """The tree with one of its mappings replaced, at any depth."""
    if tree is old:
        return new
    if not isinstance(tree, Mapping) or not depth:
        return tree
    changed = {key: _with(value, old, new, depth - 1) for key, value in tree.items()}
    if all(changed[key] is value for key, value in tree.items()):
        return tree
    return type(tree)(changed.items())  # type: ignore[call-arg]
