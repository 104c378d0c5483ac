"""A process that is killed in the middle of training, and another that goes on from its checkpoint."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import rekindle
from integrations import killed_worker
from integrations.trained import adam, batches, loop, network, same


@pytest.mark.parametrize("kind", ["transformers", "lightning", "ignite"])
def test_fired_at_a_boundary_killed_and_resumed_it_ends_like_a_plain_loop(kind: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = [sys.executable, "-W", "ignore", killed_worker.__file__, kind, str(tmp_path)]
    died = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=300)
    assert died.returncode == -signal.SIGKILL, died.stderr[-3000:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again, callback = killed_worker.run(kind, tmp_path, resume=True)
        whole, _ = killed_worker.run(kind, tmp_path / "whole")
    expected = network()
    optimizer = adam(expected)

    def between(step: int) -> None:
        if step in killed_worker.BOUNDARIES:
            rekindle.fire(expected, optimizer)

    loop(expected, optimizer, batches(4) * 2, between)
    assert same(again, whole) and same(again, expected)
    assert [firing.step for firing in callback.firings] == list(killed_worker.BOUNDARIES)
    assert [each["step"] for each in callback.earlier] == [4] and len(callback.receipts) == 1
