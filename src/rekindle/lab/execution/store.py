"""Where a study's results are stored: one append-only JSON-lines file per run, and one Parquet table of all runs.

    folder/study.json            what was asked for
    folder/runs/<identity>.jsonl start, task, task, …, end
    folder/table.parquet         one row per task of every finished run that is reported

A run's file is written only by the process that holds its lock (flock, so a killed process releases it), which is how
two studies in one folder never do the same run twice. An interrupted run is repeated from its start: the new rows
follow the old ones in the file, and readers take the last attempt that reached its end. So do results of code that has
changed since: they are made again behind the old ones. `pack` keeps a finished study as one small file.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from rekindle import files

Row: TypeAlias = dict[str, Any]

WRITTEN = frozenset({"start", "task", "end", "failed"})
"""The kinds of rows that go to the file; progress is for watchers."""
_TEXTS, _TABLES = ("kind", "name", "failed"), ("remedy", "health")  # of a task's row; the others are numbers, or None
_INNER = (*_TABLES, "units", "experts", "codes", "latents", "ranks")  # what tables may be called inside these


@dataclass(frozen=True)
class RunRecord:
    """What a run's file says: the rows of the attempt that counts, and how that attempt ended.

    `state` is "new" (nothing usable), "partial" (cut off), "failed" (an exception), "refused" (the arm cannot be
    applied in this setting: a result, not an accident) or "finished".
    """

    state: str
    rows: tuple[Row, ...] = ()

    @property
    def code(self) -> str | None:
        """The version of the code that made it (`Run.code`)."""
        return self.rows[0].get("code") if self.rows else None

    def settles(self, code: str) -> bool:
        """Whether nothing is left to do for a run of this code; what other code finished or refused is done again."""
        return self.state in ("finished", "refused") and self.code == code


def parse(content: bytes) -> tuple[RunRecord, int]:
    """The record in a run's file, and how many bytes of it are whole lines: what follows them is an incomplete line.

    The last attempt that reached its end counts, else the last one. One with a row that no run writes has failed.
    """
    rows: list[Row] | None = None  # of the attempt in progress; None if it cannot be trusted
    ended: RunRecord | None = None
    fault: RunRecord | None = None  # of the last attempt, if a row of it is malformed
    position = good = 0
    for number, line in enumerate(io.BytesIO(content), 1):
        position += len(line)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
            row = None
        if not isinstance(row, dict):
            rows = None
            continue
        good, kind = position, row.get("kind")
        if name := _malformed(row):
            why = f"row {number} of its file is malformed ({name!r}): run it again"
            rows, fault = None, RunRecord("failed", ({"kind": "failed", "error": why},))
            continue
        if kind == "start":
            rows, fault = [row], None
        elif kind == "failed":
            rows = [*(rows or ()), row]  # some fail before they have a start
        elif rows is not None:
            missing = kind == "task" and row.get("task") != sum(each.get("kind") == "task" for each in rows)
            rows = None if missing else [*rows, row]
            if rows is not None and kind == "end":
                ended, rows = RunRecord("refused" if row.get("refused") else "finished", tuple(rows)), None
    if ended is not None or not rows:
        return ended or fault or RunRecord("new"), good
    return RunRecord("failed" if rows[-1].get("kind") == "failed" else "partial", tuple(rows)), good


def _malformed(row: Row) -> str:
    """The first field that is not what a run writes there, "" if all are."""
    kind = row.get("kind")
    if kind not in ("start", "task"):
        return "" if kind in (*WRITTEN, "progress") else "kind"
    if kind == "start":
        name = next((name for name in ("run", "versions", "stream") if not isinstance(row.get(name, {}), dict)), "")
        return name or ("" if _is_number(row.get("stream", {}).get("classes") or 0) else "stream.classes")
    missing = (name for name in ("task", "steps") if row.get(name) is None)
    return next(missing, "") or next((name for name, value in row.items() if not _may_hold(name, value)), "")


def _may_hold(name: str, value: object) -> bool:
    """Whether a task's row may hold this value under this name."""
    if isinstance(value, str):
        return name in _TEXTS
    if isinstance(value, list):
        return name == "curve" and all(
            isinstance(point, list) and len(point) == 3 and all(each is None or _is_number(each) for each in point)
            for point in value
        )
    if isinstance(value, dict):
        return name in _INNER and all(_may_hold(inner, each) for inner, each in value.items())
    return value is None or (name not in (*_TEXTS, *_TABLES, "curve") and _is_number(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


class Claim:
    """The right to write one run's file, held until `release` (or until this process dies).

    Making one repairs the file: an incomplete last line is removed, so that what is appended starts on a new line.
    """

    def __init__(self, path: Path, handle: BinaryIO) -> None:
        self.path, self._handle = path, handle
        handle.seek(0)
        content = handle.read()
        self.record, good = parse(content)
        handle.truncate(good)
        handle.seek(good)
        if good and not content[:good].endswith(b"\n"):
            handle.write(b"\n")
            handle.flush()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row, if it is of a kind that is kept; whole, and on the disk once the run is over."""
        if row.get("kind") not in WRITTEN:
            return
        self._handle.write(json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self._handle.flush()
        if row["kind"] != "task":
            os.fsync(self._handle.fileno())

    def release(self) -> None:
        """Release the lock; safe to call twice."""
        self._handle.close()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class RunStore:
    """The folder of a study."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.runs = self.folder / "runs"
        self.starts = self.folder / "starts"

    def path(self, identity: str) -> Path:
        """The file of one run."""
        if not identity or not identity.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"identity {identity!r} cannot be a file's name: letters, digits, - and _ only")
        return self.runs / f"{identity}.jsonl"

    def claim(self, identity: str) -> Claim | None:
        """The right to write this run's file, or None while another process (or another claim here) has it."""
        path = self.path(identity)
        self.runs.mkdir(parents=True, exist_ok=True)
        handle = files.lock(path)
        return None if handle is None else Claim(path, handle)

    def read(self, identity: str) -> RunRecord:
        """What is known of a run now; a run that is being written reads as partial."""
        try:
            return parse(self.path(identity).read_bytes())[0]
        except FileNotFoundError:
            return RunRecord("new")

    def finished(self) -> set[str]:
        """The runs that reached their end."""
        return {path.stem for path in self.runs.glob("*.jsonl") if self.read(path.stem).state == "finished"}

    def describe(self, content: Mapping[str, Any]) -> None:
        """Write study.json."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write(self.folder / "study.json", json.dumps(content, indent=1, allow_nan=False) + "\n")

    def description(self) -> dict[str, Any]:
        """Read study.json."""
        path = self.folder / "study.json"
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is missing: {self.folder} is not the folder of a study") from None
        except ValueError as error:
            raise ValueError(f"{path} cannot be read ({error}); run the study again to write it anew") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds no study; run the study again to write it anew")
        return content

    def write_table(self, frame: Any) -> Path:
        """Write table.parquet from a data frame."""
        path, buffer = self.folder / "table.parquet", io.BytesIO()
        frame.to_parquet(buffer, index=False)
        files.write(path, buffer.getvalue())
        return path


_LEFT_OUT = ("curve", "seconds", "remedy_seconds")


def pack(store: RunStore, identities: Iterable[str], path: Path) -> int:
    """Write a study's description and these of its runs that ended to a .tar.xz; how many they are.

    For keeping beside the text that cites them: curves and times of tasks are left out, and numbers but the headline
    (which decides between rates) have five digits. The same runs give the same bytes.
    """
    contents = {"study.json": json.dumps(store.description(), indent=1).encode()}
    for identity in identities:
        record = store.read(identity)
        if record.state in ("finished", "refused"):
            headline = record.rows[0]["run"]["setting"]["headline"]
            lines = [json.dumps(_without_curves(row, headline)) + "\n" for row in record.rows]
            contents[f"runs/{identity}.jsonl"] = "".join(lines).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    files.write(path, lzma.compress(buffer.getvalue(), preset=9))
    return len(contents) - 1


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The folder of a packed study, while it is needed; a folder is itself."""
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def _without_curves(row: Row, headline: str) -> Row:
    if row["kind"] != "task":
        return row
    kept = {name: value for name, value in row.items() if name not in _LEFT_OUT}
    return {name: value if name == headline else _five_digits(value) for name, value in kept.items()}


def _five_digits(value: object) -> object:
    if isinstance(value, dict):
        return {name: _five_digits(each) for name, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value
