"""What a worker does, and where workers are: processes of this machine, as many as cores, or a Ray cluster.

A worker performs a run, or many of one setting, row by row, with errors and prints as rows. It is a fresh Python. Jobs
come as JSON lines on its standard input, rows leave as JSON lines on a pipe of their own; nothing else is shared, so a
worker may die at any moment and only its own run is lost. When its input ends, the study is over or dead, and the
worker ends at once, even in the middle of a run: no orphans. `RayExecutor` does the same on Ray.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle import files
from rekindle.extras import require
from rekindle.lab.execution.store import Row

if TYPE_CHECKING:
    from rekindle.lab.settings import Run

_RETRIES = 3  # of Ray
TARGET = "rekindle.lab.execution.workers:perform"
LAST = ("end", "failed")
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
) | {"OMP_WAIT_POLICY": "PASSIVE"}
"""Two threads per run on a shared core make a step 10 to 100 times slower (measured); set before torch is loaded."""

_WORKER = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the study decides what ends
sys.path[:] = json.loads(sys.argv[2])
from rekindle.lab.execution.workers import work
work(int(sys.argv[1]))
"""


def execute(run: Run, *, starts: Path | None = None) -> Iterator[Row]:
    """Do the run; rows come as they are known: a start, progress, one per task, an end.

    >>> from rekindle.lab import Arm, Run, Setting
    >>> stream = {"data": "digits", "count": 64, "tasks": 2, "epochs": 1}
    >>> setting = Setting("tiny", "random-labels", "mlp", stream, {"width": 8}, health=False)
    >>> [row["kind"] for row in execute(Run(setting, Arm("fire", "FIRE"), seed=0))]
    ['start', 'task', 'task', 'end']

    Args:
        run: One arm in one setting with one seed.
        starts: A folder for states that other runs, or this one after it was killed, may begin with.
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
    """
    printed = io.StringIO()

    def lines() -> Iterator[Row]:
        text = printed.getvalue()
        printed.seek(printed.truncate(0))
        yield from ({"kind": "printed", "text": line} for line in text.splitlines() if line.strip())

    try:
        with contextlib.redirect_stdout(printed):
            performed = iter(_find(target)(job, starts))
        while True:
            with contextlib.redirect_stdout(printed):
                row = next(performed, None)
            yield from lines()
            if row is None:
                raise RuntimeError(f"{target} stopped without an end row")
            json.dumps(row, allow_nan=False)  # here, so that a row that cannot be kept fails its own run
            yield row
            if row["kind"] in LAST:
                return
    except Exception as error:
        yield from lines()
        trace = "".join(traceback.format_exception(error))[-4000:]
        place = _line_of(error, job.get("setting", {}).get("source"))
        yield {"kind": "failed", "error": f"{type(error).__name__}: {error}{place}", "traceback": trace}


def _line_of(error: Exception, source: str | None) -> str:
    """Where in the user's file an error was raised, if it was."""
    file = Path(source or "").resolve()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f" ({file.name}, line {lines[-1]})" if lines else ""


def _find(target: str) -> Callable[[dict[str, Any], Path | None], Iterable[Row]]:
    """The function that "module:function" names."""
    module, _, name = target.partition(":")
    found: Callable[[dict[str, Any], Path | None], Iterable[Row]] = getattr(importlib.import_module(module), name)
    return found


def work(pipe: int) -> None:
    """The worker's side: do what comes in, until the input ends."""
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            jobs.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    about = jobs.get()
    starts = None if about["starts"] is None else Path(about["starts"])
    with os.fdopen(pipe, "wb") as out:
        while True:
            for row in rows_of(about["target"], jobs.get(), starts):
                out.write(json.dumps(row).encode() + b"\n")
                out.flush()


class Pool:
    """Worker processes of this machine, started when they are first needed."""

    def __init__(self, workers: int | None = None, *, starts: Path | None = None, target: str = TARGET) -> None:
        self.slots = cores() if workers is None else workers
        if self.slots < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if os.name == "nt":  # pipes are not passed on to children there, nor waited for together
            raise RuntimeError("the laboratory's worker processes need Linux or macOS: on Windows run it in WSL")
        self._starts, self.target = starts, target
        self._idle: deque[_Worker] = deque()
        self._busy: dict[str, _Worker] = {}
        self._selector = selectors.DefaultSelector()

    def submit(self, identity: str, job: dict[str, Any]) -> None:
        """Give the run to an idle worker, or to a new one."""
        if not self._idle:
            worker = _Worker(self.target, self._starts)
            self._selector.register(worker.rows, selectors.EVENT_READ, worker)
            self._idle.append(worker)
        worker = self._busy[identity] = self._idle.popleft()
        worker.identity = identity
        worker.give(job)

    def events(self, timeout: float) -> list[tuple[str, Row]]:
        """Rows of all workers; a worker whose pipe has closed is dead, and its run is reported as "died"."""
        out: list[tuple[str, Row]] = []
        for key, _ in self._selector.select(timeout):
            worker: _Worker = key.data
            rows = worker.read()
            for row in rows or ():
                if worker.identity is not None:
                    out.append((worker.identity, row))
                    if row["kind"] in LAST:
                        del self._busy[worker.identity]
                        worker.identity = None
                        self._idle.append(worker)
            if rows is None:
                self._selector.unregister(worker.rows)
                if worker.identity is not None:
                    del self._busy[worker.identity]
                    out.append((worker.identity, {"kind": "died", "error": worker.last_words()}))
                else:
                    self._idle.remove(worker)
                worker.end()
        return out

    def close(self) -> None:
        """Kill the workers and wait for them; safe to call twice."""
        for worker in [*self._idle, *self._busy.values()]:
            worker.end()
        self._idle.clear()
        self._busy.clear()
        self._selector.close()

    def processes(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.process.pid for worker in [*self._idle, *self._busy.values()]]


