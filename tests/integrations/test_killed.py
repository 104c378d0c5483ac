"""A process that is killed in the middle of training, and another that goes on from its checkpoint."""

from __future__ import annotations

import importlib.util
import os
import signal
import warnings
from multiprocessing import get_context
from pathlib import Path

import pytest

import rekindle
from integrations import killed_worker
from trained import adam, batches, loop, network, same


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forked processes")
@pytest.mark.parametrize("kind", ["transformers", "lightning", "ignite"])
def test_fired_at_a_boundary_killed_and_resumed_it_ends_like_a_plain_loop(kind: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, _ = killed_worker.run(kind, tmp_path / "whole")
        # A fork, after everything is imported: a new Python would spend most of the test's time on imports.
        child = get_context("fork").Process(target=killed_worker.run, args=(kind, tmp_path), kwargs={"kill": True})
        child.start()
        child.join(300)
        assert child.exitcode == -signal.SIGKILL
        again, callback = killed_worker.run(kind, tmp_path, resume=True)
    expected = network()
    optimizer = adam(expected)

    def between(step: int) -> None:
        if step in killed_worker.BOUNDARIES:
            rekindle.fire(expected, optimizer)

    loop(expected, optimizer, batches(4) * 2, between)
    assert same(again, whole) and same(again, expected)
    assert [firing.step for firing in callback.firings] == list(killed_worker.BOUNDARIES)
    assert [each["step"] for each in callback.earlier] == [4] and len(callback.receipts) == 1
