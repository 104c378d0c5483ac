"""What a worker does: a run, or many of one setting, row by row, with errors and prints as rows."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.lab.execution.store import Row

if TYPE_CHECKING:
    from rekindle.lab.settings import Run

TARGET = "rekindle.lab.execution.jobs:perform"
LAST = ("end", "failed")


def execute(run: Run, *, starts: Path | None = None) -> Iterator[Row]:
    """Do the run; rows come as they are known: a start, progress, one per task, an end.

    `starts` is a folder where states are kept that other runs, or this one after it was killed, may begin with.

    >>> from rekindle.lab import Arm, Run, Setting
    >>> stream = {"data": "digits", "count": 64, "tasks": 2, "epochs": 1}
    >>> setting = Setting("tiny", "random-labels", "mlp", stream, {"width": 8}, health=False)
    >>> [row["kind"] for row in execute(Run(setting, Arm("fire", "FIRE"), seed=0))]
    ['start', 'task', 'task', 'end']
    """
    from rekindle.lab import settings, train

    if run.setting.source is not None:
        settings.read_source(run.setting.source)  # may register the stream that decides which loop it is
    if run.setting.agents:
        from rekindle.lab.agents import learning

        return learning.execute(run, starts=starts)
    return train.execute(run, starts=starts)


def together(runs: Sequence[Run]) -> dict[str, Any]:
    """The job of many runs of one setting."""
    members = [{"arm": run.arm.to_dict(), "seed": run.seed} for run in runs]
    return {"setting": runs[0].setting.to_dict(), "members": members}


def perform(job: dict[str, Any], starts: Path | None) -> Iterator[Row]:
    """What a worker does with a job: the run in it, row by row; of many runs each row names its own."""
    from rekindle.lab.settings import Run  # torch is loaded when there is work

    if "members" not in job:
        yield from execute(Run.from_dict(job), starts=starts)
        return
    from rekindle.lab import together

    runs = [Run.from_dict({"setting": job["setting"], **member}) for member in job["members"]]
    for identity, row in together.execute(runs, starts=starts):
        yield {"kind": "member", "identity": identity, "row": row}
    yield {"kind": "end"}


def rows_of(target: str, job: dict[str, Any], starts: Path | None) -> Iterator[Row]:
    """The rows of a job up to the one that closes it; an exception is a last row of the kind "failed".

    A target is named by its module and function, so that a worker process can find it. What the run prints comes as
    rows of the kind "printed", a line each.

    >>> [row["kind"] for row in rows_of("rekindle.lab.execution.jobs:missing", {}, None)]
    ['failed']
    """
    printed = Lines()
    try:
        with contextlib.redirect_stdout(printed):
            performed = iter(find(target)(job, starts))
        while True:
            with contextlib.redirect_stdout(printed):
                row = next(performed, None)
            yield from printed.rows()
            if row is None:
                raise RuntimeError(f"{target} stopped without an end row")
            json.dumps(row, allow_nan=False)  # here, so that a row that cannot be kept fails its own run
            yield row
            if row["kind"] in LAST:
                return
    except Exception as error:
        yield from printed.rows()
        trace = "".join(traceback.format_exception(error))[-4000:]
        place = _place(error, job.get("setting", {}).get("source"))
        yield {"kind": "failed", "error": f"{type(error).__name__}: {error}{place}", "traceback": trace}


def _place(error: Exception, source: str | None) -> str:
    """Where in the user's file an error was raised, if it was."""
    if source is None:
        return ""
    file = Path(source).resolve()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f" ({file.name}, line {lines[-1]})" if lines else ""


class Lines(io.TextIOBase):
    """Captures printed text and returns it as rows.

    >>> lines = Lines()
    >>> print("one\\ntwo", file=lines)
    >>> lines.rows()
    [{'kind': 'printed', 'text': 'one'}, {'kind': 'printed', 'text': 'two'}]
    """

    def __init__(self) -> None:
        self._text = ""

    def write(self, text: str) -> int:
        """Buffer it until `rows` is called."""
        self._text += text
        return len(text)

    def rows(self) -> list[Row]:
        """The lines since the last time."""
        text, self._text = self._text, ""
        return [{"kind": "printed", "text": line} for line in text.splitlines() if line.strip()]


def find(target: str) -> Callable[[dict[str, Any], Path | None], Iterable[Row]]:
    """The function that "module:function" names.

    >>> find("rekindle.lab.execution.jobs:perform").__name__
    'perform'
    """
    module, _, name = target.partition(":")
    found: Callable[[dict[str, Any], Path | None], Iterable[Row]] = getattr(importlib.import_module(module), name)
    return found
