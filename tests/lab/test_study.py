"""Studies: every run once, whatever is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab_fakes import TASKS, Inline
from rekindle.lab import settings
from rekindle.lab.arms import Arm
from rekindle.lab.execution import MOST_LOSSES, Event
from rekindle.lab.execution.workers import Pool
from rekindle.lab.settings import Setting
from rekindle.lab.study import Study
from rekindle.lab.train import Run, execute
from rekindle.methods import FIRE

QUICK = "lab_fakes:quick"
TINY = Setting("tiny", "random-labels", "mlp")


def study(folder: Path, *, arms: tuple[str, ...] = ("nothing", "fire"), seeds: int = 2, **options: Any) -> Study:
    """Arms of the fake; options are the fake's (see lab_fakes)."""
    made = [Arm(name, None if name == "nothing" else "FIRE", {"log": str(folder / "log"), **options}) for name in arms]
    folder.mkdir(parents=True, exist_ok=True)
    return Study("s", [TINY], made, list(range(seeds)), folder / "study")


def begun(folder: Path, word: str = "begun") -> Counter[str]:
    """How often each run was begun (or ended), from the log that the fakes write."""
    if not (folder / "log").exists():
        return Counter()
    lines = [line.split() for line in (folder / "log").read_text("utf-8").splitlines()]
    return Counter(f"{arm} {seed}" for what, _, arm, seed, _ in lines if what == word)


def workers(folder: Path) -> set[int]:
    return {int(line.split()[-1]) for line in (folder / "log").read_text("utf-8").splitlines()}


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain for {what}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, str(Path({tests!r}).parent / "support"), str(Path({tests!r}).parent)]
import test_study as t
t.study(Path({folder!r}), seeds={seeds}, sleep={sleep}).run(workers={workers}, target=t.QUICK)
"""


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Runs the study of a folder in another process; what still runs after the test is ended."""
    begun_here: list[subprocess.Popen[bytes]] = []

    def begin(folder: Path, seeds: int, sleep: float, workers: int = 1, fire: float = 0.0) -> subprocess.Popen[bytes]:
        tests = str(Path(__file__).parent)
        code = SCRIPT.format(tests=tests, folder=str(folder), seeds=seeds, sleep=sleep, workers=workers)
        env = os.environ | {"FAKE_FIRE_SLEEP": str(fire)}
        begun_here.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                start_new_session=True,
                stderr=subprocess.DEVNULL,
                env=env,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell ignores it
            )
        )
        return begun_here[-1]

    yield begin
    for process in begun_here:
        process.kill()
        process.wait()


