"""What every file format offers, and the one error of this package.

A part gives names, shapes, one tensor at a time, and a staged copy to write to. A `CheckpointError` is one line that
says which file, what is wrong with it, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

LONGEST = 600
LONGEST_NAME = 1000  # of a tensor; what is found by patterns in longer ones takes too long


_UNSAFE = re.compile(r"[^.;(]*\bweights_only\b[^.;]*[.;]?")


def without_unsafe_advice(text: str) -> str:
    """A message without torch's advice to load with weights_only=False, which runs whatever code the file holds.

    >>> without_unsafe_advice("a.pt: damaged. Re-run with `weights_only=False` only if you trust it. Bad magic.")
    'a.pt: damaged. Bad magic.'
    """
    return _UNSAFE.sub("", text).strip() if "weights_only" in text else text


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, planned or written; its text is one line.

    >>> str(CheckpointError("model.pt: holds no tensors\\n  at all"))
    'model.pt: holds no tensors at all'
    """

    def __init__(self, message: object) -> None:
        line = without_unsafe_advice(" ".join(str(message).split()))
        super().__init__(line if len(line) <= LONGEST else line[: LONGEST - 1] + "…")


class NeedsCodeError(CheckpointError):
    """A pickle that holds more than plain values: reading it could run code, so it is not read."""


@contextmanager
def clearly(path: Path | str, doing: str = "") -> Iterator[None]:
    """Turn whatever a parser raises on a broken file into a `CheckpointError` that names the file.

    >>> with clearly("model.bin", "reading it"):
    ...     {}["weight"]
    Traceback (most recent call last):
    rekindle.checkpoint.parts.CheckpointError: model.bin: reading it failed (KeyError: 'weight')
    """
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename or path}: there is no such file or folder") from error
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise CheckpointError(f"{path}: {doing or 'reading it'} needs more memory than there is") from error
    except Exception as error:  # parsers of hostile bytes raise anything: RecursionError, struct.error, EOFError, …
        what = f"{doing} failed" if doing else "it cannot be read"
        raise CheckpointError(f"{path}: {what} ({type(error).__name__}: {error})") from error


class TensorMeta(NamedTuple):
    """What is known of a tensor without reading it. `bytes` is its size in the file, `shard` the file's name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    shard: str


class FilePart(Protocol):
    """One file (or DCP folder) of tensors.

    `tied` names tensors that are one, `shared` those of which another one has a part of the bytes.
    """

    path: Path
    names: tuple[str, ...]
    metadata: Mapping[str, str]
    tied: Mapping[str, str]
    shared: Mapping[str, str]

    def meta(self, name: str) -> TensorMeta:
        """Shape, dtype, bytes in the file, and the file."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor."""
        ...

    def write(self, name: str, value: Tensor) -> None:
        """Put a tensor into a part that was opened for writing."""
        ...

    def reopened(self, path: Path) -> FilePart:
        """The staged copy of it at `path`, to be written."""
        ...

    def files(self) -> tuple[Path, ...]:
        """Every file that it consists of."""
        ...

    def optimizers(self) -> list[Any]:
        """The optimizer state dicts inside."""
        ...

    def others(self) -> list[str]:
        """Where else it holds floating-point numbers, which stay as they are."""
        ...

    def staged_size(self, dtype: torch.dtype | None) -> int:
        """Bytes that `stage` will write."""
        ...

    def stage(self, target: Path, changed: frozenset[str], dtype: torch.dtype | None) -> None:
        """Make a copy at `target` in which the tensors `changed` need not be filled yet.

        With a dtype, every floating tensor is stored in it.
        """
        ...

    def finish(self, provenance: Mapping[str, Any], metadata: Mapping[str, str], changed: Collection[str]) -> None:
        """Finish a staged part after the tensors `changed` were written: checksums, provenance after the source's."""
        ...

    def sync(self) -> None:
        """Flush everything to the disk."""
        ...


def stored_as(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype a tensor gets: floating ones the wanted one, integers and 8-bit floats stay.

    >>> stored_as(torch.bfloat16, torch.float32), stored_as(torch.int64, torch.float32)
    (torch.float32, torch.int64)
    """
    plain = dtype.is_floating_point and dtype.itemsize > 1
    return wanted if wanted is not None and plain else dtype
