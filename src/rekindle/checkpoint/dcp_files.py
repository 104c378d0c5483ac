"""torch.distributed.checkpoint folders, read and written without a process group.

A folder holds `.metadata` (a pickle that says where each chunk of each tensor is) and `.distcp` files in which
every chunk is a small torch file of its own. The pickle is read by an unpickler that knows the classes of this format
and no others; chunks are overwritten in place.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor

from rekindle.checkpoint.archives import refresh_checksums
from rekindle.checkpoint.byte_files import ByteFile, Window, copy_file
from rekindle.checkpoint.parts import CheckpointError, NeedsCodeError, TensorMeta, clearly
from rekindle.checkpoint.trees import TorchTree

LARGEST_METADATA = 1 << 30
_CELLS = 64  # of the grid per chunk, where chunks of ranks form it: 1
_CONTAINERS = ("model", "state_dict", "model_state_dict", "module", "net", "app")


class _Fields:
    """What a class of the format is read into: its fields, and nothing that runs."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None  # as the defaults of these classes are


class _TensorProperties(_Fields):
    """The properties of a tensor, which torch stores as a tuple."""

    def __setstate__(self, state: Any) -> None:
        self.dtype, _, _, memory_format, _ = state
        if not isinstance(memory_format, _MemoryFormat):
            raise CheckpointError(f".metadata: {memory_format!r:.100} is no memory format")


class _MemoryFormat:
    """One of torch's memory formats, by its number; nothing depends on it."""

    def __init__(self, number: int) -> None:
        if number not in range(3):
            raise CheckpointError(f".metadata: {number!r:.100} is no memory format")


def _parts(*values: Any) -> Any:
    """A value that is not needed: a path."""
    return values


def _layout(name: str) -> str:
    if name not in ("torch.strided", "torch.sparse_coo"):
        raise CheckpointError(f".metadata: {name!r:.100} is no layout of this format")
    return name


_RECORDS = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
_CLASSES: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): type(name, (_Fields,), {})
        for name in (*_RECORDS, "MetadataIndex", "StorageMeta")
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): type("_StorageInfo", (_Fields,), {}),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _TensorProperties,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch", "Size"): lambda sides=(): tuple(sides),
    ("collections", "OrderedDict"): dict,
    **{(module, name): _parts for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads each class of the format as a stand-in, so that no code but this module's runs; any other is refused."""

    def find_class(self, module: str, name: str) -> Any:
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype | torch.layout):
            return value
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        raise CheckpointError(f".metadata asks for {module}.{name}, which is not part of the format: refused")


class _Place(NamedTuple):
    """Where a chunk or an object is stored: a range of a file that holds a torch file."""

    file: str
    offset: int
    length: int


class _Chunk(NamedTuple):
    start: tuple[int, ...]
    shape: tuple[int, ...]
    place: _Place


