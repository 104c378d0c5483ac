"""A piece of a mapped file that behaves like a file of its own."""

from __future__ import annotations

import io
from typing import Any

from rekindle.checkpoint.mapping import MappedFile
from rekindle.checkpoint.refusal import CheckpointError


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
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
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