# In worker processes


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Workers take seconds to load torch, so that some tests share them."""
    made = Pool(2, target=QUICK)
    yield made
    pids = made.processes()
    made.close()
    made.close()
    assert pids and not any(map(alive, pids)), "no worker outlives its pool"


def test_killed_workers_are_replaced_and_every_run_lands_once(tmp_path: Path, pool: Pool) -> None:
    events: list[Event] = []
    made = study(tmp_path, arms=("nothing", "fire", "redo"), kill=str(tmp_path / "killed"))
    results = made.run(on=pool, progress=events.append)
    assert all(entry.record.state == "finished" for entry in results.entries)
    assert [event.kind for event in events].count("died") == 1
    assert "SIGKILL" in next(event.row["error"] for event in events if event.kind == "died")
    assert sum(begun(tmp_path).values()) == 7 and set(begun(tmp_path, "ended").values()) == {1}
    for entry in results.entries:
        assert [row["kind"] for row in entry.record.rows] == ["start", *["task"] * TASKS, "end"]
    before = begun(tmp_path)
    made.run(on=pool)
    assert begun(tmp_path) == before, "nothing is left to do"


def test_a_worker_killed_while_it_is_idle_is_replaced(tmp_path: Path, pool: Pool) -> None:
    study(tmp_path / "first", seeds=1).run(on=pool)
    for pid in pool.processes():
        os.kill(pid, signal.SIGKILL)
    results = study(tmp_path / "second", seeds=1).run(on=pool)
    assert {entry.record.state for entry in results.entries} == {"finished"}


def test_a_worker_has_one_thread_and_its_prints_are_rows(pool: Pool, capfd: Any) -> None:
    pool.submit("abc", {"threads": True, "arm": {"name": "", "options": {}}, "seed": 0})
    rows: list[Any] = []
    while not rows or rows[-1][1]["kind"] != "end":
        rows += pool.events(1.0)
    assert rows[0] == ("abc", {"kind": "printed", "text": "this is printed by a run"})
    assert rows[2] == ("abc", {"kind": "task", "task": 0, "threads": 1, "env": "1"})
    assert capfd.readouterr() == ("", "")


def test_a_killed_study_goes_on_without_repeating_what_is_finished(
    tmp_path: Path, elsewhere: Callable[..., subprocess.Popen[bytes]]
) -> None:
    # The arm "fire" sleeps through its first task, so that its worker cannot notice by writing that nobody reads.
    process = elsewhere(tmp_path, seeds=3, sleep=0.05, workers=2, fire=60.0)
    wait_for(
        lambda: len(begun(tmp_path, "ended")) >= 2 and "fire 0" in begun(tmp_path), "two finished runs and a long one"
    )
    process.kill()
    process.wait()
    made = study(tmp_path, seeds=3, sleep=0.05)
    wait_for(lambda: not any(map(alive, workers(tmp_path))), "the workers to notice", 20.0)
    finished = {run.identity for run in made.runs()} & made.store.finished()
    kept = {identity: made.store.path(identity).read_bytes() for identity in finished}
    assert finished and len(finished) < 6
    names = {f"{run.arm.name} {run.seed}" for run in made.runs() if run.identity in finished}
    before = begun(tmp_path)
    results = made.run(on=Inline())
    assert all(entry.record.state == "finished" for entry in results.entries)
    assert not names & (begun(tmp_path) - before).keys()
    assert all(made.store.path(identity).read_bytes() == content for identity, content in kept.items())


def test_ctrl_c_leaves_a_resumable_folder_and_no_orphans(
    tmp_path: Path, elsewhere: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = elsewhere(tmp_path, seeds=2, sleep=0.5)
    wait_for(lambda: bool(begun(tmp_path)), "the first run")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    wait_for(lambda: not any(map(alive, workers(tmp_path))), "the workers to end", 20.0)
    made = study(tmp_path, seeds=2, sleep=0.5)
    assert len(made.store.finished()) < 4
    claim = made.store.claim(made.runs()[0].identity)
    assert claim is not None and claim.record.state in ("new", "partial", "finished"), "the lock is free"
    claim.release()
    fast = Inline()
    results = made.run(on=fast)
    assert {entry.record.state for entry in results.entries} == {"finished"} and fast.performed


def test_two_studies_in_one_folder_do_every_run_once(
    tmp_path: Path, elsewhere: Callable[..., subprocess.Popen[bytes]]
) -> None:
    processes = [elsewhere(tmp_path, seeds=4, sleep=0.1) for _ in range(2)]
    assert [process.wait(180) for process in processes] == [0, 0]
    assert (
        begun(tmp_path)
        == begun(tmp_path, "ended")
        == Counter({f"{a} {s}": 1 for a in ("nothing", "fire") for s in range(4)})
    )
    made = study(tmp_path, seeds=4, sleep=0.1)
    assert len(made.store.finished()) == 8
    assert all(made.store.path(run.identity).read_bytes().count(b'"start"') == 1 for run in made.runs())
    assert not list(made.store.folder.glob(".*")), "nothing half-written is left"


def test_a_users_file_is_known_to_workers_and_training_there_gives_what_it_gives_here(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        """
from rekindle.lab.arms import register
from rekindle.lab.settings import Setting
from rekindle.methods import FullReset

mine = Setting("mine", "random-labels", "mlp", {"data": "digits", "count": 96, "tasks": 3, "epochs": 2}, {"width": 16})

@register("my-reset")
class MyReset(FullReset):
    pass