class _Worker:
    """The study's end of a worker process."""

    def __init__(self, target: str, starts: Path | None) -> None:
        self.rows, theirs = os.pipe()
        # What the worker prints is captured: on the screen it would break the live table.
        self._prints = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(theirs), json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=self._prints,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            env=os.environ | ONE_THREAD,
        )
        os.close(theirs)
        os.set_blocking(self.rows, False)
        self._partial = b""
        self.identity: str | None = None
        self.give({"target": target, "starts": None if starts is None else str(starts)})

    def give(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a worker that has died is noticed when its rows are read
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[Row] | None:
        """The whole rows that have come in; None once the worker is gone and all its rows are read."""
        content = b""
        with contextlib.suppress(BlockingIOError):
            content = os.read(self.rows, 1 << 20)
            if not content:
                return None
        *lines, self._partial = (self._partial + content).split(b"\n")
        return [json.loads(line) for line in lines]

    def last_words(self) -> str:
        code = self.process.wait()
        self._prints.seek(max(0, self._prints.seek(0, os.SEEK_END) - 2000))
        printed = self._prints.read().decode(errors="replace").strip()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the worker process {how}" + (f" after printing:\n{printed}" if printed else "")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self._prints.close()
        with contextlib.suppress(OSError):
            os.close(self.rows)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# On Ray every run is one task that gives all its rows at its end. Ray runs it again if its worker is lost, and only
# the study's own process writes, so results land once however often a run was begun.


class RayExecutor:
    """Performs runs as Ray tasks.

    Args:
        address: None starts a local Ray of `workers` cores (this machine's by default) and ends it on close; "auto",
            "host:port" or "ray://host:port" joins one that runs, and leaves it running. Its machines need rekindle; a
            study's own file is sent along.
        workers: How many runs at once.
        starts: A folder for states after first tasks; other machines do not see it and make their own.
        target: What performs a run.
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        *,
        starts: Path | None = None,
        target: str = TARGET,
    ) -> None:
        self._ray: Any = require("ray", "ray", "a study on Ray")
        self.target = target
        self._own = not self._ray.is_initialized()
        self._starts = str(starts) if starts is not None and address is None else None
        if self._own:
            self._connect(address, workers)
        self.slots = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._perform = self._ray.remote(num_cpus=1, max_retries=_RETRIES)(perform_on_ray)
        self._running: dict[Any, str] = {}

    def submit(self, identity: str, job: dict[str, Any]) -> None:
        """Begin a run."""
        source = job["setting"].get("source")
        text = None if source is None else Path(source).read_text(encoding="utf-8")
        self._running[self._perform.remote(self.target, job, self._starts, text)] = identity

    def events(self, timeout: float) -> list[tuple[str, Row]]:
        """All rows of the runs that ended."""
        if not self._running:
            time.sleep(timeout)
            return []
        out: list[tuple[str, Row]] = []
        for reference in self._ray.wait(list(self._running), num_returns=1, timeout=timeout)[0]:
            identity = self._running.pop(reference)
            try:
                rows: list[Row] = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                rows = [{"kind": "died", "error": f"{type(error).__name__}: {error}"}]
            out += [(identity, row) for row in rows]
        return out

    def close(self) -> None:
        """Cancel running tasks; stop Ray if it was started here."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()
        if self._own:
            self._ray.shutdown()
            self._own = False

    def _connect(self, address: str | None, workers: int | None) -> None:
        quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if address is None:
            # What this process can import, its workers on this machine can: a user's own module, say.
            variables = ONE_THREAD | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            self._ray.init(
                address="local", num_cpus=workers, include_dashboard=False, runtime_env={"env_vars": variables}, **quiet
            )
            return
        try:
            self._ray.init(address=address, runtime_env={"env_vars": ONE_THREAD}, **quiet)
        except (ConnectionError, RuntimeError) as error:
            raise ConnectionError(
                f"no Ray could be joined at {address!r}: is it running there, and if it asks for a token (Ray does "
                "since 2.59), is RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH set here as it is there?"
            ) from error


def perform_on_ray(target: str, job: dict[str, Any], starts: str | None, text: str | None = None) -> list[Row]:
    """One run, in a Ray worker. `text` is the user's file, which another machine may not have."""
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(target, with_source(job, text, Path(folder)), None if starts is None else Path(starts))
        return [row for row in rows if row.get("row", row)["kind"] != "progress"]


def with_source(job: dict[str, Any], text: str | None, folder: Path) -> dict[str, Any]:
    """The job with the user's file where this machine has it; an identity depends on its content alone."""
    if text is None or Path(job["setting"]["source"]).is_file():
        return job
    path = folder / Path(job["setting"]["source"]).name
    files.write(path, text)
    return job | {"setting": job["setting"] | {"source": str(path)}}
