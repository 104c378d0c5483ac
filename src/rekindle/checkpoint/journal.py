"""What a job has finished, line by line, so that `resume` continues where a crash stopped it.

The first line identifies the job: source files, plan, settings, version. Each further line is one finished batch with
its records; a batch is recorded only after its bytes were flushed to the disk. An incomplete last line is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

from rekindle.checkpoint.opening import Checkpoint
from rekindle.checkpoint.parts import CheckpointError
from rekindle.files import State, state_of
from rekindle.projection.receipt import BlockRecord, Receipt

_SAMPLE = 1 << 16
_FIELDS = tuple(field.name for field in fields(BlockRecord))


class Journal:
    """The journal of one job, in a file that is open and locked.

    >>> import tempfile
    >>> with tempfile.TemporaryFile("w+b") as file:
    ...     journal = Journal.start(file, "fire", "old.pt")
    ...     journal.add(0, Receipt("fire", (BlockRecord("a.weight", out=2, in_=2),)))
    ...     found = Journal.resume(file, "fire", "old.pt")
    ...     list(found.done), Journal.resume(file, "another job", "old.pt") is None
    ([0], True)
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.done: dict[int, Receipt] = {}
        self.staged, self.finished = False, False
        self._inodes: dict[str, int] = {}

    @classmethod
    def start(cls, file: BinaryIO, work: str, source: str) -> Journal:
        """Begin anew: `work` is everything that decides the result but the source."""
        file.truncate(0)
        journal = cls(file)
        journal._append({"job": work, "source": source})
        return journal

    @classmethod
    def resume(cls, file: BinaryIO, work: str, source: str | None) -> Journal | None:
        """The journal of the same job, or None if there is none; with no source, of the same work on any."""
        found = list(lines(file))
        if not found or found[0].get("job") != work or source not in (None, found[0].get("source")):
            return None
        journal = cls(file)
        try:
            journal.done = {line["batch"]: _receipt(line) for line in found if "batch" in line}
        except (KeyError, TypeError):
            return None
        journal.staged = any("staged" in line for line in found)
        for line in found:
            if "finished" in line:
                journal.finished, journal._inodes = True, line["finished"]
        return journal

    def mark_staged(self) -> None:
        """Everything but the tensors to be changed is in place."""
        self.staged = True
        self._append({"staged": True})

    def mark_finished(self, partial: Path, names: Iterable[str], new: Iterable[str]) -> None:
        """Everything is in place and on the disk; only the renaming is left.

        The inodes show later which names the result has. `new` are names that nothing had before.
        """
        self.finished, self._inodes = True, {name: (partial / name).lstat().st_ino for name in names}
        self._append({"finished": self._inodes, "new": list(new)})

    def published(self, target: Path) -> bool:
        """Whether the finished result has its final names already."""
        states = {name: state_of(target / name) for name in self._inodes}
        return self.finished and all(
            state is not None and state.inode == self._inodes[name] for name, state in states.items()
        )

    def add(self, batch: int, receipt: Receipt) -> None:
        """One batch is on the disk."""
        self.done[batch] = receipt
        records = [record.to_dict() for record in receipt.records]
        line = {"batch": batch, "records": records, "skipped": dict(receipt.skipped), "notes": list(receipt.notes)}
        self._append(line)

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def identify(files: Iterable[Path], *parts: object) -> str:
    """Files (size, time, first and last bytes), and everything else that decides a result.

    >>> identify([], {"scale": "paper"}) == identify([], {"scale": "nearest"})
    False
    """
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            digest.update(f"{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
            digest.update(file.read(_SAMPLE))
            file.seek(max(0, state.st_size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    digest.update(json.dumps(parts, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def states_below(path: Path) -> dict[Path, State | None]:
    """The states of a file, or of what is directly in a folder, links followed."""
    inside = [*path.iterdir()] if path.is_dir() else [path]
    return {file: state_of(file.resolve()) for file in inside}


def check_unchanged(source: Checkpoint, before: Mapping[Path, State | None], origin: str) -> None:
    """Refuse to publish what was made of files that are no longer what they were when the job began to read them."""
    listing = source.weights.listing if source.weights is not None else None
    beside = [path for path in (listing, source.path / "config.json") if path is not None and path in before]
    for path in (*source.files(), *beside):
        if state_of(path.resolve()) != before.get(path):
            raise CheckpointError(f"{path}: changed while it was read; nothing was written: try again")
    if identify(source.files()) != origin:
        raise CheckpointError(f"{source.path}: changed while it was read; nothing was written: try again")


def lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal, up to the first that cannot be read."""
    file.seek(0)
    for text in file.read().split(b"\n")[:-1]:
        try:
            line = json.loads(text)
        except ValueError:
            return
        if not isinstance(line, dict):
            return
        yield line


def _receipt(line: Mapping[str, Any]) -> Receipt:
    records = tuple(BlockRecord(**{key: row[key] for key in _FIELDS}) for row in line["records"])
    return Receipt("fire", records, line["skipped"], notes=tuple(line["notes"]))
