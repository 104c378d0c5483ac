"""Doing one run, whatever learns in it: a network (`rekindle.lab.train`) or an agent (`rekindle.lab.agents`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle.lab.runs import Run
from rekindle.lab.settings import read_source


def execute(run: Run, *, starts: Path | None = None) -> Iterator[dict[str, Any]]:
    """Do the run; rows come as they are known: a start, progress, one per task, an end.

    `starts` is a folder where states are kept that other runs, or this one after it was killed, may begin with.

    >>> from rekindle.lab import Arm, Setting
    >>> stream = {"data": "digits", "count": 64, "tasks": 2, "epochs": 1}
    >>> setting = Setting("tiny", "random-labels", "mlp", stream, {"width": 8}, health=False)
    >>> [row["kind"] for row in execute(Run(setting, Arm("fire", "FIRE"), seed=0))]
    ['start', 'task', 'task', 'end']
    """
    if run.setting.source is not None:
        read_source(run.setting.source)  # may register the stream that tells which it is
    if run.setting.agents:
        from rekindle.lab.agents import learning

        return learning.execute(run, starts=starts)
    from rekindle.lab import train

    return train.execute(run, starts=starts)