""",
        "utf-8",
    )
    made = Study.load(path, folder=tmp_path / "out", seeds=1)
    assert "my-reset" in [arm.name for arm in made.arms] and made.settings[0].source == str(path)
    made = replace(made, arms=[arm for arm in made.arms if arm.name in ("nothing", "fire", "my-reset")])
    results = made.run(workers=1, batched=False)
    assert {entry.record.state for entry in results.entries} == {"finished"}
    assert len(list((tmp_path / "out" / "starts").glob("*.pt"))) == 1, "one start a seed, shared by all arms"
    timed = {"seconds", "remedy_seconds", "remedy"}
    for run, entry in zip(made.runs(), results.entries, strict=True):
        here = [row for row in execute(run) if row["kind"] == "task"]
        for ours, theirs in zip(here, entry.tasks, strict=True):
            assert {k: v for k, v in ours.items() if k not in timed} == {
                k: v for k, v in theirs.items() if k not in timed
            }
    json.dumps(results.to_dict(), allow_nan=False)
    assert len(results.frame()) == 9 and (tmp_path / "out" / "table.parquet").exists()
    again = Study.load(tmp_path / "out")
    assert [run.identity for run in again.runs()] == [run.identity for run in made.runs()]
    assert again.results().rows == results.rows


# In this process, which is quicker


def test_events_tell_what_happens_and_how_long_it_will_take(tmp_path: Path) -> None:
    events: list[Event] = []
    study(tmp_path, sleep=0.02).run(on=Inline(), progress=events.append)
    kinds = Counter(event.kind for event in events)
    assert kinds == {"started": 4, "progress": 4 * TASKS, "task": 4 * TASKS, "finished": 4}
    assert [event.done for event in events if event.kind == "finished"] == [1, 2, 3, 4]
    assert all(event.total == 4 for event in events)
    assert events[0].left is None and events[-1].left == 0.0
    second, third = [event.left for event in events if event.kind == "finished"][1:3]
    assert second is not None and third is not None and third < second
    study(tmp_path, sleep=0.02).run(on=Inline(), progress=pytest.fail)  # all is done: there is nothing to tell


def test_a_failure_is_recorded_told_and_tried_again(tmp_path: Path) -> None:
    events: list[Event] = []
    made = study(tmp_path, seeds=1, arms=("nothing",), fail="out of luck")
    for attempt in (1, 2):
        results = made.run(on=Inline(), progress=events.append)
        assert results.entries[0].record.state == "failed" and results.entries[0].reason == "RuntimeError: out of luck"
        assert [event.kind for event in events].count("failed") == attempt
    assert results.table() == []
    assert (
        json.loads(made.store.path(results.entries[0].identity).read_text("utf-8").splitlines()[-1])["kind"] == "failed"
    )


def test_a_run_that_always_loses_its_worker_fails_and_the_others_go_on(tmp_path: Path) -> None:
    class Losing(Inline):
        def events(self, timeout: float) -> list[tuple[str, dict[str, Any]]]:
            rows = super().events(timeout)
            if rows[0][1]["run"]["arm"]["name"] == "fire":
                return rows
            return [*rows[:3], (rows[0][0], {"kind": "died", "error": "killed by SIGKILL"})]

    made, executor = study(tmp_path, seeds=1), Losing()
    results = made.run(on=executor)
    assert [entry.record.state for entry in results.entries] == ["failed", "finished"]
    assert f"lost {MOST_LOSSES} workers" in str(results.entries[0].reason) and executor.performed == MOST_LOSSES + 1
    assert made.last is not None and made.last.counts == {"failed": 1, "finished": 1}
    assert "failed: tiny nothing seed 0" in str(results)


@pytest.mark.parametrize(
    ("target", "state", "reason"),
    [
        ("lab_fakes:silent", "failed", "without an end row"),
        ("lab_fakes:unwritable", "failed", "JSON"),
        ("lab_fakes:missing", "failed", "missing"),
        ("lab_fakes:refused", "refused", "no attention here"),
    ],
)
def test_runs_that_come_to_nothing_say_why(target: str, state: str, reason: str, tmp_path: Path) -> None:
    made = study(tmp_path, seeds=1, arms=("fire",))
    entry = made.run(on=Inline(target)).entries[0]
    assert entry.record.state == state and reason in str(entry.reason)
    again = Inline(target)
    made.run(on=again)
    assert again.performed == (0 if state == "refused" else 1), "a refusal is an answer, a failure is not"


def test_a_run_in_other_hands_is_waited_for(tmp_path: Path) -> None:
    made = study(tmp_path, seeds=1)
    run = made.runs()[0]
    claim = made.store.claim(run.identity)
    assert claim is not None
    events: list[Event] = []

    def watch(event: Event) -> None:
        """Once the other run is done, the other process is done with its own."""
        events.append(event)
        if event.kind == "finished" and event.run.arm.name == "fire":
            for identity, row in _rows(run):
                assert identity == run.identity
                claim.append(row | ({"code": run.code} if row["kind"] == "start" else {}))
            claim.release()

    results = made.run(on=Inline(), progress=watch)
    assert [event.kind for event in events if event.run.arm.name == "nothing"] == ["elsewhere"]
    assert {entry.record.state for entry in results.entries} == {"finished"}


def _rows(run: Run) -> list[tuple[str, dict[str, Any]]]:
    inline = Inline()
    inline.submit(run.identity, run.to_dict())
    return inline.events(0)


def test_a_start_is_not_made_twice_at_once(tmp_path: Path) -> None:
    class Two(Inline):
        slots = 2
        together: list[set[tuple[str, int]]] = []  # noqa: RUF012

        def events(self, timeout: float) -> list[tuple[str, dict[str, Any]]]:
            self.together.append({(job["arm"]["name"], job["seed"]) for _, job in self._waiting})
            return super().events(timeout)

    executor = Two()
    study(tmp_path).run(on=executor)
    assert executor.together[0] == {("nothing", 0), ("nothing", 1)}, "two seeds, not two arms of one seed"


# Code that changed


def test_what_other_code_made_is_done_again_and_shown_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = study(tmp_path, seeds=1)
    made.run(on=Inline())
    first = [run.code for run in made.runs()]
    assert first == [entry.record.code for entry in made.results().entries]
    monkeypatch.setattr(FIRE, "revision", 7, raising=False)
    made = study(tmp_path, seeds=1)
    assert made.runs()[0].code == first[0], "doing nothing does not depend on FIRE"
    assert made.runs()[1].identity == made.results().entries[1].identity and made.runs()[1].code != first[1]
    assert made.results().entries[1].record.state == "finished"
    assert "1 of 2 runs were made by other code than this" in str(made.results())
    executor = Inline()
    made.run(on=executor)
    assert executor.performed == 1
    assert made.results().entries[1].record.code == made.runs()[1].code and made.results().provenance() is None


def test_a_refusal_is_not_final_when_the_code_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = study(tmp_path, seeds=1, arms=("fire",))
    made.run(on=Inline("lab_fakes:refused"))
    monkeypatch.setattr(FIRE, "revision", 7, raising=False)
    made = study(tmp_path, seeds=1, arms=("fire",))
    assert made.run(on=Inline()).entries[0].record.state == "finished"


def test_the_version_is_declared_and_not_read_off_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = study(tmp_path, seeds=1).runs()[1]
    assert run.code == "lab 1"
    monkeypatch.setattr(settings, "REVISION", 2)
    monkeypatch.setattr(FIRE, "revision", 7, raising=False)
    assert replace(run).code == "lab 2, FIRE 7"


# What the user's file does


def test_prints_are_seen_and_errors_name_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        """
import numpy as np
from rekindle.lab import Setting, Stream, stream

@stream("noisy-stream")
def noisy(seed):
    print("building", seed < 2**31)
    np.random.default_rng(seed), np.random.RandomState(seed)
    raise OverflowError("too large")

mine = Setting("mine", "noisy-stream", "mlp")
""",
        "utf-8",
    )
    made = Study.load(tmp_path / "mine.py", methods=["nothing"], seeds=1, folder=tmp_path / "out")
    entry = made.run(on=Inline("rekindle.lab.execution.workers:perform")).entries[0]
    assert entry.reason == "OverflowError: too large (mine.py, line 9)"
    assert "mine · nothing · seed 0: building True" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Study("digits", ["nothing"]), "Study.load('digits', ['nothing', 'fire'], seeds=5)"),
        (lambda: Study(["digits"], ["nothing"], 3), "a study needs its name, settings and arms"),
        (lambda: Study("x", ["digits"], ["nothing"], "3"), "as in [0, 3, 7]"),
        (lambda: Study("x", ["digits"], ["nothing"], [0.5]), "as in [0, 3, 7]"),
    ],
)
def test_a_study_that_lacks_something_says_what_to_pass(make: Callable[[], Study], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()
