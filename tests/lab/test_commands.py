"""`rekindle lab …`: what each command prints, writes and exits with, on studies of a second."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from command_line import one_line, run
from lab_results import ENDS, LABELS, compared, results
from rekindle.lab.arms import Arm
from rekindle.lab.settings import Setting
from rekindle.lab.study import Study
from rekindle.lab.tuning import TunedChoice
from rekindle.lab.views import sentences, won
from rekindle.lab.views.terminal import Board, live, tables

OWN = Path(__file__).parents[2] / "examples" / "lab_own.py"
TINY = ("--set", "stream_options.tasks=2", "--set", "stream_options.epochs=1", "--set", "stream_options.count=64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of three runs, one of which is refused: there is no attention in an MLP."""
    where = tmp_path_factory.mktemp("lab") / "study"
    result = run(
        "lab", "run", "digits", "-m", "nothing,fire,fire-qk", "-n", "1", *TINY, "--workers", "1", "--folder", where
    )
    assert result.exit_code == 0, result.output
    return where


def starts(folder: Path) -> int:
    return sum(json.loads(line)["kind"] == "start" for f in folder.glob("runs/*.jsonl") for line in f.open("rb"))


# Start-up and help


def test_the_command_line_does_not_import_the_laboratory() -> None:
    code = (
        "import sys; from rekindle.cli.app import app\n"
        "print([m for m in sys.modules if m.startswith('rekindle.lab') or m in ('sklearn', 'pandas', 'scipy', 'ray')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["list", "run", "resume", "show", "report", "fetch"])
def test_each_command_has_an_example(command: str) -> None:
    result = run("lab", command, "--help", COLUMNS="120")
    assert result.exit_code == 0
    assert f"rekindle lab {command}" in result.stdout.partition("Examples")[2]


def test_help_shows_the_demo_and_the_laboratory() -> None:
    text = run("--help", COLUMNS="120").stdout
    assert "rekindle demo" in text and "rekindle lab run" in text


# list and fetch


def test_list_has_settings_arms_groups_and_data() -> None:
    text = run("lab", "list").stdout
    for expected in ("random-labels", "fire-nearest", "controls", "digits.csv.gz"):
        assert expected in text
    data = json.loads(run("lab", "list", "--json").stdout)
    assert data["arms"]["muon"]["options"]["optimizer"] == "muon"
    assert "fire" in data["groups"]["main"]


def test_every_setting_says_how_long_a_run_takes() -> None:
    for name, each in json.loads(run("lab", "list", "--json").stdout)["settings"].items():
        words = r"for a cluster|for a GPU|; days" if name.startswith("paper/") else r"; about \d+ (s|min) per run$"
        assert re.search(words, each["about"]), name


def test_fetch_says_where_a_set_is(tmp_path: Path) -> None:
    assert run("lab", "fetch", "digits").stdout.strip().endswith("digits.csv.gz")
    assert "no data set is called 'nonsense'" in one_line(run("lab", "fetch", "nonsense"))


# run, resume, show


def test_run_shows_a_table_and_what_was_seen(folder: Path) -> None:
    result = run("lab", "show", folder)
    assert result.exit_code == 0
    assert "Doing nothing went from" in result.stdout
    assert "refused: fire-qk" in result.stdout
    assert (folder / "commands.txt").exists()
    assert (folder / "table.parquet").exists()


def test_json_is_alone_on_stdout_and_agrees_with_the_rows(folder: Path) -> None:
    result = run("lab", "show", folder, "--json")
    data = json.loads(result.stdout)
    assert {run["arm"]: run["state"] for run in data["runs"]} == {
        "nothing": "finished",
        "fire": "finished",
        "fire-qk": "refused",
    }
    for row in data["table"]:
        (tasks,) = (run["tasks"] for run in data["runs"] if run["arm"] == row["arm"])
        assert row["mean"] == pytest.approx(sum(task["online_accuracy"] for task in tasks) / 2)


def test_resume_repeats_nothing(folder: Path) -> None:
    before = starts(folder)
    assert before == 3
    result = run("lab", "resume", folder)
    assert result.exit_code == 0
    assert starts(folder) == before
    assert "resume" not in (folder / "commands.txt").read_text("utf-8")


def test_report_writes_the_page(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    result = run("lab", "report", folder, "--html", page)
    assert result.exit_code == 0, result.output
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert "--force" in one_line(run("lab", "report", folder, "--html", page))
    assert run("lab", "report", folder, "--html", page, "--force").exit_code == 0


def test_atlas_shows_gains_and_draws_them(folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "atlas.svg"
    result = run("lab", "atlas", folder, "-o", picture)
    assert result.exit_code == 0, result.output
    assert "| gain over nothing |" in result.output and "| fire |" in result.output
    assert picture.read_text("utf-8").startswith("<svg")
    assert "no study here has finished runs" in one_line(run("lab", "atlas", folder, "-m", "dash"))


def test_a_users_own_file_runs(tmp_path: Path) -> None:
    where = tmp_path / "own"
    few = (
        "-m",
        "nothing,jitter",
        "-n",
        "2",
        "--set",
        "stream_options.tasks=2",
        "--workers",
        "1",
        "--folder",
        where,
        "--json",
    )
    result = run("lab", "run", OWN, *few, "--html", tmp_path / "own.html")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert {row["arm"]: row["seeds"] for row in data["table"]} == {"nothing": 2, "jitter": 2}
    assert len([line for line in OWN.read_text("utf-8").splitlines() if line.strip()]) < 40
    assert (tmp_path / "own.html").exists()


def test_a_failed_run_is_told_and_the_exit_code_is_one(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from rekindle import lab\n"
        "@lab.network('broken')\n"
        "def broken(shape, classes):\n"
        "    raise RuntimeError('no such network')\n"
        "setting = lab.Setting('mine', 'random-labels', 'broken', {'data': 'digits', 'tasks': 2, 'epochs': 1})\n",
        "utf-8",
    )
    result = run("lab", "run", mine, "-m", "nothing", "-n", "1", "--folder", tmp_path / "x")
    assert result.exit_code == 1
    assert "1 runs failed" in result.stderr
    assert "no such network" in result.stderr


def test_ctrl_c_says_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Study, "run", interrupted)
    result = run("lab", "run", "digits", "--folder", tmp_path / "x")
    assert result.exit_code == 130
    assert f"rekindle lab resume {tmp_path / 'x'}" in result.stderr.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", "random-lables"), "did you mean 'random-labels'?"),
        (("run", "digits", "-m", "fier"), "did you mean 'fire'?"),
        (("run", "digits", "-n", "many"), "--seeds 'many'"),
        (("run", "digits", "-n", "7,,8"), "--seeds '7,,8'"),
        (("run", "digits", "--set", "lr"), "write FIELD=VALUE"),
        (("run", "digits", "--set", "learning=1"), "write FIELD=VALUE"),
        (("run", "digits", "--set", "stream_options=1"), "is a group of options"),
        (("run", "digits", "--set", "batch=-3"), "must be a whole number above zero"),
        (("run", "digits", "--set", "lr=abc"), "lr='abc' must be a number above zero"),
        (("run", "nowhere.yaml"), "nowhere.yaml"),
        (("show", "/nowhere"), "holds no study"),
        (("report", "/nowhere", "--html", "x.html"), "holds no study"),
        (("resume", "/nowhere"), "holds no study"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    more = ("--folder", tmp_path / "x") if arguments[0] == "run" else ()
    assert expected in one_line(run("lab", *arguments, *more))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("words", "seeds"), [("2", [0, 1]), ("7,", [7]), ("0,3,7", [0, 3, 7]), ("3,4,", [3, 4])])
def test_seeds_are_a_count_or_a_list_also_of_one(words: str, seeds: list[int], tmp_path: Path) -> None:
    from rekindle.cli.studies import loaded

    assert loaded(["digits"], "nothing", words, None, tmp_path, None, ()).seeds == seeds


def test_a_missing_data_set_is_told_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_DATA", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)
    line = one_line(run("lab", "run", "paper/warm-start-vit", "--folder", tmp_path / "x"))
    assert line == "error: cifar-100 is not on this machine; get it with: rekindle lab fetch cifar-100"
    assert not (tmp_path / "x").exists()


def test_a_changed_setting_is_another_study() -> None:
    from rekindle.cli.studies import loaded

    plain = loaded(["digits"], None, None, None, None, None, ())
    other = loaded(["digits"], "main", "0,3", None, None, 0.1, ["lr=0.5", "stream_options.tasks=3"])
    assert plain.folder != other.folder
    assert other.seeds == [0, 3]
    assert other.settings[0].replay == 0.1
    assert other.settings[0].stream_options["tasks"] == 3
    assert len({r.identity for r in plain.runs()} & {r.identity for r in other.runs()}) == 0


# What is said


def said(**how: Any) -> str:
    (found,) = compared(**how)
    return " ".join(sentences(found))


def test_the_sentences_follow_the_numbers() -> None:
    won = said()
    assert "went from 46.0\N{NO-BREAK SPACE}% accuracy while learning on the first task" in won
    assert "it lost its plasticity" in won
    assert "FIRE was best of 5" in won and "points" in won
    lost = said(ends={**ENDS, "full-reset": 0.6})
    assert "FIRE did not win: full-reset came first with 60." in lost
    assert "FIRE second of 5" in lost
    assert "cannot tell" not in lost
    close = said(ends={**ENDS, "shrink-perturb": 0.507})
    assert "FIRE did not win" in close and "cannot tell FIRE from shrink-perturb" in close
    reverse = said(ends={**ENDS, "shrink-perturb": 0.504})
    assert "FIRE was best" in reverse and "cannot tell it from shrink-perturb" in reverse
    variant = said(ends={**ENDS, "fire-nearest": 0.8})
    assert "A variant of FIRE was best: fire-nearest" in variant


def test_a_stream_that_loses_nothing_is_called_so() -> None:
    assert "did not lose its plasticity" in said(ends={**ENDS, "nothing": 0.46})
    assert "lost less than half" in said(ends={**ENDS, "nothing": 0.35})


@pytest.mark.parametrize("change", [{"stream": "class-incremental"}, {"replay": 0.1}])
def test_where_tasks_differ_in_difficulty_a_fresh_start_tells_what_was_lost(change: dict[str, Any]) -> None:
    text = said(settings=(replace(LABELS, **change),))
    assert "plasticity" not in text and "on the first task" not in text
    assert "what a fresh start gains: +2" in text
    assert "no full-reset was run" in said(settings=(replace(LABELS, **change),), ends={"nothing": 0.2, "fire": 0.3})


def test_fire_is_held_against_a_full_reset() -> None:
    assert "FIRE instead of a full reset made +5." in said()


def test_diverged_runs_are_told_even_where_they_have_no_mean() -> None:
    made = results(settings=(Setting("text", "alphabet", "gpt", headline="online_loss"),))
    for entry in made.entries:
        assert "diverged" in entry.record.rows[-2]
        if entry.name == "redo":
            entry.record.rows[-2].update(online_loss=None, diverged=True)
    told = " ".join(sentences(made.comparisons["text"]))
    assert "redo diverged in 5 of 5 runs; 5 of them have no value" in told and told.count("diverged in") == 1


def test_a_useless_fire_is_called_so() -> None:
    text = said(ends={"nothing": 0.3, "fire": 0.2})
    assert "FIRE did not win: doing nothing came first" in text


def test_nearness_is_judged_against_a_random_isometry() -> None:
    assert "Being the nearest isometry rather than a random one made +10." in said(
        ends={"nothing": 0.1, "fire": 0.5, "random-isometry": 0.4}
    )


def test_like_is_compared_with_like() -> None:
    """An arm that leaves the output layer is compared with the random isometry that does, no other."""
    ends = {"nothing": 0.1, "fire": 0.5, "fire-body": 0.6, "random-isometry-body": 0.3}
    nearest = [each for each in sentences(compared(ends=ends)[0]) if "nearest isometry" in each]
    assert [each.partition(" made +30.")[0] for each in nearest] == [
        "Being the nearest isometry rather than a random one, both without the output layer,"
    ]
    lines = {row["arm"]: row for row in results(ends=ends).table()}
    assert lines["fire"]["random_isometry"] is None
    assert lines["fire-body"]["random_isometry"] == pytest.approx(0.3)


def test_losses_are_better_when_lower() -> None:
    text = Setting("text", "alphabet", "gpt", headline="online_loss")
    (found,) = compared(settings=(text,))
    assert found.ranked[0] == "fire" and found.ranked[-1] == "nothing"
    assert won(found)


def test_tuned_arms_are_held_against_tuned_references() -> None:
    (found,) = compared(tuned=("nothing", "fire"))
    tuned = found.against("fire (tuned)", "nothing")
    plain = found.against("fire", "nothing")
    assert tuned is not None and plain is not None
    assert tuned.mean == pytest.approx(found.interval("fire (tuned)").mean - found.interval("nothing (tuned)").mean)
    assert tuned.mean == pytest.approx(plain.mean)  # both sides gained as much


def test_the_terminal_drops_columns_that_do_not_fit_but_never_cuts_one() -> None:
    for width in (60, 80, 100, 200):
        console = Console(width=width, color_system=None)
        with console.capture() as captured:
            console.print(tables(compared(), width))
        text = captured.get()
        assert "…" not in text
        assert "50.5" in text
        assert ("p (Holm)" in text) == (width >= 100)


# While it runs


def event(kind: str, arm: str, row: dict[str, Any], **more: Any) -> Any:
    seed = more.pop("seed", 0)
    run = SimpleNamespace(setting=LABELS, arm=SimpleNamespace(name=arm), seed=seed, identity=more.pop("identity", arm))
    facts = {"done": 1, "total": 4, "running": 2, "left": 30.0} | more
    return SimpleNamespace(kind=kind, run=run, row=row, **facts)


def drawn(board: Board, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(board)
    return captured.get()


def test_the_board_grows_with_the_tasks() -> None:
    board = Board("labels", {"nothing": "nothing", "fire": "fire"})
    board(event("started", "fire", {}, left=None))
    assert "0 %" in drawn(board) or "0%" in drawn(board)
    for seed_value in (0.4, 0.6):
        board(event("task", "fire", {"task": 0, "online_accuracy": seed_value}))
    board(event("task", "nothing", {"task": 0, "online_accuracy": 0.46}))
    board(event("task", "nothing", {"task": 1, "online_accuracy": 0.12}))
    text = drawn(board)
    lines = [line.split() for line in text.splitlines()]
    assert ["fire", "50", "·"] in lines  # the mean of two seeds, and the second task to come
    assert ["nothing", "46", "12"] in lines
    assert "1 of 4 runs" in text and "30 s left" in text


def test_the_board_fits_a_narrow_terminal_and_tells_of_refusals() -> None:
    board = Board("labels", {"fire": "fire"})
    for task in range(40):
        board(event("task", "fire", {"task": task, "online_accuracy": 0.5}))
    board(event("refused", "fire-qk", {"kind": "end", "refused": "no attention"}))
    text = drawn(board, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert " 40" in text and " 1 " in text
    assert "refused: fire-qk on labels: no attention" in text


def test_runs_of_tuning_do_not_mix_with_the_arms() -> None:
    board = Board("labels", {"fire": "fire"})
    board(event("task", "fire", {"task": 0, "online_accuracy": 0.4}))
    board(event("task", "fire", {"task": 0, "online_accuracy": 0.9}, identity="a candidate", seed=100))
    board(event("task", "fire", {"task": 0, "online_accuracy": 0.6}, identity="the chosen one"))
    lines = [line.split() for line in drawn(board).splitlines()]
    assert ["fire", "40"] in lines
    assert ["fire", "(tuned)", "60"] in lines


def test_a_log_has_plain_lines_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with live(Board("labels", {"fire": "fire"})) as watch:
        watch(event("started", "fire", {}, done=0, left=None))
        for _ in range(5):
            watch(event("progress", "fire", {}, done=0, left=40.0))
        watch(event("task", "fire", {"task": 0, "online_accuracy": 0.4}, done=1, left=30.0))
        watch(event("refused", "fire-qk", {"kind": "end", "refused": "no attention"}, done=2, left=20.0))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "labels: 0 of 4 runs"
    assert lines[1].startswith("labels: 1 of 4 runs, ") and lines[1].endswith("s left")
    assert lines[2] == "refused: fire-qk on labels: no attention"
    assert len(lines) == 4 and "\x1b" not in "".join(lines)


def test_the_bar_never_goes_back() -> None:
    board = Board("labels", {"fire": "fire"})
    shares = []
    for left in (10.0, 1.0, 50.0, 0.1):
        board(event("progress", "fire", {}, left=left))
        shares.append(board.share())
    assert shares == sorted(shares)


def test_results_are_as_the_table_has_them() -> None:
    """The found's own statistics must be those of the study's table."""
    made = results()
    (found,) = made.comparisons.values()
    for row in made.table():
        assert found.interval(row["arm"]).mean == pytest.approx(row["mean"])
        difference = found.against(row["arm"], "nothing")
        if row["arm"] != "nothing":
            assert difference is not None and difference.low == pytest.approx(row["difference_low"])


def test_what_tuning_chose_is_said() -> None:
    def chosen(place: int, **options: Any) -> TunedChoice:
        return TunedChoice(Arm("fire", "FIRE", options), place, (), None)

    choices = {
        ("labels", "nothing"): chosen(0),
        ("labels", "fire"): chosen(2, scale="nearest"),
        ("x", "dash"): chosen(0),
    }
    made = replace(results(tuned=("nothing", "fire")), choices=choices)
    (said,) = [sentence for sentence in sentences(made.comparisons["labels"]) if sentence.startswith("Tuning")]
    assert said.endswith("chose: doing nothing: its default; FIRE: scale=nearest.")
