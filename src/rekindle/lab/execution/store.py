"""Where a study's results are stored: one append-only JSON-lines file per run, and one Parquet table of all runs.

    folder/study.json            what was asked for
    folder/runs/<identity>.jsonl start, task, task, …, end
    folder/table.parquet         one row per task of every finished run

A run's file is written only by the process that holds its lock (flock, so a killed process releases it), which is how
two studies in one folder never do the same run twice. An interrupted run is repeated from its start: the new rows
follow the old ones in the file, and readers take the last attempt that reached its end. So do results of code that has
changed since: they are made again behind the old ones.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeAlias

from rekindle import files
from rekindle.extras import install

Row: TypeAlias = dict[str, Any]

WRITTEN = frozenset({"start", "task", "end", "failed"})
"""The kinds of rows that go to the file; progress is for watchers."""


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
        """The hash of the code that made it (`Run.code`); None if it was made by a version that did not write it."""
        return self.rows[0].get("code") if self.rows else None

    def settles(self, code: str) -> bool:
        """Whether nothing is left to do for a run of this code.

        What other code finished or refused is done again. What was finished before the code was recorded is kept: it
        cannot be judged, and is shown as such.

        >>> old = RunRecord("finished", ({"kind": "start"},))
        >>> new = RunRecord("refused", ({"kind": "start", "code": "a"},))
        >>> old.settles("b"), new.settles("a"), new.settles("b"), RunRecord("failed").settles("a")
        (True, True, False, False)
        """
        if self.state == "finished":
            return self.code in (None, code)
        return self.state == "refused" and self.code == code


def parse(content: bytes) -> tuple[RunRecord, int]:
    """The record in a run's file, and how many bytes of it are whole lines: what follows them is an incomplete line.

    The last attempt that reached its end counts, else the last one.

    >>> record, good = parse(b'{"kind":"start"}\\n{"kind":"end","seconds":1}\\n{"kind":"ta')
    >>> record.state, good
    ('finished', 44)
    """
    rows: list[Row] | None = None  # of the attempt in progress; None if it cannot be trusted
    ended: RunRecord | None = None
    position = good = 0
    for line in io.BytesIO(content):
        position += len(line)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
            row = None
        if not isinstance(row, dict):
            rows = None
            continue
        good, kind = position, row.get("kind")
        if kind == "start":
            rows = [row]
        elif kind == "failed":
            rows = [*(rows or ()), row]  # some fail before they have a start
        elif rows is not None:
            missing = kind == "task" and row.get("task") != sum(each.get("kind") == "task" for each in rows)
            rows = None if missing else [*rows, row]
            if rows is not None and kind == "end":
                ended, rows = RunRecord("refused" if row.get("refused") else "finished", tuple(rows)), None
    if ended is not None or not rows:
        return ended or RunRecord("new"), good
    return RunRecord("failed" if rows[-1].get("kind") == "failed" else "partial", tuple(rows)), good


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class RunStore:
    """The folder of a study.

    >>> import tempfile
    >>> store = RunStore(Path(tempfile.mkdtemp()))
    >>> with store.claim("abc") as claim:
    ...     for row in ({"kind": "start"}, {"kind": "task", "task": 0}, {"kind": "end"}):
    ...         claim.append(row)
    >>> store.read("abc").state, sorted(store.finished())
    ('finished', ['abc'])
    """

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

    def identities(self) -> list[str]:
        """Every run that has a file, in order of name."""
        return sorted(path.stem for path in self.runs.glob("*.jsonl"))

    def finished(self) -> set[str]:
        """The runs that reached their end."""
        return {identity for identity in self.identities() if self.read(identity).state == "finished"}

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

    def write_table(self) -> Path:
        """Write table.parquet: every task of every finished run, sorted by setting, arm, seed, identity and task."""
        path = self.folder / "table.parquet"
        buffer = io.BytesIO()
        frame(self.records()).to_parquet(buffer, index=False)
        files.write(path, buffer.getvalue())
        return path

    def records(self) -> Iterator[tuple[str, RunRecord]]:
        """Every finished run with its rows."""
        for identity in self.identities():
            record = self.read(identity)
            if record.state == "finished":
                yield identity, record


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A row without nesting: groups become dotted names, lists JSON text, and what was not measured is left out.

    >>> flat({"task": 0, "remedy": {"seconds": 1.0}, "health": None, "curve": [[1, 0.5]]})
    {'task': 0, 'remedy.seconds': 1.0, 'curve': '[[1, 0.5]]'}
    """
    out: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            out.update(flat(value, f"{prefix}{name}."))
        elif isinstance(value, list | tuple):
            out[prefix + name] = json.dumps(value)
        elif value is not None:
            out[prefix + name] = value
    return out


def _described(identity: str, record: RunRecord) -> dict[str, Any]:
    run = record.rows[0].get("run", {})
    arm = run.get("arm", {})
    return {
        "setting": run.get("setting", {}).get("name"),
        "arm": arm.get("name"),
        "seed": run.get("seed"),
        "identity": identity,
        "arm_lr": None if arm.get("lr") is None else float(arm["lr"]),
        "arm_options": json.dumps(arm.get("options") or {}, sort_keys=True),
    }


FIRST_COLUMNS = ("setting", "arm", "seed", "identity", "arm_lr", "arm_options", "task", "name")


def frame(records: Iterable[tuple[str, RunRecord]]) -> Any:
    """A pandas DataFrame with one row per task; the same whatever the order of the records.

    >>> start = {"kind": "start", "run": {"setting": {"name": "digits"}, "arm": {"name": "fire"}, "seed": 0}}
    >>> table = frame([("abc", RunRecord("finished", (start, {"kind": "task", "task": 0, "test_loss": 0.5})))])
    >>> table[["setting", "arm", "seed", "task", "test_loss"]].values.tolist()
    [['digits', 'fire', 0, 0, 0.5]]
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError(f"the table of a study needs pandas and pyarrow: {install('lab')}") from error
    lines: list[dict[str, Any]] = []
    for identity, record in records:
        try:
            head = _described(identity, record)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"the run {identity} is malformed and left out ({reason})", stacklevel=2)
            continue
        lines += [head | flat(row) for row in record.rows if row.get("kind") == "task"]
    columns = [*FIRST_COLUMNS, *sorted({name for line in lines for name in line} - {*FIRST_COLUMNS, "kind"})]
    table = pandas.DataFrame(lines, columns=columns)
    table["arm_lr"] = table["arm_lr"].astype("float64")
    return table.sort_values(["setting", "arm", "seed", "identity", "task"], kind="stable", ignore_index=True)
