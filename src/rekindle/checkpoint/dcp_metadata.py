"""The `.metadata` of a torch.distributed.checkpoint folder: which chunk of which tensor lies where.

It is a pickle, and is read by an unpickler that knows the classes of this format and no others.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rekindle.checkpoint.parts import CheckpointError, clearly

LARGEST_METADATA = 1 << 30
_CELLS = 64  # of the grid per chunk, where chunks of ranks form it: 1


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


class Range(NamedTuple):
    """Where a chunk or an object is stored: a range of a file that holds a torch file."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A part of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    place: Range


class Stored(NamedTuple):
    """A tensor, in chunks that make it up."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class Table(NamedTuple):
    """What a folder holds by full key: tensors, other objects, and the path of each key."""

    tensors: dict[str, Stored]
    objects: dict[str, Range]
    paths: dict[str, tuple[Any, ...]]


def read_table(folder: Path) -> Table:
    """The content of `.metadata`, checked: every tensor whole, no byte in two places."""
    path = folder / ".metadata"
    with clearly(path, "reading it"):
        if path.stat().st_size > LARGEST_METADATA:
            raise CheckpointError(f"{path}: too large")
        with path.open("rb") as file:
            found = _MetadataUnpickler(file).load()
        table, storage = found.state_dict_metadata, found.storage_data
        if type(found).__name__ != "Metadata" or not isinstance(table, dict) or not isinstance(storage, dict):
            raise CheckpointError(f"{path}: no table of tensors")
        places: dict[tuple[str, tuple[int, ...] | None], Range] = {}
        for index, info in storage.items():
            offset = None if index.offset is None else tuple(index.offset)
            places[index.fqn, offset] = _place(folder, info)
        tensors: dict[str, Stored] = {}
        objects: dict[str, Range] = {}
        for key, entry in table.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{path}: a key is not a text")
            if type(entry).__name__ == "BytesStorageMetadata":
                if (key, None) in places:
                    objects[key] = places.pop((key, None))
                continue
            tensors[key] = _stored(path, key, entry, places)
        chunks = [chunk.place for stored in tensors.values() for chunk in stored.chunks]
        _check_apart(path, [*chunks, *objects.values()])
        listed = found.planner_data if isinstance(found.planner_data, dict) else {}
        paths = {key: tuple(listed[key]) if key in listed else (key,) for key in table}
        if any(".".join(map(str, parts)) != key for key, parts in paths.items()):
            raise CheckpointError(f"{path}: a key is not the path to its value")
        return Table(tensors, objects, paths)


def _place(folder: Path, info: Any) -> Range:
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
    return Range(name, offset, length)


def _stored(path: Path, key: str, entry: Any, places: dict[tuple[str, Any], Range]) -> Stored:
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
        chunks.append(Chunk(start, sizes, place))
    if sum(torch.Size(chunk.shape).numel() for chunk in chunks) != torch.Size(shape).numel():
        raise CheckpointError(f"{path}: the chunks of {key!r} do not make up the tensor")
    _check_grid(f"{path}: the chunks of {key!r}", shape, [c for c in chunks if torch.Size(c.shape).numel()])
    return Stored(shape, dtype, tuple(chunks))


def _check_apart(path: Path, places: Sequence[Range]) -> None:
    """No byte of a data file belongs to two chunks."""
    ordered = sorted(place for place in places if place.length)
    for one, other in pairwise(ordered):
        if one.file == other.file and one.offset + one.length > other.offset:
            raise CheckpointError(f"{path}: two chunks overlap in {one.file} at byte {other.offset}")


def _check_grid(what: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
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
