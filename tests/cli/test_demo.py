"""`rekindle demo`, made short: it runs all arms, writes the page and the picture, and says what it saw."""

import json
import re
from pathlib import Path

import pytest

from command_line import one_line, run
from lab_results import results
from rekindle.cli import demo
from rekindle.lab.study import Study


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHORTER", {"count": 64, "tasks": 2, "epochs": 1})


@pytest.mark.usefixtures("short")
def test_demo_compares_eight_remedies(tmp_path: Path) -> None:
    page, picture = tmp_path / "deep" / "demo.html", tmp_path / "demo.svg"
    result = run("demo", "--seeds", "1", "--html", page, "--picture", picture)
    assert result.exit_code == 0, result.output
    text = result.stdout
    for arm in (
        "nothing",
        "full-reset",
        "he-reset",
        "shrink-perturb",
        "dash",
        "redo",
        "l2-init",
        "fire",
        "fire-paper",
    ):
        assert arm in text
    assert "Doing nothing went from" in text
    assert any(said in text for said in ("FIRE was best", "FIRE did not win", "A variant of FIRE was best"))
    assert str(page) in result.stderr.replace("\n", "")
    assert "rekindle demo --seeds 1" in re.sub("</?span>", "", page.read_text("utf-8"))
    assert picture.read_text("utf-8").startswith("<svg")
    assert run("demo", "--help").stdout.count("rekindle demo") >= 2


def test_demo_can_be_read_by_programs_and_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run_live", lambda *_, **__: results(ends={"nothing": 0.2, "fire": 0.4}))
    page = tmp_path / "demo.html"
    page.write_text("old", "utf-8")
    result = run("demo", "--seeds", "1", "--methods", "nothing,fire", "--html", page, "--json")
    assert [row["arm"] for row in json.loads(result.stdout)["table"]] == ["nothing", "fire"]
    assert page.read_text("utf-8").startswith("<!doctype html>")


def test_demo_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    assert "did you mean 'fire'?" in one_line(run("demo", "--methods", "fier", "--html", tmp_path / "a.html")).replace(
        "\n", " "
    )


def test_stopping_the_demo_says_how_to_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Study, "run", interrupted)
    result = run("demo", "--html", tmp_path / "a.html")
    assert result.exit_code == 130
    assert "Start again with: rekindle demo" in result.stderr
    assert not (tmp_path / "a.html").exists()
