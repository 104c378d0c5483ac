"""The same study on Ray: a local one with two workers, of which one is killed in the middle of a run."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason='ray is not installed: pip install "torch-rekindle[ray]"')

from test_study import alive, begun, study, workers

from rekindle.lab.execution import Event


def test_a_worker_killed_in_the_middle_is_replaced_and_results_land_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    events: list[Event] = []
    made = study(tmp_path, arms=("nothing", "fire", "redo"), kill=str(tmp_path / "killed"), sleep=0.1)
    results = made.run(on="ray", workers=2, progress=events.append, target="lab_fakes:quick")
    killed = int((tmp_path / "killed").read_text("utf-8"))
    assert killed in workers(tmp_path) and killed != os.getpid() and not alive(killed)
    assert len(workers(tmp_path)) >= 2, "two workers, and one in place of the dead"
    assert sum(begun(tmp_path).values()) == 7 and set(begun(tmp_path, "ended").values()) == {1}
    assert {entry.record.state for entry in results.entries} == {"finished"}
    for entry in results.entries:
        content = made.store.path(entry.identity).read_bytes()
        assert content.count(b'"start"') == 1 and content.count(b'"end"') == 1
    kinds = [event.kind for event in events]
    assert kinds.count("finished") == 6 and "died" not in kinds, "Ray itself tries again"
    end = time.monotonic() + 10
    while any(map(alive, workers(tmp_path))) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(alive, workers(tmp_path))), "the Ray that was started here has ended"
    assert threading.active_count() < 50
