"""Runs on this machine: as many worker processes as cores, one torch thread each.

A worker is a fresh Python. Jobs come as JSON lines on its standard input, rows leave as JSON lines on a pipe of their
own; nothing else is shared, so a worker may die at any moment and only its own run is lost. When its input ends, the
study is over or dead, and the worker ends at once, even in the middle of a run: no orphans.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import IO, Any

from rekindle.lab.execution import ONE_THREAD
from rekindle.lab.execution.jobs import LAST, TARGET, rows_of
from rekindle.lab.execution.store import Row

_WORKER = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the study decides what ends
sys.path[:] = json.loads(sys.argv[2])
from rekindle.lab.execution.local import work
work(int(sys.argv[1]))
"""


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
        worker = self._idle.popleft() if self._idle else self._start()
        self._busy[identity] = worker
        worker.identity = identity
        worker.give({"identity": identity, "job": job})

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

    def _start(self) -> _Worker:
        worker = _Worker(self.target, self._starts)
        self._selector.register(worker.rows, selectors.EVENT_READ, worker)
        return worker


class _Worker:
    """The study's end of a worker process."""

    def __init__(self, target: str, starts: Path | None) -> None:
        rows, theirs = os.pipe()
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
        os.set_blocking(rows, False)
        self.rows, self._partial = rows, b""
        self.identity: str | None = None
        self.give({"target": target, "starts": None if starts is None else str(starts)})

    def give(self, message: dict[str, Any]) -> None:
        stdin: IO[bytes] | None = self.process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a worker that has died is noticed when its rows are read
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()

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
    """How many cores this process may use.

    >>> cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    import torch

    torch.set_num_threads(1)
    with os.fdopen(pipe, "wb") as out:
        while True:
            message = jobs.get()
            for row in rows_of(about["target"], message["job"], starts):
                out.write(json.dumps(row).encode() + b"\n")
                out.flush()
