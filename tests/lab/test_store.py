"""The folder of a study: nothing finished is lost, whatever happens to a file's end, and a run has one writer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab_fakes import row
from rekindle import files
from rekindle.lab.arms import Arm
from rekindle.lab.execution.store import RunRecord, RunStore, parse
from rekindle.lab.results import Results, RunEntry
from rekindle.lab.settings import Setting

START = {"kind": "start", "identity": "abc", "run": {"setting": {"name": "digits"}, "arm": {"name": "fire"}, "seed": 3}}
ROWS = [START, *(row(task, 0.5, remedy=task > 0) for task in range(3)), {"kind": "end", "seconds": 1.5}]


def write(store: RunStore, identity: str, rows: list[dict[str, Any]]) -> None:
    claim = store.claim(identity)
    assert claim is not None
    with claim:
        for each in rows:
            claim.append(each)


def whole() -> bytes:
    return b"".join(json.dumps(each, separators=(",", ":")).encode() + b"\n" for each in ROWS)


def test_rows_are_kept_in_order_and_progress_is_not(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    write(store, "abc", [*ROWS[:2], {"kind": "progress", "task": 1}, *ROWS[2:]])
    record = store.read("abc")
    assert record.state == "finished" and list(record.rows) == ROWS
    assert store.path("abc").read_bytes() == whole()


@pytest.mark.parametrize("cut", [*range(0, len(whole()), 97), len(whole()) - 2, len(whole()) - 1, len(whole())])
def test_a_file_cut_anywhere_is_taken_up_again(cut: int, tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    write(store, "abc", [])
    store.path("abc").write_bytes(whole()[:cut])
    # The end row counts as soon as its closing bracket is there.
    assert (store.read("abc").state == "finished") == (cut >= len(whole()) - 1)
    claim = store.claim("abc")
    assert claim is not None
    with claim:
        if claim.record.state != "finished":
            for each in ROWS:
                claim.append(each)
    assert store.finished() == {"abc"} and list(store.read("abc").rows) == ROWS
    assert all(json.loads(line) for line in store.path("abc").read_bytes().splitlines()), "the torn tail is gone"


@pytest.mark.parametrize("tail", [b"", b"\n", b"\x00" * 5000, b'{"kind":"task","task":3', b"\n\n{}x\n"])
def test_a_claim_makes_the_file_whole(tail: bytes, tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.runs.mkdir()
    end = whole() if tail else whole()[:-1]
    store.path("abc").write_bytes(end + tail)
    claim = store.claim("abc")
    assert claim is not None and claim.record.state == "finished"
    claim.release()
    assert store.path("abc").read_bytes() == whole()


def test_a_row_without_its_newline_is_not_joined_to_the_next(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.runs.mkdir()
    second = whole().index(b"\n", whole().index(b"\n") + 1)
    store.path("abc").write_bytes(whole()[:second])
    write(store, "abc", ROWS)
    assert store.path("abc").read_bytes() == whole()[: second + 1] + whole()


def test_what_is_finished_stays_until_a_later_attempt_is_finished(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    later = [{**START, "code": "new"}, row(0, 0.1, remedy=False)]
    write(store, "abc", [*ROWS, *later])
    assert list(store.read("abc").rows) == ROWS
    write(store, "abc", [{"kind": "failed", "error": "out of luck"}])
    assert list(store.read("abc").rows) == ROWS
    write(store, "abc", [*later, {"kind": "end", "seconds": 9.0}])
    assert store.read("abc").code == "new" and len(store.read("abc").rows) == 3


@given(st.data())
def test_garbage_at_the_end_costs_a_finished_run_nothing_and_an_unfinished_one_its_attempt_only(data: Any) -> None:
    import tempfile

    cut = data.draw(st.integers(0, len(whole())))
    garbage = data.draw(
        st.one_of(
            st.binary(max_size=60), st.sampled_from([b"\x00" * 40, b'{"kind":"end"}\n', b"[" * 5000, b'"a"\n1\n'])
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        store = RunStore(folder)
        store.runs.mkdir(parents=True)
        store.path("abc").write_bytes(whole()[:cut] + garbage)
        if cut == len(whole()):
            assert store.finished() == {"abc"} and list(store.read("abc").rows) == ROWS
        claim = store.claim("abc")
        assert claim is not None
        with claim:
            redo = claim.record.state != "finished"
            for each in ROWS if redo else ():
                claim.append(each)
        assert store.finished() == {"abc"}
        again = store.claim("abc")
        assert again is not None and again.record.state == "finished", "a second resume has nothing to do"
        again.release()


def test_a_second_attempt_follows_the_first_and_the_finished_one_counts(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    first = [START, row(0, 0.1, remedy=False), {"kind": "failed", "error": "out of luck"}]
    write(store, "abc", first)
    assert store.read("abc").state == "failed" and not store.read("abc").settles("")
    write(store, "abc", ROWS)
    assert list(store.read("abc").rows) == ROWS
    assert store.path("abc").read_bytes().count(b'"start"') == 2, "append-only: the failed attempt is still there"


def test_a_lost_line_in_the_middle_makes_the_attempt_worthless(tmp_path: Path) -> None:
    lines = whole().splitlines(keepends=True)
    assert parse(b"".join(lines[:2] + lines[3:]))[0].state == "new"
    assert parse(lines[0] + b"\xff\xfe\n" + b"".join(lines[1:]))[0].state == "new"
    assert parse(b"".join(lines[1:]))[0].state == "new", "no start"


def test_one_writer_within_and_across_processes(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    claim = store.claim("abc")
    assert claim is not None and store.claim("abc") is None and store.claim("other") is not None
    code = "import sys; from rekindle.lab.execution.store import RunStore; print(RunStore(sys.argv[1]).claim('abc'))"
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "None"
    claim.release()
    again = store.claim("abc")
    assert again is not None
    again.release()


def test_a_killed_writer_lets_go(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from rekindle.lab.arms import Arm
from rekindle.lab.execution.store import RunStore
claim = RunStore(sys.argv[1]).claim("abc")
claim.append({"kind": "start"})
os.kill(os.getpid(), signal.SIGKILL)
"""
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert died.returncode == -9
    claim = RunStore(tmp_path).claim("abc")
    assert claim is not None and claim.record.state == "partial"
    claim.release()


