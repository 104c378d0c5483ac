"""A file as memory: tensors that are views of its bytes, so that nothing is loaded and writing is a copy.

Pages of a mapped file belong to the page cache, not to the process: a checkpoint larger than memory can be read tensor
by tensor. A `Window` is a range of a mapped file that behaves like a separate file.
"""

from __future__ import annotations

import io
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rekindle.checkpoint.parts import CheckpointError, clearly
from rekindle.files import create_like

_COPY_CHUNK = 1 << 23


class MappedFile:
    """One file, mapped for reading (writes stay private and never reach it) or for writing through.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "numbers")
    ...     _ = path.write_bytes(bytes(16))
    ...     file = MappedFile(path, writable=True)
    ...     _ = file.tensor(8, (2,), torch.float32).fill_(1.0)
    ...     file.sync()
    ...     MappedFile(path).tensor(0, (4,), torch.float32).tolist()
    [0.0, 0.0, 1.0, 1.0]
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path, self.writable = path, writable
        with clearly(path), path.open("r+b" if writable else "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if not self.size:
                raise CheckpointError(f"{path}: the file is empty")
            if writable:
                self.map = mmap.mmap(file.fileno(), self.size)
            elif hasattr(mmap, "MAP_NORESERVE"):
                # torch wants a writable buffer. Private pages do not count against memory until they are written,
                # but without NORESERVE the kernel refuses a mapping larger than memory.
                flags = mmap.MAP_PRIVATE | mmap.MAP_NORESERVE
                self.map = mmap.mmap(file.fileno(), self.size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            else:
                self.map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)

    def bytes(self, offset: int, length: int) -> Tensor:
        """The bytes of a range as a view."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CheckpointError(f"{self.path}: bytes {offset}…{offset + length} lie outside the file ({self.size})")
        if not length:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.map, dtype=torch.uint8, count=length, offset=offset)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that starts at a byte: a view, or a copy where the offset is not aligned for its dtype."""
        count = 1
        for side in shape:
            count *= side
        raw = self.bytes(offset, count * dtype.itemsize)
        if not count:
            return torch.empty(shape, dtype=dtype)
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).reshape(shape)

    def put(self, offset: int, value: Tensor) -> None:
        """Copy a tensor to a byte offset; nothing happens if it is the view of that place."""
        flat = value.contiguous()
        if not flat.numel():
            return
        place = self.bytes(offset, flat.numel() * flat.element_size())
        if flat.data_ptr() != place.data_ptr():
            place.copy_(flat.reshape(-1).view(torch.uint8))

    def sync(self) -> None:
        """Flush everything written to the disk."""
        if self.writable:
            self.map.flush()
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Unmap, unless tensors that are views of the file are still in use: then it happens with the last one."""
        with suppress(BufferError):
            self.map.close()


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
    """Create a file of this size with its blocks allocated: a write to a mapped hole on a full disk is fatal."""
    with create_like(path, like) as file:
        file.truncate(size)
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)


class Window(io.RawIOBase):
    """Bytes `start` to `start + length` of a mapped file, to be read, searched and overwritten.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a").write_bytes(b"0123456789")
    ...     window = Window(MappedFile(Path(folder, "a")), 3, 4)
    ...     window.seek(1), window.read()
    (1, b'456')
    """

    def __init__(self, file: MappedFile, start: int, length: int) -> None:
        if start < 0 or length < 0 or start + length > file.size:
            raise CheckpointError(f"{file.path}: bytes {start}…{start + length} lie outside the file ({file.size})")
        self._map, self._start, self._length, self._at = file.map, start, length, 0

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

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer."""
        count = max(0, min(len(buffer), self._length - self._at))
        begin = self._start + self._at
        buffer[:count] = self._map[begin : begin + count]
        self._at += count
        return count

    def write(self, data: Any) -> int:
        """Overwrite; what would go beyond the end is refused."""
        if self._at + len(data) > self._length:
            raise CheckpointError("a write beyond the end of a piece of a file")
        begin = self._start + self._at
        self._map[begin : begin + len(data)] = bytes(data)
        self._at += len(data)
        return len(data)
