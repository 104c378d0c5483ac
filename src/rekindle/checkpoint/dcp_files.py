"""torch.distributed.checkpoint folders, read and written without a process group.

A folder holds `.metadata` (a pickle that says where each chunk of each tensor is) and `.distcp` files in which
every chunk is a small torch file of its own, which is overwritten in place.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from rekindle.checkpoint.archives import refresh_checksums
from rekindle.checkpoint.byte_files import ByteFile, Window, copy_file
from rekindle.checkpoint.dcp_metadata import Chunk, Range, Stored, read_table
from rekindle.checkpoint.parts import CheckpointError, NeedsCodeError, TensorMeta
from rekindle.checkpoint.trees import TorchTree
from rekindle.spelling import argument

_CONTAINERS = ("model", "state_dict", "model_state_dict", "module", "net", "app")


class DcpPart:
    """A DCP folder. `names` are those of the model, without the key that it was saved under."""

    def __init__(self, folder: Path, *, writable: bool = False) -> None:
        self.path, self._writable = folder, writable
        self.metadata: Mapping[str, str] = {}
        self.shared: Mapping[str, str] = {}
        self.tied: Mapping[str, str] = {}
        self._files: dict[str, ByteFile] = {}
        self._written: dict[Range, None] = {}
        self._tensors, self._objects, self._paths = read_table(folder)
        self._keys = _weights(folder, self._tensors, self._paths)
        self.names = tuple(self._keys)
        self._states = _state_keys(self._paths, {*self._tensors, *self._objects})

    def meta(self, name: str) -> TensorMeta:
        """Shape, dtype, bytes, and the file of the first chunk."""
        stored = self._tensors[self._keys[name]]
        size = torch.Size(stored.shape).numel() * stored.dtype.itemsize
        return TensorMeta(stored.shape, stored.dtype, size, stored.chunks[0].place.file if stored.chunks else "")

    def read(self, name: str) -> Tensor:
        """One tensor, assembled from its chunks."""
        return self.read_key(self._keys[name])

    def write(self, name: str, value: Tensor) -> None:
        """Put a tensor back, chunk by chunk."""
        self.write_key(self._keys[name], value)

    def read_key(self, key: str) -> Tensor:
        """A tensor by its full key."""
        shape, dtype, chunks = self._tensors[key]
        whole = torch.empty(shape, dtype=dtype)
        for chunk in chunks:
            file, tree = self._open_chunk(key, chunk, dtype)
            whole[_where(chunk)] = tree.read(file, tree.value)
        return whole

    def write_key(self, key: str, value: Tensor) -> None:
        """Put a tensor back by its full key."""
        shape, dtype, chunks = self._tensors[key]
        for chunk in chunks:
            file, tree = self._open_chunk(key, chunk, dtype)
            tree.write(file, tree.value, value.reshape(shape)[_where(chunk)])
            self._written[chunk.place] = None

    def meta_key(self, key: str) -> Tensor:
        """A tensor by its full key, without its numbers."""
        return torch.empty(self._tensors[key].shape, dtype=self._tensors[key].dtype, device="meta")

    def read_object(self, key: str) -> Any:
        """A plain value by its full key."""
        with self._window(self._objects[key]) as window:
            return _loaded(window, f"{self.path}: {key!r}")

    def reopened(self, path: Path) -> DcpPart:
        """A staged copy, to be written."""
        return DcpPart(path, writable=True)

    def files(self) -> tuple[Path, ...]:
        """The metadata and every data file."""
        return (self.path / ".metadata", *(self.path / name for name in dict.fromkeys(p.file for p in self._used())))

    def optimizers(self) -> list[Any]:
        """The optimizer states of the folder."""
        return [DcpStates(self, name, *found) for name, found in self._states.items()]

    def others(self) -> list[str]:
        """Where else numbers are: a second network, an average of the weights, the state of an unknown optimizer."""
        states = {key for slots, _ in self._states.values() for table in slots.values() for key in table.values()}
        own = {*self._keys.values(), *states}
        rest = (key for key, stored in self._tensors.items() if key not in own and stored.dtype.is_floating_point)
        places = (self._paths[key][0] for key in rest)
        return [f"[{place!r}]" for place in dict.fromkeys(places)]

    def staged_size(self, dtype: torch.dtype | None) -> int:
        """Bytes that `stage` will write."""
        return sum(path.stat().st_size for path in self.files())

    def stage(self, target: Path, changed: frozenset[str], dtype: torch.dtype | None) -> None:
        """Copy the files of the checkpoint to a folder."""
        if dtype is not None:
            raise CheckpointError(f"{self.path}: a DCP folder keeps its dtypes: leave {argument('dtype')} out")
        for key, stored in self._tensors.items():  # whatever is not written must be readable too
            for chunk in stored.chunks:
                self._open_chunk(key, chunk, stored.dtype)
        for key, place in self._objects.items():
            # An object of a class of the user's is copied unread.
            with suppress(NeedsCodeError), self._window(place) as window:
                TorchTree(f"{self.path}: {key!r}", window)
        for file in self.files():
            copy_file(file, target / file.name)

    def finish(self, provenance: Mapping[str, Any], metadata: Mapping[str, str], changed: Collection[str]) -> None:
        """Checksums of the chunks that were written, by this job or by the one that it continues."""
        earlier = (chunk.place for name in changed for chunk in self._tensors[self._keys[name]].chunks)
        for place in dict.fromkeys((*self._written, *earlier)):
            with self._window(place) as window:
                refresh_checksums(window)

    def sync(self) -> None:
        """Flush everything to the disk."""
        for file in self._files.values():
            file.sync()

    def _used(self) -> list[Range]:
        return [chunk.place for stored in self._tensors.values() for chunk in stored.chunks] + [*self._objects.values()]

    def _file(self, name: str) -> ByteFile:
        if name not in self._files:
            self._files[name] = ByteFile(self.path / name, writable=self._writable)
        return self._files[name]

    @contextmanager
    def _window(self, place: Range) -> Iterator[IO[bytes]]:
        with self._file(place.file).opened() as file:
            yield cast("IO[bytes]", Window(file, place.offset, place.length))

    def _open_chunk(self, key: str, chunk: Chunk, dtype: torch.dtype) -> tuple[ByteFile, TorchTree]:
        """The file of a chunk, and the tensor in it."""
        where = f"{self.path}: {key!r}"
        with self._window(chunk.place) as window:
            tree = TorchTree(where, window, chunk.place.offset)
        value = tree.value
        if not isinstance(value, Tensor) or value.dtype != dtype or tuple(value.shape) != chunk.shape:
            raise CheckpointError(f"{where}: a chunk is not what .metadata says")
        if tree.place(value) is None or value.is_quantized:
            raise CheckpointError(f"{where}: a chunk is not stored as one plain tensor")
        return self._file(chunk.place.file), tree


class DcpStates:
    """The states of one optimizer in a DCP folder: read when asked for, put back slot by slot."""

    def __init__(
        self, part: DcpPart, name: str, slots: Mapping[Any, Mapping[str, str]], groups: Mapping[int, Mapping[str, str]]
    ) -> None:
        self.label, self._part, self._slots = f"{part.path.name}[{name!r}]", part, slots
        table = [{key: part.read_object(full) for key, full in groups[i].items()} for i in sorted(groups)]
        listed = [key for group in table if isinstance(group.get("params"), list) for key in group["params"]]
        self.groups: Sequence[Mapping[str, Any]] = table
        self.keys = tuple(listed or slots)

    def slots(self, key: object) -> dict[str, Any]:
        """The slots of one parameter, tensors without their numbers."""
        part, found = self._part, self._slots.get(key, {})
        return {
            s: part.meta_key(full) if full in part._tensors else part.read_object(full) for s, full in found.items()
        }

    def read(self, key: object) -> dict[str, Any]:
        """The slots of one parameter."""
        part, keys = self._part, self._slots.get(key, {})
        return {slot: part.read_key(k) if k in part._tensors else part.read_object(k) for slot, k in keys.items()}

    def restructure(self, key: object, slots: Mapping[str, Any]) -> None:
        """Refused: a folder keeps its structure."""
        raise CheckpointError(
            f"{self.label}: this optimizer's state cannot be reset: {argument('optimizer_state', 'none')}"
        )

    def write(self, key: object, slots: Mapping[str, Any]) -> None:
        """Put the tensors back."""
        for slot, full in self._slots.get(key, {}).items():
            if isinstance(slots.get(slot), Tensor):
                self._part.write_key(full, slots[slot])


def _weights(folder: Path, tensors: Mapping[str, Stored], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
    """Name of a weight → its full key: the tensors of the model, or of a folder that is one state dict."""
    for container in _CONTAINERS:
        inside = {
            ".".join(map(str, p[1:])): k for k, p in paths.items() if k in tensors and p[0] == container and p[1:]
        }
        if inside:
            return inside
    flat = {key: key for key in tensors if len(paths[key]) == 1}
    if not flat:
        tops = ", ".join(dict.fromkeys(str(path[0]) for path in paths.values()))
        raise CheckpointError(f"{folder}: no model among its keys ({tops[:200]})")
    return flat


def _state_keys(
    paths: Mapping[str, tuple[Any, ...]], known: set[str]
) -> dict[str, tuple[dict[Any, Any], dict[int, Any]]]:
    """For each optimizer: parameter → slot → key, and group → setting → key."""
    found: dict[str, tuple[dict[Any, Any], dict[int, Any]]] = {}
    for key, path in paths.items():
        if key not in known:
            continue
        if len(path) == 4 and path[1] == "state":
            found.setdefault(str(path[0]), ({}, {}))[0].setdefault(path[2], {})[str(path[3])] = key
        elif len(path) == 4 and path[1] == "param_groups" and isinstance(path[2], int):
            found.setdefault(str(path[0]), ({}, {}))[1].setdefault(path[2], {})[str(path[3])] = key
        elif len(path) == 2 and isinstance(path[1], str) and path[1].startswith("state."):
            name, _, slot = path[1].removeprefix("state.").rpartition(".")
            found.setdefault(str(path[0]), ({}, {}))[0].setdefault(name, {})[slot] = key
    return {name: tables for name, tables in found.items() if tables[0]}


def _where(chunk: Chunk) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(chunk.start, chunk.shape, strict=True))


def _loaded(window: IO[bytes], where: str) -> object:
    window.seek(0)
    try:
        return torch.load(io.BytesIO(window.read()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{where}: cannot be read ({type(error).__name__}: {str(error)[:200]})") from error