def test_a_row_that_json_cannot_hold_is_not_half_written(tmp_path: Path) -> None:
    claim = RunStore(tmp_path).claim("abc")
    assert claim is not None
    with claim:
        claim.append(START)
        with pytest.raises(ValueError, match="JSON"):
            claim.append({"kind": "task", "task": 0, "loss": float("nan")})
        assert RunStore(tmp_path).path("abc").read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("identity", ["", "../x", "a/b", "a.b"])
def test_an_identity_cannot_leave_the_folder(identity: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="identity"):
        RunStore(tmp_path).claim(identity)


def test_study_json(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "new")
    with pytest.raises(FileNotFoundError, match="not the folder of a study"):
        store.description()
    store.describe({"name": "x"})
    assert store.description() == {"name": "x"}
    (tmp_path / "new" / "study.json").write_text('{"na', "utf-8")
    with pytest.raises(ValueError, match="run the study again"):
        store.description()


def test_replace_leaves_the_old_file_if_it_fails_and_nothing_beside(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "x"
    files.write(path, b"old")

    def refuse(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        files.write(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_the_table_is_sorted_flat_and_the_same_every_time(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    store, setting = RunStore(tmp_path), Setting("digits", "random-labels", "mlp")
    entries = [
        RunEntry(setting, arm, Arm(arm, options={"b": 1, "a": 2}), False, seed, identity, RunRecord(state, (*ROWS,)))
        for identity, arm, seed, state in (
            *(("zz", "fire", 0, "finished"), ("aa", "nothing", 1, "finished"), ("mm", "fire", 1, "finished")),
            ("no", "redo", 0, "partial"),
        )
    ]
    frame = Results({"name": "s"}, tuple(entries)).frame()
    first = store.write_table(frame).read_bytes()
    table = pandas.read_parquet(store.folder / "table.parquet")
    keys = table[["setting", "arm", "seed", "identity", "task"]].values.tolist()
    assert keys == [
        ["digits", arm, seed, identity, task]
        for arm, seed, identity in (("fire", 0, "zz"), ("fire", 1, "mm"), ("nothing", 1, "aa"))
        for task in range(3)
    ]
    assert table["remedy.loss_after"].isna().tolist() == [True, False, False] * 3
    assert json.loads(table["curve"][0])[1][0] == 10 and table["arm_options"][0] == '{"a": 2, "b": 1}'
    assert store.write_table(frame).read_bytes() == first and os.listdir(store.folder) == ["table.parquet"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": None},
        {"kind": "row"},
        {"kind": "start", "stream": 3},
        {"kind": "start", "stream": {"classes": "many"}},
        {"steps": None},
        {"online_accuracy": "high"},
        {"online_accuracy": 10**400},
        {"train_loss": float("nan")},
        {"curve": "abc"},
        {"curve": [[1]]},
        {"remedy": {"loss_after": []}},
        {"health": 3},
    ],
)
def test_a_run_with_a_malformed_row_is_named_and_left_out(wrong: dict[str, Any], tmp_path: Path) -> None:
    store, setting = RunStore(tmp_path), Setting("digits", "random-labels", "mlp")
    for identity in ("good", "bad"):
        write(store, identity, ROWS)
    lines = [*ROWS[:2], {**(START if wrong.get("kind") == "start" else ROWS[2]), **wrong}, *ROWS[3:]]
    store.path("bad").write_bytes("".join(json.dumps(each) + "\n" for each in lines).encode())
    assert store.finished() == {"good"}
    entries = [
        RunEntry(setting, "fire", Arm("fire"), False, seed, identity, store.read(identity))
        for seed, identity in enumerate(("good", "bad"))
    ]
    results = Results({"name": "s", "settings": []}, tuple(entries))
    assert [row["seeds"] for row in results.table()] == [1]
    assert {row["seed"] for row in results.rows} == {0} and results.to_dict()["runs"][1]["state"] == "failed"
    assert "failed: digits fire seed 1: row 3 of its file is malformed" in str(results)
    claim = store.claim("bad")
    assert claim is not None and not claim.record.settles("")
    with claim:
        for each in ROWS:
            claim.append(each)
    assert store.read("bad").state == "finished"


def test_an_empty_folder_has_an_empty_table(tmp_path: Path) -> None:
    assert len(Results({"name": "empty"}, ()).frame()) == 0
    assert RunStore(tmp_path).finished() == set() and RunStore(tmp_path).read("abc") == RunRecord("new")


def test_readers_see_whole_rows_while_one_writes(tmp_path: Path) -> None:
    store, seen = RunStore(tmp_path), set()
    claim = store.claim("abc")
    assert claim is not None

    def work() -> None:
        with claim:
            for each in ROWS:
                claim.append(each)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        seen.add(store.read("abc").state)
    thread.join()
    assert store.read("abc").state == "finished" and seen <= {"new", "partial", "finished"}


def test_a_link_with_the_name_of_a_run_is_refused(tmp_path: Path) -> None:
    store, precious = RunStore(tmp_path), tmp_path / "precious"
    precious.write_text("precious", "utf-8")
    store.runs.mkdir()
    store.path("abc").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic link"):
        store.claim("abc")
    assert precious.read_text("utf-8") == "precious"