class _Stored(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[_Chunk, ...]


class DcpPart:
    """A DCP folder. `names` are those of the model, without the key that it was saved under."""

    def __init__(self, folder: Path, *, writable: bool = False) -> None:
        self.path, self._writable = folder, writable
        self.metadata: Mapping[str, str] = {}
        self.shared: Mapping[str, str] = {}
        self.tied: Mapping[str, str] = {}
        self._tensors: dict[str, _Stored] = {}
        self._objects: dict[str, _Place] = {}
        self._files: dict[str, ByteFile] = {}
        self._written: dict[_Place, None] = {}
        with clearly(folder / ".metadata", "reading it"):
            paths = self._read_metadata(folder / ".metadata")
        self._keys = _weights(folder, self._tensors, paths)
        self.names = tuple(self._keys)
        self._states = _state_keys(paths, {*self._tensors, *self._objects})

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

    def staged_size(self, dtype: torch.dtype | None) -> int:
        """Bytes that `stage` will write."""
        return sum(path.stat().st_size for path in self.files())

    def stage(self, target: Path, changed: frozenset[str], dtype: torch.dtype | None) -> None:
        """Copy the files of the checkpoint to a folder."""
        if dtype is not None:
            raise CheckpointError(f"{self.path}: a DCP folder keeps its dtypes: leave dtype= out")
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

    def _used(self) -> list[_Place]:
        return [chunk.place for stored in self._tensors.values() for chunk in stored.chunks] + [*self._objects.values()]

    def _file(self, name: str) -> ByteFile:
        if name not in self._files:
            self._files[name] = ByteFile(self.path / name, writable=self._writable)
        return self._files[name]

    @contextmanager
    def _window(self, place: _Place) -> Iterator[IO[bytes]]:
        with self._file(place.file).opened() as file:
            yield cast("IO[bytes]", Window(file, place.offset, place.length))

    def _open_chunk(self, key: str, chunk: _Chunk, dtype: torch.dtype) -> tuple[ByteFile, TorchTree]:
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

    def _read_metadata(self, path: Path) -> dict[str, tuple[Any, ...]]:
        if path.stat().st_size > LARGEST_METADATA:
            raise CheckpointError(f"{path}: too large")
        with path.open("rb") as file:
            found = _MetadataUnpickler(file).load()
        table, storage = found.state_dict_metadata, found.storage_data
        if type(found).__name__ != "Metadata" or not isinstance(table, dict) or not isinstance(storage, dict):
            raise CheckpointError(f"{path}: no table of tensors")
        places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
        for index, info in storage.items():
            offset = None if index.offset is None else tuple(index.offset)
            places[index.fqn, offset] = _place(self.path, info)
        for key, entry in table.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{path}: a key is not a text")
            if type(entry).__name__ == "BytesStorageMetadata":
                if (key, None) in places:
                    self._objects[key] = places.pop((key, None))
                continue
            self._tensors[key] = _stored(path, key, entry, places)
        _check_apart(path, self._used())
        listed = found.planner_data if isinstance(found.planner_data, dict) else {}
        paths = {key: tuple(listed[key]) if key in listed else (key,) for key in table}
        if any(".".join(map(str, parts)) != key for key, parts in paths.items()):
            raise CheckpointError(f"{path}: a key is not the path to its value")
        return paths


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

    def slots(self, key: Any) -> dict[str, Any]:
        """The slots of one parameter, tensors without their numbers."""
        part, found = self._part, self._slots.get(key, {})
        return {
            s: part.meta_key(full) if full in part._tensors else part.read_object(full) for s, full in found.items()
        }

    def read(self, key: Any) -> dict[str, Any]:
        """The slots of one parameter."""
        part, keys = self._part, self._slots.get(key, {})
        return {slot: part.read_key(k) if k in part._tensors else part.read_object(k) for slot, k in keys.items()}

    def restructure(self, key: Any, slots: Mapping[str, Any]) -> None:
        """Refused: a folder keeps its structure."""
        raise CheckpointError(f"{self.label}: this optimizer's state cannot be reset in place: optimizer_state='none'")

    def write(self, key: Any, slots: Mapping[str, Any]) -> None:
        """Put the tensors back."""
        for slot, full in self._slots.get(key, {}).items():
            if isinstance(slots.get(slot), Tensor):
                self._part.write_key(full, slots[slot])


def _place(folder: Path, info: Any) -> _Place:
    name, offset, length = info.relative_path, info.offset, info.length
    if not isinstance(name, str) or not name or set(name) & {"/", "\\", "\0", ":"} or name in (".", ".."):
        raise CheckpointError(f"{folder}/.metadata: {name!r:.200} is not a plain file name")
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{folder}/.metadata: {name} is compressed or transformed, which is not supported")
    file = folder / name
    if not file.is_file():
        raise CheckpointError(f"{folder}: {name} is missing")
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise CheckpointError(f"{folder}/.metadata: an offset is not a number")
    if offset + length > file.stat().st_size:
        raise CheckpointError(f"{file}: truncated: .metadata lists bytes up to {offset + length}")
    return _Place(name, offset, length)


def _stored(path: Path, key: str, entry: Any, places: dict[tuple[str, Any], _Place]) -> _Stored:
    shape, dtype = tuple(entry.size), entry.properties.dtype
    if not isinstance(dtype, torch.dtype) or not all(type(side) is int and side >= 0 for side in shape):
        raise CheckpointError(f"{path}: {key!r} has no valid shape and dtype")
    chunks = []
    for chunk in entry.chunks:
        start, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        fits = len(start) == len(sizes) == len(shape)
        if not fits or any(a < 0 or n < 0 or a + n > side for a, n, side in zip(start, sizes, shape, strict=True)):
            raise CheckpointError(f"{path}: a chunk of {key!r} lies outside the tensor")
        place = places.pop((key, start), None)  # one chunk each
        if place is None:
            raise CheckpointError(f"{path}: a chunk of {key!r} is stored nowhere")
        chunks.append(_Chunk(start, sizes, place))
    if sum(torch.Size(chunk.shape).numel() for chunk in chunks) != torch.Size(shape).numel():
        raise CheckpointError(f"{path}: the chunks of {key!r} do not make up the tensor")
    _check_grid(f"{path}: the chunks of {key!r}", shape, [c for c in chunks if torch.Size(c.shape).numel()])
    return _Stored(shape, dtype, tuple(chunks))


def _check_apart(path: Path, places: Sequence[_Place]) -> None:
    """No byte of a data file belongs to two chunks."""
    ordered = sorted(place for place in places if place.length)
    for one, other in pairwise(ordered):
        if one.file == other.file and one.offset + one.length > other.offset:
            raise CheckpointError(f"{path}: two chunks overlap in {one.file} at byte {other.offset}")


def _weights(folder: Path, tensors: Mapping[str, _Stored], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
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


def _check_grid(what: str, shape: tuple[int, ...], chunks: Sequence[_Chunk]) -> None:
    """Chunks cut a tensor along the lines of a grid; no cell of it may belong to two of them."""
    lines = []
    for axis, side in enumerate(shape):
        cuts = {0, side, *(c.start[axis] for c in chunks), *(c.start[axis] + c.shape[axis] for c in chunks)}
        lines.append({cut: number for number, cut in enumerate(sorted(cuts))})
    if math.prod(max(1, len(cuts) - 1) for cuts in lines) > _CELLS * (len(chunks) + 1):
        raise CheckpointError(f"{what} do not form a grid")
    taken = torch.zeros([max(1, len(cuts) - 1) for cuts in lines], dtype=torch.bool)
    for chunk in chunks:
        ranges = zip(chunk.start, chunk.shape, lines, strict=True)
        cells = taken[tuple(slice(cuts[start], cuts[start + size]) for start, size, cuts in ranges)]
        if cells.any():
            raise CheckpointError(f"{what} overlap")
        cells.fill_(True)


def _where(chunk: _Chunk) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(chunk.start, chunk.shape, strict=True))


def _loaded(window: IO[bytes], where: str) -> Any:
    window.seek(0)
    try:
        return torch.load(io.BytesIO(window.read()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{where}: cannot be read ({type(error).__name__}: {str(error)[:200]})") from error
