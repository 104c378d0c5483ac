"""safetensors files, read and written directly.

A file is eight bytes of header length, a JSON header, and the tensors' bytes. The whole header is checked before any
other byte is read: the file is not trusted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rekindle.checkpoint.byte_files import ByteFile, copy_range, reserve
from rekindle.checkpoint.parts import LONGEST_NAME, CheckpointError, TensorMeta, clearly, stored_as

LONGEST_HEADER = 100_000_000  # the limit of the reference implementation
MOST_DIMENSIONS = 64
PROVENANCE = "rekindle"
_ROOM = 4096  # reserved in a staged header for the provenance, which is known only at the end

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # copied as bytes: torch has no such dtype


class Span(NamedTuple):
    """Where a tensor is stored: its bytes run from `start` to `stop` after the header."""

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """A checked header: the tensors in the order of their bytes, and where those begin in the file."""

    spans: dict[str, Span]
    metadata: dict[str, str]
    begin: int


def read_header(data: ByteFile) -> Header:
    """The header of a safetensors file, or a `CheckpointError` if anything about it is invalid.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.safetensors")
    ...     save_file({"w": torch.zeros(2, 3)}, path)
    ...     read_header(ByteFile(path)).spans
    {'w': Span(code='F32', shape=(2, 3), start=0, stop=24)}
    """
    path, size = data.path, data.size
    with clearly(path, "reading the header"), data.opened() as file:
        first = file.read(8)
        if len(first) < 8:
            raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file")
        length = int.from_bytes(first, "little")
        if length > LONGEST_HEADER:
            raise CheckpointError(
                f"{path}: claims a header of {length} bytes, more than {LONGEST_HEADER}: no safetensors"
            )
        if 8 + length > size:
            raise CheckpointError(f"{path}: truncated inside its header ({size} bytes, header of {length})")
        text = file.read(length)
        if not text.startswith(b"{"):
            raise CheckpointError(f"{path}: the header is not a JSON object: no safetensors file")
        table = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        return _checked(path, table, size - 8 - length, 8 + length)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:200]!r} appears twice")
    return table


def _checked(path: Path, table: dict[str, Any], room: int, begin: int) -> Header:
    metadata = table.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not a table of texts")
    spans = {name: _span(path, name, entry) for name, entry in table.items()}
    spans = dict(sorted(spans.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = 0
    for name, span in spans.items():
        if span.start != end:
            what = "overlaps the tensor before it" if span.start < end else "leaves a hole before it"
            raise CheckpointError(f"{path}: {name[:200]!r} {what} (starts at {span.start}, expected {end})")
        end = span.stop
    if end != room:
        what = "truncated" if end > room else "too long"
        raise CheckpointError(f"{path}: {what}: the header describes {end} bytes of tensors, the file has {room}")
    return Header(spans, metadata, begin)


def _span(path: Path, name: str, entry: object) -> Span:
    where = f"{path}: tensor {name[:200]!r}"
    if len(name) > LONGEST_NAME:
        raise CheckpointError(f"{path}: a tensor has a name of {len(name)} characters, more than {LONGEST_NAME}")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise CheckpointError(f"{where} has a name that is no text")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} is not described by dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or (code not in _DTYPES and code not in _BITS):
        raise CheckpointError(f"{where} has the unknown dtype {code!r}")
    if not _counts(shape) or len(shape) > MOST_DIMENSIONS:
        raise CheckpointError(f"{where} has no valid shape: {shape!r}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has no valid data_offsets: {offsets!r}")
    bits = _BITS[code] if code in _BITS else _DTYPES[code].itemsize * 8
    for side in shape:
        bits *= side
    if _beyond_torch(shape):
        raise CheckpointError(f"{where} has a shape that is too large for torch: {shape!r:.200}")
    if bits != 8 * (offsets[1] - offsets[0]):
        raise CheckpointError(
            f"{where} of shape {shape} and dtype {code} does not take {offsets[1] - offsets[0]} bytes"
        )
    return Span(code, tuple(shape), offsets[0], offsets[1])


def _beyond_torch(shape: list[int]) -> bool:
    """Whether strides would overflow, which they do also where another side is 0."""
    product = 1
    for side in shape:
        product *= max(side, 1)
    return product >= 1 << 59


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)


class SafetensorsPart:
    """One safetensors file.

    A tensor of a 4- or 6-bit format reads as its bytes. `stage` writes everything but the tensors to be changed, and
    reserves space in the header for the provenance, which is added at the end.
    """

    def __init__(self, path: Path | ByteFile, *, writable: bool = False) -> None:
        self._file = path if isinstance(path, ByteFile) else ByteFile(path, writable=writable)
        self.path, self.size = self._file.path, self._file.size
        self.header = read_header(self._file)
        self.names = tuple(self.header.spans)
        self.metadata: Mapping[str, str] = self.header.metadata
        # safetensors.torch.save_model notes the names that it drops because they share memory.
        self.shared: Mapping[str, str] = {}
        self.tied: Mapping[str, str] = {
            name: owner
            for name, owner in self.metadata.items()
            if owner in self.header.spans and name not in self.header.spans
        }

    def meta(self, name: str) -> TensorMeta:
        """Shape, dtype, bytes in the file, and the file."""
        span = self.header.spans[name]
        if span.code in _BITS:
            return TensorMeta((span.stop - span.start,), torch.uint8, span.stop - span.start, self.path.name)
        return TensorMeta(span.shape, _DTYPES[span.code], span.stop - span.start, self.path.name)

    def read(self, name: str) -> Tensor:
        """One tensor."""
        shape, dtype, _, _ = self.meta(name)
        return self._file.tensor(self.header.begin + self.header.spans[name].start, shape, dtype)

    def write(self, name: str, value: Tensor) -> None:
        """Put a tensor into its place."""
        shape, dtype, _, _ = self.meta(name)
        self._file.put(self.header.begin + self.header.spans[name].start, value.reshape(shape).to(dtype))

    def reopened(self, path: Path) -> SafetensorsPart:
        """A staged copy, to be written."""
        return SafetensorsPart(path, writable=True)

    def files(self) -> tuple[Path, ...]:
        """The file itself."""
        return (self.path,)

    def optimizers(self) -> list[Any]:
        """None: safetensors files hold weights."""
        return []

    def others(self) -> list[str]:
        """Nothing."""
        return []

    def staged_size(self, dtype: torch.dtype | None) -> int:
        """Bytes that `stage` will write."""
        spans = self._spans_as(dtype)
        return len(_encoded(spans, self.metadata, _ROOM)) + _end(spans)

    def stage(self, target: Path, changed: frozenset[str], dtype: torch.dtype | None) -> None:
        """Write a file of the same tensors in the same order, without the bytes of those in `changed`."""
        spans = self._spans_as(dtype)
        head = _encoded(spans, self.metadata, _ROOM)
        reserve(target, len(head) + _end(spans), self.path)
        with self._file.opened() as source, target.open("r+b") as file:
            file.write(head)
            file.flush()
            for start, stop, to in _runs(self.header.spans, spans, changed):
                copy_range(source.fileno(), file.fileno(), self.header.begin + start, stop - start, len(head) + to)
        cast = [name for name in spans if name not in changed and spans[name].code != self.header.spans[name].code]
        output = ByteFile(target, writable=True)
        for name in cast:
            code, _, start, stop = self.header.spans[name]
            old, new = _DTYPES[code], _DTYPES[spans[name].code]
            for at, piece in self._file.pieces(self.header.begin + start, (stop - start) // old.itemsize, old):
                output.put(len(head) + spans[name].start + at * new.itemsize, piece.to(new))

    def finish(self, provenance: Mapping[str, Any], metadata: Mapping[str, str], changed: Collection[str]) -> None:
        """Put the provenance into the header, after that of earlier runs.

        Those are in the source's `metadata`: a job that was killed here has been added to this file's already.
        """
        history = _history(metadata.get(PROVENANCE))
        room = self.header.begin
        for keep in range(len(history), -1, -1):
            kept = [*history[len(history) - keep :], dict(provenance)]
            head = _encoded(self.header.spans, {**self.metadata, PROVENANCE: json.dumps(kept)}, 0)
            if len(head) <= room:
                break
        else:
            raise CheckpointError(f"{self.path}: no room for the provenance in the header")
        text = head[8:].ljust(room - 8)
        self._file.put(0, torch.frombuffer(bytearray((room - 8).to_bytes(8, "little") + text), dtype=torch.uint8))

    def sync(self) -> None:
        """Flush everything to the disk."""
        self._file.sync()

    def _spans_as(self, dtype: torch.dtype | None) -> dict[str, Span]:
        if dtype is None:
            return self.header.spans
        spans, end = {}, 0
        for name, span in self.header.spans.items():
            if span.code in _BITS:
                code, size = span.code, span.stop - span.start
            else:
                old = _DTYPES[span.code]
                new = stored_as(old, dtype)
                code, size = _NAMES[new], (span.stop - span.start) // old.itemsize * new.itemsize
            spans[name] = Span(code, span.shape, end, end + size)
            end += size
        return spans


def _end(spans: Mapping[str, Span]) -> int:
    return max((span.stop for span in spans.values()), default=0)


def _encoded(spans: Mapping[str, Span], metadata: Mapping[str, str], room: int) -> bytes:
    """Length and header, blanks up to a multiple of 8 included: the data must begin aligned."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, (code, shape, start, stop) in spans.items():
        table[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(len(text) + room)
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _runs(old: Mapping[str, Span], new: Mapping[str, Span], changed: Iterable[str]) -> Iterable[tuple[int, int, int]]:
    """(start, stop, target start) of neighboring tensors that are copied as they are."""
    run: list[int] = []
    for name, span in old.items():
        if name in changed or new[name].code != span.code:
            continue
        if run and run[1] == span.start and run[2] + run[1] - run[0] == new[name].start:
            run[1] = span.stop
            continue
        if run:
            yield run[0], run[1], run[2]
        run = [span.start, span.stop, new[name].start]
    if run:
        yield run[0], run[1], run[2]


def _history(text: str | None) -> list[Any]:
    try:
        known = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    return known if isinstance(known, list) else []
