"""The tree of values in a torch file: its tensors have shapes and a place in the file, and no numbers.

torch.save has two formats. Both hold a pickle, which torch's own unpickler for weights alone reads here (plain values
and tensors, no code), and the bytes of the storages: records of a zip archive, or, before torch 1.6, one after the
other behind the pickle. Every storage that the pickle lists must be there, in exactly its size.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch._weights_only_unpickler import Unpickler

from rekindle.checkpoint.archives import Record, records
from rekindle.checkpoint.byte_files import ByteFile
from rekindle.checkpoint.parts import CheckpointError, NeedsCodeError

ZIP = b"PK\x03\x04"
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


class ByteRange(NamedTuple):
    """A range of bytes in a file."""

    start: int
    size: int


class TorchTree:
    """What a torch file holds: `value` with tensors on the meta device, and where the numbers of each begin.

    >>> buffer = io.BytesIO()
    >>> torch.save({"a": torch.zeros(2, 3)}, buffer)
    >>> tree = TorchTree(Path("a.pt"), buffer)
    >>> tree.value["a"].shape, tree.place(tree.value["a"]).size
    (torch.Size([2, 3]), 24)
    """

    def __init__(self, path: Path | str, file: IO[bytes], offset: int = 0) -> None:
        self._path, self._offset = path, offset
        self._listed: dict[str, tuple[torch.dtype, int, torch.UntypedStorage]] = {}
        self._places: dict[int, ByteRange] = {}
        file.seek(0)
        self.zipped = file.read(4) == ZIP
        file.seek(0)
        with _in_one_line(path):
            self.value: Any = self._read_archive(file) if self.zipped else self._read_sequence(file)
            file.seek(0)
            torch.load(file, map_location="meta", weights_only=True)  # what torch refuses is of no use to anybody

    def storage(self, tensor: Tensor) -> ByteRange | None:
        """Where the storage of a tensor is; None if the file has no numbers of it."""
        if tensor.layout != torch.strided or tensor.device.type != "meta":
            return None
        return self._places.get(tensor.untyped_storage()._cdata)

    def place(self, tensor: Tensor) -> ByteRange | None:
        """The bytes from a tensor's first number to its last, which must lie in its storage."""
        storage = self.storage(tensor)
        if storage is None or not tensor.numel():
            return storage and ByteRange(storage.start, 0)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = int(tensor.storage_offset())
        end = begin + last + 1
        if begin < 0 or last < 0 or end * tensor.itemsize > storage.size:
            raise CheckpointError(f"{self._path}: a tensor needs {end * tensor.itemsize} bytes, it has {storage.size}")
        return ByteRange(storage.start + begin * tensor.itemsize, (last + 1) * tensor.itemsize)

    def view(self, tensor: Tensor) -> tuple[Any, ...]:
        """What two tensors have in common that are the same weight."""
        return self.place(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype

    def read(self, file: ByteFile, tensor: Tensor) -> Tensor:
        """The tensor with its numbers."""
        place = self.place(tensor)
        if place is None:
            raise CheckpointError(f"{self._path}: a tensor is not stored as plain numbers")
        if tensor.numel() * tensor.itemsize > place.size:
            raise CheckpointError(f"{self._path}: a tensor of shape {tuple(tensor.shape)} repeats its numbers")
        flat = file.tensor(place.start, (place.size // tensor.itemsize,), tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride()) if tensor.numel() else flat.reshape(tensor.shape)

    def write(self, file: ByteFile, tensor: Tensor, value: Tensor) -> None:
        """Put numbers into the tensor's place; what lies between those of a strided one stays."""
        place = self.place(tensor)
        if place is None or not tensor.numel():
            return
        value = value.detach().reshape(tensor.shape).to(tensor.dtype)
        if not tensor.is_contiguous():
            flat = file.tensor(place.start, (place.size // tensor.itemsize,), tensor.dtype)
            flat.as_strided(tensor.shape, tensor.stride()).copy_(value)
            value = flat
        file.put(place.start, value)

    def _read_archive(self, file: IO[bytes]) -> object:
        found = records(file)
        by_name = {record.name.partition("/")[2]: record for record in found}
        if "constants.pkl" in by_name:
            raise CheckpointError(f"{self._path}: a TorchScript program, not a checkpoint: save its state_dict()")
        order = by_name.get("byteorder")
        if order is not None and _content(file, order) != b"little":
            raise CheckpointError(f"{self._path}: was written on a big-endian machine, which is not supported")
        if "data.pkl" not in by_name:
            raise CheckpointError(f"{self._path}: has no data.pkl: damaged, or not a torch file")
        value = self._unpickle(io.BytesIO(_content(file, by_name["data.pkl"])))
        for key in self._listed:
            record = by_name.get(f"data/{key}")
            if record is None:
                raise CheckpointError(f"{self._path}: the record of storage {key[:100]!r} is missing")
            self._settle(key, record.start, record.size)
        return value

    def _read_sequence(self, file: IO[bytes]) -> object:
        if self._unpickle(file) != _MAGIC or self._unpickle(file) != _PROTOCOL:
            raise CheckpointError(f"{self._path}: damaged, or not a torch file")
        if self._unpickle(file).get("little_endian") is not True:
            raise CheckpointError(f"{self._path}: was written on a big-endian machine, which is not supported")
        value = self._unpickle(file)
        listed = dict(self._listed)
        keys = self._unpickle(file)
        if not isinstance(keys, list) or sorted(keys) != sorted(listed):
            raise CheckpointError(f"{self._path}: its list of storages is not that of its tensors")
        start, end = file.tell(), file.seek(0, 2)
        for key in keys:
            file.seek(start)
            (count,) = struct.unpack("<q", file.read(8))
            size = count * listed[key][0].itemsize
            if count < 0 or start + 8 + size > end:
                raise CheckpointError(f"{self._path}: truncated")
            self._settle(key, start + 8, size)
            start += 8 + size
        if start != end:
            raise CheckpointError(f"{self._path}: {end - start} bytes belong to no tensor")
        return value

    def _unpickle(self, file: IO[bytes]) -> Any:
        reader: Any = Unpickler(file, encoding="utf-8")
        reader.persistent_load = self._list_storage
        return reader.load()

    def _list_storage(self, saved: Any) -> object:
        kind, key, _, count, *view = saved[1:]
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if not isinstance(key, str) or type(count) is not int or not 0 <= count < 1 << 59 or any(view):
            raise CheckpointError(f"{self._path}: a storage is not described by its name and size")
        if key not in self._listed:
            size = count * dtype.itemsize
            empty = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
            self._listed[key] = dtype, count, empty
        if self._listed[key][:2] != (dtype, count):
            raise CheckpointError(f"{self._path}: storage {key[:100]!r} is listed with two dtypes")
        storage = self._listed[key][2]
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]

    def _settle(self, key: str, start: int, size: int) -> None:
        dtype, count, storage = self._listed[key]
        if count * dtype.itemsize != size:
            wanted = count * dtype.itemsize
            raise CheckpointError(
                f"{self._path}: storage {key[:100]!r} should have {wanted} bytes, its record has {size}"
            )
        self._places[storage._cdata] = ByteRange(self._offset + start, size)


def tensors_in(value: object) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree with where it is, each container once, so that no cycle is followed.

    >>> [place for place, _ in tensors_in({"a": [torch.ones(1), 3], "b": torch.ones(1)})]
    ["['b']", "['a'][0]"]
    """
    waiting, seen = [("", value)], set()
    while waiting:
        place, inner = waiting.pop()
        if isinstance(inner, Tensor):
            yield place, inner
        elif isinstance(inner, Mapping | list | tuple) and id(inner) not in seen:
            seen.add(id(inner))
            items = inner.items() if isinstance(inner, Mapping) else enumerate(inner)
            waiting += [(f"{place}[{key!r:.100}]", each) for key, each in items]


def _content(file: IO[bytes], record: Record) -> bytes:
    file.seek(record.start)
    return file.read(record.size)


@contextmanager
def _in_one_line(path: Path | str) -> Iterator[None]:
    """Say in one line why a pickle is refused: it needs code, or it is damaged."""
    try:
        yield
    except CheckpointError as error:
        message = str(error)
        raise CheckpointError(message if message.startswith(str(path)) else f"{path}: {message}") from error
    except pickle.UnpicklingError as error:
        text = str(error)
        if "GLOBAL" in text:
            wanted = text.partition("GLOBAL ")[2].partition(" ")[0] or "an unknown class"
            raise NeedsCodeError(
                f"{path}: needs code to be read ({wanted}), which could be harmful; load it where you trust it and "
                "save its state_dict alone"
            ) from error
        raise CheckpointError(f"{path}: damaged, or not a torch file ({text[:200]})") from error
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: damaged, or not a torch file ({type(error).__name__}: {error})") from error
