"""The one error of this package: a line that says which file, what is wrong with it, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST = 600


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, planned or written; its text is one line.

    >>> str(CheckpointError("model.pt: holds no tensors\\n  at all"))
    'model.pt: holds no tensors at all'
    """

    def __init__(self, message: object) -> None:
        line = " ".join(str(message).split())
        super().__init__(line if len(line) <= LONGEST else line[: LONGEST - 1] + "…")


@contextmanager
def clearly(path: Path | str, doing: str = "") -> Iterator[None]:
    """Turn whatever a broken file makes a parser raise into a `CheckpointError` that names the file.

    >>> with clearly("model.bin", "reading it"):
    ...     {}["weight"]
    Traceback (most recent call last):
    rekindle.checkpoint.refusal.CheckpointError: model.bin: reading it failed (KeyError: 'weight')
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
