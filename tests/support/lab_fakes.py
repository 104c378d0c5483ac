"""Quick stand-ins for a run, found by name in worker processes: they yield the rows of a small made-up training.

A job is `Run.to_dict()`. What a fake does beyond that is said by the arm's options, so that it is part of the run:
`sleep` (seconds a task), `kill` (its own process, in the middle, the first time: a marker file remembers), `fail`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TASKS = 4


def quick(job: dict[str, Any], starts: Path | None) -> Iterator[dict[str, Any]]:
    if job.get("threads"):
        yield from threads(job, starts)
        return
    arm, seed, options = job["arm"]["name"], job["seed"], job["arm"]["options"]
    log = options.get("log")
    if log:  # one line a begun run; appending so little is atomic
        with open(log, "a", encoding="utf-8") as handle:
            handle.write(f"begun {job['setting']['name']} {arm} {seed} {os.getpid()}\n")
    yield {"kind": "start", "identity": "", "run": job, "versions": {}, "stream": {"tasks": TASKS, "classes": 10}}
    draw = random.Random(f"{job['setting']['name']} {arm} {seed} {job['arm']['lr']}")
    level = {"nothing": 0.2, "fire": 0.8}.get(arm, 0.5) * (job["arm"]["lr"] or 1.0)
    for task in range(TASKS):
        yield {"kind": "progress", "task": task, "step": 1, "steps": 2}
        # What a test adds to one process only cannot be an option: it would make another run.
        time.sleep(options.get("sleep", 0.0) + (arm == "fire") * float(os.environ.get("FAKE_FIRE_SLEEP", 0.0)))
        if task == 2:
            _misbehave(options)
        yield row(task, 0.9 if task == 0 else level + 0.05 * draw.random(), remedy=task > 0 and arm != "nothing")
    if log:
        with open(log, "a", encoding="utf-8") as handle:
            handle.write(f"ended {job['setting']['name']} {arm} {seed} {os.getpid()}\n")
    yield {"kind": "end", "seconds": 0.1 + options.get("sleep", 0.0) * TASKS}


def _misbehave(options: dict[str, Any]) -> None:
    if "fail" in options:
        raise RuntimeError(options["fail"])
    marker = options.get("kill")
    if marker == "always" or (marker and not Path(marker).exists()):
        if marker != "always":
            Path(marker).write_text(str(os.getpid()), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)


def row(task: int, accuracy: float, remedy: bool) -> dict[str, Any]:
    """A task's row, every field filled."""
    loss = 2.0 * (1.0 - accuracy)
    return {
        "kind": "task",
        "task": task,
        "name": f"task {task}",
        "steps": 10,
        "online_accuracy": accuracy,
        "online_loss": loss,
        "train_accuracy": accuracy,
        "train_loss": loss,
        "test_accuracy": accuracy,
        "test_loss": loss,
        "curve": [[5, accuracy / 2, loss * 2], [10, accuracy, loss]],
        "seconds": 0.1,
        "remedy_seconds": 0.01 if remedy else 0.0,
        "remedy": {
            "seconds": 0.01,
            "changed": 3,
            "accuracy_before": 0.8,
            "accuracy_after": 0.6,
            "loss_before": 0.4,
            "loss_after": 0.8,
            "old_accuracy_before": 0.7 if task > 1 else None,
            "old_accuracy_after": 0.5 if task > 1 else None,
            "old_loss_before": 0.6 if task > 1 else None,
            "old_loss_after": 1.0 if task > 1 else None,
            "function_drift": 0.25,
        }
        if remedy
        else None,
        "old_accuracy": 0.4 if task else None,
        "old_loss": 1.2 if task else None,
        "old_accuracy_start": 0.5 if task else None,
        "old_loss_start": 1.0 if task else None,
        "diverged": False,
        "health": {"dormant": 0.1 * task, "effective_rank": 0.5, "dfi": 0.2, "norm": 3.0},
    }


def silent(job: dict[str, Any], starts: Path | None) -> Iterator[dict[str, Any]]:
    """Stops without an end."""
    yield {"kind": "start", "run": job}


def unwritable(job: dict[str, Any], starts: Path | None) -> Iterator[dict[str, Any]]:
    """A number that JSON has no word for."""
    yield {"kind": "start", "run": job}
    yield {"kind": "task", "task": 0, "test_loss": float("nan")}


def refused(job: dict[str, Any], starts: Path | None) -> Iterator[dict[str, Any]]:
    """Cannot be applied."""
    yield {"kind": "start", "run": job}
    yield {"kind": "end", "refused": "there is no attention here", "seconds": 0.0}


def threads(job: dict[str, Any], starts: Path | None) -> Iterator[dict[str, Any]]:
    """Tells how many threads torch may use."""
    import torch

    print("this is printed by a run")
    yield {"kind": "start", "run": job}
    yield {"kind": "task", "task": 0, "threads": torch.get_num_threads(), "env": os.environ["OMP_NUM_THREADS"]}
    yield {"kind": "end", "seconds": 0.0}


class Inline:
    """Performs runs in this process, one at a time, when asked for events."""

    slots = 1

    def __init__(self, target: str = "lab_fakes:quick") -> None:
        self.target, self.performed = target, 0
        self._waiting: list[tuple[str, dict[str, Any]]] = []

    def submit(self, identity: str, job: dict[str, Any]) -> None:
        self._waiting.append((identity, job))

    def events(self, timeout: float) -> list[tuple[str, dict[str, Any]]]:
        from rekindle.lab.execution.workers import rows_of

        identity, job = self._waiting.pop(0)
        self.performed += 1
        return [(identity, each) for each in rows_of(self.target, job, None)]

    def close(self) -> None:
        raise AssertionError("an executor that was given is the caller's")
