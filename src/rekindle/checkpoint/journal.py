"""What a job has finished, line by line, so that `resume` continues where a crash stopped it.

The first line identifies the job: source files, plan, settings, version. Each further line is one finished batch with
its records; a batch is recorded only after its bytes were flushed to the disk. An incomplete last line is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rekindle.projection.receipt import BlockRecord, Receipt

_SAMPLE = 1 << 16
_FIELDS = tuple(field.name for field in fields(BlockRecord))


class Journal:
    """The open journal of one job.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "journal")
    ...     journal = Journal.start(path, "job 1")
    ...     journal.add(0, Receipt("fire", (BlockRecord("a.weight", out=2, in_=2),)))
    ...     list(Journal.resume(path, "job 1").done), Journal.resume(path, "job 2") is None
    ([0], True)
    """

    def __init__(self, path: Path, done: dict[int, Receipt], staged: bool, finished: int | None) -> None:
        self.path, self.done, self.staged, self.finished = path, done, staged, finished

    @classmethod
    def start(cls, path: Path, job: str) -> Journal:
        """Begin anew."""
        with path.open("r+b" if path.exists() else "w+b") as file:  # the lock is on this very file
            file.truncate(0)
        journal = cls(path, {}, False, None)
        journal._append({"job": job})
        return journal

    @classmethod
    def resume(cls, path: Path, job: str) -> Journal | None:
        """The journal of the same job, or None if there is none."""
        lines = list(_lines(path))
        if not lines or lines[0].get("job") != job:
            return None
        done = {line["batch"]: _receipt(line) for line in lines if "batch" in line}
        finished = next((line["finished"] for line in lines if "finished" in line), None)
        return cls(path, done, any("staged" in line for line in lines), finished)

    def mark_staged(self) -> None:
        """Everything but the tensors to be changed is in place."""
        self.staged = True
        self._append({"staged": True})

    def mark_finished(self, partial: Path) -> None:
        """Everything is in place and on the disk; only the renaming is left.

        The inode shows later which name the result has: an exchange gives the partial's name to the old output.
        """
        self.finished = partial.stat().st_ino
        self._append({"finished": self.finished})

    def published(self, target: Path) -> bool:
        """Whether the finished result has its final name already."""
        return self.finished is not None and target.exists() and target.stat().st_ino == self.finished

    def add(self, batch: int, receipt: Receipt) -> None:
        """One batch is on the disk."""
        self.done[batch] = receipt
        records = [record.to_dict() for record in receipt.records]
        line = {"batch": batch, "records": records, "skipped": dict(receipt.skipped), "notes": list(receipt.notes)}
        self._append(line)

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def identify(files: Iterable[Path], *parts: Any) -> str:
    """What a job is: its source files (size, time, first and last bytes), and everything that decides the result.

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


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    if not path.is_file():
        return
    for text in path.read_bytes().split(b"\n")[:-1]:
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
