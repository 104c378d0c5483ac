"""A file as ranges of bytes that are read into tensors and overwritten by them, so that only one tensor is in memory.

Files are not mapped: if a mapped file becomes shorter, reading it ends the process. Here every read opens the file and
compares it with what it was at first, so a source that is replaced, rewritten or shortened meanwhile is an error.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from rekindle.checkpoint.parts import CheckpointError, clearly
from rekindle.files import State, create_like

_COPY_CHUNK = 1 << 23
_PIECE = 1 << 22


class ByteFile:
    """One file, for reading or also for overwriting.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "numbers")
    ...     _ = path.write_bytes(bytes(16))
    ...     ByteFile(path, writable=True).put(8, torch.ones(2))
    ...     ByteFile(path).tensor(0, (4,), torch.float32).tolist()
    [0.0, 0.0, 1.0, 1.0]
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path, self.writable = path, writable
        self._state: State | None = None
        with self.opened() as file:
            self._state = State.of(os.fstat(file.fileno()))
        self.size = self._state.size
        if not self.size:
            raise CheckpointError(f"{path}: the file is empty")

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The open file, if it is still the one that it was at first; one that is written may have another time."""
        with clearly(self.path), self.path.open("r+b" if self.writable else "rb") as file:
            now, kept = State.of(os.fstat(file.fileno())), 3 if self.writable else 4
            if self._state is not None and now[:kept] != self._state[:kept]:
                raise CheckpointError(f"{self.path}: changed while it was read; nothing was written: try again")
            yield file

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor whose numbers begin at a byte."""
        length = math.prod(shape) * dtype.itemsize
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CheckpointError(f"{self.path}: bytes {offset}…{offset + length} lie outside the file ({self.size})")
        raw = torch.empty(length, dtype=torch.uint8)
        if length:
            with self.opened() as file:
                file.seek(offset)
                if file.readinto(_memory(raw)) < length:  # type: ignore[attr-defined]
                    raise CheckpointError(f"{self.path}: became shorter while it was read")
        return raw.view(dtype).reshape(shape)

    def pieces(self, offset: int, count: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """So many numbers in pieces of a few megabytes, each with where it begins."""
        for start in range(0, count, _PIECE):
            yield start, self.tensor(offset + start * dtype.itemsize, (min(_PIECE, count - start),), dtype)

    def put(self, offset: int, value: Tensor) -> None:
        """Write a tensor's numbers from a byte on."""
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        if offset < 0 or offset + len(raw) > self.size:
            raise CheckpointError(f"{self.path}: bytes {offset}…{offset + len(raw)} lie outside the file ({self.size})")
        if len(raw):
            with self.opened() as file:
                file.seek(offset)
                file.write(_memory(raw))

    def sync(self) -> None:
        """Flush everything written to the disk."""
        if self.writable:
            with self.opened() as file:
                os.fsync(file.fileno())


def _memory(raw: Tensor) -> memoryview:
    """The memory of a tensor of bytes. (numpy could say it too, but torch alone must do.)"""
    return memoryview((ctypes.c_char * len(raw)).from_address(raw.data_ptr())).cast("B")


def copy_range(source: int, target: int, start: int, length: int, to: int) -> None:
    """Copy bytes between two open files, inside the kernel where it can."""
    in_kernel = hasattr(os, "copy_file_range")
    while length:
        if in_kernel:
            try:
                done = os.copy_file_range(source, target, length, start, to)
            except OSError:
                in_kernel = False
                continue
        else:
            done = os.pwrite(target, os.pread(source, min(length, _COPY_CHUNK), start), to)
        if not done:
            raise CheckpointError("a file became shorter while it was copied")
        start, to, length = start + done, to + done, length - done


def copy_file(source: Path, target: Path) -> None:
    """Copy a file to a new name, readable by nobody who may not read the source."""
    with source.open("rb") as old, create_like(target, source) as new:
        state = os.fstat(old.fileno())
        copy_range(old.fileno(), new.fileno(), 0, state.st_size, 0)
    os.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns))


def reserve(path: Path, size: int, like: Path) -> None:
    """Create a file of this size with its blocks allocated: a full disk is noticed before the work of hours."""
    with create_like(path, like) as file:
        file.truncate(size)
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)


class Window(io.RawIOBase):
    """Bytes `start` to `start + length` of an open file, to be read, searched and overwritten.

    >>> window = Window(io.BytesIO(b"0123456789"), 3, 4)
    >>> window.seek(1), window.read()
    (1, b'456')
    """

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        """True: io asks for this before it reads."""
        return True

    def seekable(self) -> bool:
        """True: any position of the part can be reached."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place inside the window."""
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        """The present place."""
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """So many bytes, or all that are left."""
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        """Overwrite; what would go beyond the end is refused."""
        if self._at + len(data) > self._length:
            raise CheckpointError("a write beyond the end of a piece of a file")
        self._file.seek(self._start + self._at)
        self._at += self._file.write(data)
        return len(data)
