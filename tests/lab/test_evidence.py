"""The pages of evidence say what their stored runs say."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lab_fakes import Inline
from rekindle.lab.arms import ARMS
from rekindle.lab.execution.store import pack, unpacked
from rekindle.lab.execution.workers import TARGET
from rekindle.lab.settings import Setting
from rekindle.lab.study import Study
from rekindle.lab.views.atlas import Atlas

HOME = Path(__file__).resolve().parents[2]
PAGES = ("fitting", "norms", "text", "retention", "agents", "instruments")
TINY = Setting("tiny", "random-labels", "mlp", {"data": "digits", "count": 40, "tasks": 2, "epochs": 1}, {"width": 8})


@pytest.fixture(scope="module")
def evidence() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evidence_of_the_pages", HOME / "studies" / "evidence.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [*PAGES, "../units"])
def test_a_page_is_what_its_runs_say(name: str, evidence: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "picture", lambda name, atlas: None)
    text = (HOME / "docs" / "evidence" / f"{name}.md").read_text("utf-8")
    assert text.count("<!-- table: ") == text.count("<!-- end -->") >= 1
    assert evidence.page(text) == text, "run studies/evidence.py"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_a_question_an_answer_a_picture_and_a_command(name: str) -> None:
    text = (HOME / "docs" / "evidence" / f"{name}.md").read_text("utf-8")
    answer = text.split("**Answer.**")[1].split("\n\n")[0]
    assert "**Question.**" in text and "![" in text and "## Run it again" in text
    assert answer.count(". ") <= 1, "two sentences"


def test_the_default_of_fire_is_a_cell_of_the_factorial_on_every_stream(evidence: ModuleType) -> None:
    """Its plan is that cell's, so that the cell's runs are the default's."""
    cells = {name: evidence.default_cell("factorial", name)[1] for name in evidence.results("factorial").comparisons}
    plain = dict.fromkeys(("mlp", "cnn"), "nearest-he-heads")
    normal = ("mlp-layernorm", "cnn-batchnorm", "warm-start", "class-incremental", "text")
    assert cells == plain | dict.fromkeys(normal, "nearest-paper-heads")


def test_figures_in_sentences_are_those_of_stored_runs(evidence: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HOME / "studies")
    monkeypatch.setitem(sys.modules, "evidence", evidence)
    figures = importlib.import_module("figures")
    assert {path.name: wrong for path in figures.pages() if (wrong := figures.unfounded(path))} == {}


def test_an_archive_holds_the_runs_of_its_study_and_the_same_bytes(tmp_path: Path) -> None:
    made = Study("s", [TINY], [ARMS["nothing"], ARMS["fire"]], [0, 1, 2], tmp_path / "s")
    here = made.run(Inline(TARGET))
    identities = [run.identity for run in made.runs()]
    files = [tmp_path / "a.tar.xz", tmp_path / "b.tar.xz"]
    assert [pack(made.store, identities, file) for file in files] == [6, 6]
    assert files[0].read_bytes() == files[1].read_bytes()
    with unpacked(files[0]) as folder:
        there = Study.load(folder).results()
    for row, kept in zip(here.table(), there.table(), strict=True):
        assert row["arm"] == kept["arm"] and row["mean"] == pytest.approx(kept["mean"], rel=1e-4)
    atlas = Atlas.of(there.comparisons.values())
    assert atlas.remedies == ("fire",) and atlas.cells["fire", "tiny"].gain == pytest.approx(
        100 * there.comparisons["tiny"].against("fire", "nothing").mean
    )
    assert "fire" in atlas.markdown() and atlas.picture().file().startswith("<svg")
