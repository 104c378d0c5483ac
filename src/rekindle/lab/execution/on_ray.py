"""Runs on Ray: a Ray of this machine's cores, or a cluster's.

Every run is one Ray task that gives all its rows at its end. Ray runs it again if its worker is lost, and only the
study's own process writes, so results land once however often a run was begun. A small actor reports the progress
meanwhile; if it is lost, only the progress bar is affected.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rekindle import files
from rekindle.extras import install
from rekindle.lab.execution import ONE_THREAD
from rekindle.lab.execution.jobs import LAST, TARGET, rows_of
from rekindle.lab.execution.store import Row

RETRIES = 3


class RayExecutor:
    """Performs runs as Ray tasks.

    address: None starts a local Ray of `workers` cores (this machine's by default) and ends it on close; "auto",
    "host:port" or "ray://host:port" joins one that runs, and leaves it running. Its machines need rekindle; a study's
    own file is sent along.
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        *,
        starts: Path | None = None,
        target: str = TARGET,
    ) -> None:
        ray = _ray()
        self._ray, self.target = ray, target
        self._own = not ray.is_initialized()
        local = address is None
        # Other machines do not see this folder: there every run makes its own start.
        self._starts = str(starts) if starts is not None and local else None
        if self._own:
            _join(ray, address, workers)
        self.slots = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._latest = ray.remote(num_cpus=0, max_restarts=-1)(LatestProgress).remote()
        self._perform = ray.remote(num_cpus=1, max_retries=RETRIES)(perform)
        self._running: dict[Any, str] = {}
        self._asked = 0.0

    def submit(self, identity: str, job: dict[str, Any]) -> None:
        """Begin a run."""
        text = _source(job)
        reference = self._perform.remote(self.target, identity, job, self._starts, self._latest, text)
        self._running[reference] = identity

    def events(self, timeout: float) -> list[tuple[str, Row]]:
        """All rows of the runs that ended, and the progress of the others."""
        ray, out = self._ray, []
        ready: list[Any] = []
        if self._running:
            ready, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout)
        else:
            time.sleep(timeout)
        for reference in ready:
            identity = self._running.pop(reference)
            try:
                rows: list[Row] = ray.get(reference)
            except ray.exceptions.RayError as error:
                rows = [{"kind": "died", "error": f"{type(error).__name__}: {error}"}]
            out += [(identity, row) for row in rows]
        if time.monotonic() - self._asked > 1.0:
            self._asked = time.monotonic()
            out += [(identity, row) for identity, row in self._progress() if identity in self._running.values()]
        return out

    def close(self) -> None:
        """Cancel running tasks; stop Ray if it was started here."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()
        self._ray.kill(self._latest)
        if self._own:
            self._ray.shutdown()
            self._own = False

    def _progress(self) -> list[tuple[str, Row]]:
        try:
            taken: list[tuple[str, Row]] = self._ray.get(self._latest.take.remote(), timeout=5.0)
        except self._ray.exceptions.RayError:
            return []
        return taken


class LatestProgress:
    """The latest progress row of every run, until it is read.

    >>> latest = LatestProgress()
    >>> latest.post("abc", {"kind": "progress", "task": 1}); latest.take(), latest.take()
    ([('abc', {'kind': 'progress', 'task': 1})], [])
    """

    def __init__(self) -> None:
        self._news: dict[str, Row] = {}

    def post(self, identity: str, row: Row) -> None:
        """Store a run's progress, replacing the older one."""
        self._news[identity] = row

    def take(self) -> list[tuple[str, Row]]:
        """Return and clear all progress."""
        news, self._news = self._news, {}
        return list(news.items())


def perform(
    target: str, identity: str, job: dict[str, Any], starts: str | None, latest: Any, text: str | None = None
) -> list[Row]:
    """One run, in a Ray worker. `text` is the user's file, which another machine may not have."""
    import torch

    torch.set_num_threads(1)
    rows: list[Row] = []
    tasks = None
    with tempfile.TemporaryDirectory() as folder:
        job = with_source(job, text, Path(folder))
        for row in rows_of(target, job, None if starts is None else Path(starts)):
            tasks = tasks or row.get("stream", {}).get("tasks")
            if row["kind"] == "progress":
                latest.post.remote(identity, row | {"tasks": tasks})
                continue
            if row.get("row", row)["kind"] == "progress":  # of one among many
                continue
            rows.append(row)
            if row["kind"] not in (*LAST, "printed"):
                done = {"kind": "progress", "task": row.get("task", -1) + 1, "step": 0, "steps": 1, "tasks": tasks}
                latest.post.remote(identity, done)
    return rows


def with_source(job: dict[str, Any], text: str | None, folder: Path) -> dict[str, Any]:
    """The job with the user's file where this machine has it; an identity depends on its content alone.

    >>> with_source({"setting": {"source": None}}, None, Path("x"))
    {'setting': {'source': None}}
    """
    if text is None or Path(job["setting"]["source"]).is_file():
        return job
    path = folder / Path(job["setting"]["source"]).name
    files.write(path, text)
    return job | {"setting": job["setting"] | {"source": str(path)}}


def _join(ray: Any, address: str | None, workers: int | None) -> None:
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        known = {"env_vars": ONE_THREAD | {"PYTHONPATH": _search_path()}}
        ray.init(address="local", num_cpus=workers, include_dashboard=False, runtime_env=known, **quiet)
        return
    try:
        ray.init(address=address, runtime_env={"env_vars": ONE_THREAD}, **quiet)
    except (ConnectionError, RuntimeError) as error:
        raise ConnectionError(
            f"no Ray could be joined at {address!r}: is it running there, and if it asks for a token (Ray does since "
            "2.59), is RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH set here as it is there?"
        ) from error


def _source(job: dict[str, Any]) -> str | None:
    source = job["setting"].get("source")
    return None if source is None else Path(source).read_text(encoding="utf-8")


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"studies on Ray need ray: {install('ray')}") from error
    return ray


def _search_path() -> str:
    """What this process can import, its workers on this machine can: a user's own module, say."""
    return os.pathsep.join(path for path in sys.path if path)
