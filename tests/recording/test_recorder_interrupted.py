"""An error or Ctrl-C at any line of a recording leaves no hook on all modules and no dispatch mode behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import faults
from rekindle.recording import record
from rekindle.recording.ancestry import Sight
from rekindle.recording.recorder import Recorder
from rekindle.recording.sights import Sightings

NET = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
X = torch.ones(4, 2)


def around(made: Callable[[], Any]) -> Callable[[], Any]:
    """A pass inside what `made` makes."""

    def run() -> None:
        with made():
            NET(X).sum().backward()

    return run


CASES: dict[str, Callable[[], Any]] = {
    "record": lambda: record(NET, X),
    "recorder": around(lambda: Recorder(NET)),
    "sightings": around(lambda: Sightings(NET, {Sight("0", "addmm", 0, -1): list})),
}


@pytest.mark.parametrize("name", CASES)
def test_no_line_of_a_recording_leaves_a_hook(name: str) -> None:
    before = faults.global_hooks()
    total, raised = faults.lines(CASES[name]), 0
    for at in range(1, total + 1, 7 if name == "record" else 1):
        error = faults.interrupted(CASES[name], at, KeyboardInterrupt if at % 2 else faults.Fault)
        raised += error is not None
        assert faults.global_hooks() == before, f"line {at} of {total}: {error}"
    assert raised > 50
