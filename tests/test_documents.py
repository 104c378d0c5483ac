"""Every Python snippet of the README and the docs runs as written, and every link leads somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import rekindle

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ALONE = {"trainers.md", "agents.md"}  # whole scripts with trainers, in tests/integrations/test_page.py


class MyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)


def world() -> dict[str, object]:
    """What the snippets take for granted: a model with attention, its optimizer, data and a loss."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 16), encoder, nn.Conv1d(6, 6, 3, padding=1), nn.Linear(16, 4))
    batches = [torch.randn(5, 6, 8) for _ in range(2)]
    return {
        "rekindle": rekindle,
        "torch": torch,
        "nn": nn,
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "batches": batches,
        "loss": lambda model, batch: model(batch).square().mean(),
        "earlier": rekindle.health(model, batches),
        "w": torch.randn(3, 20, 30),
        "metrics": {"loss": 1.0, "dormant": 0.7},
        "train": lambda: None,
        "MyAttention": MyAttention,
    }


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)


# What a snippet names that the little model above does not have.
ELSEWHERE = {
    'targets="paper-cnn"': 'targets="paper-cnn", include=["0.weight"]',
    'targets=["blocks.*.mlp.*"], exclude=["blocks.0.*"]': 'targets=["1.linear*"], exclude=["1.linear2*"]',
    "targets=torch.nn.Conv2d": "targets=torch.nn.Conv1d",
}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in ALONE], ids=lambda page: page.name)
def test_the_snippets_run(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # trainers write beside the program
    names = world()
    for code in snippets(page):
        for there, here in ELSEWHERE.items():
            code = code.replace(there, here)
        exec(compile(code, str(page), "exec"), names)


def without_numbers(line: str) -> str:
    """A printed line without what another CPU or another day changes."""
    return re.sub(r"[\d.]+", "#", line)


def test_the_readme_is_read_in_five_minutes() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    assert len(page) <= 7_500
    words = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]*>|\d{4}\.\d{5}|2026", "", page, flags=re.S)
    assert len(re.findall(r"\d[\d.,]*", words)) <= 12
    assert "make demo" in page and "make test" in page


def test_the_quickstart_prints_what_the_readme_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    page = (ROOT / "README.md").read_text("utf-8")
    exec(compile(snippets(ROOT / "README.md")[0], "README.md", "exec"), {})
    printed = list(map(without_numbers, capsys.readouterr().out.splitlines()))
    shown = re.findall(r"```text\n(.*?)```", page, flags=re.S)[0].splitlines()
    at = 0
    for line in map(without_numbers, shown):
        if line not in ("", "…"):
            assert line in printed[at:], f"the README shows {line!r}"
            at = printed.index(line, at) + 1


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "LOG.md"], ids=lambda page: page.name)
def test_words_are_plain(page: Path) -> None:
    """What readers from elsewhere stumbled over, and British forms of what is spelled the American way here."""
    instead = "left alone|leaves? the [a-z ]+ alone|certified|proof|rivals|looks tired|matrix a tap|line a [a-z]+"
    british = r"behaviours?|neighbours?|colours?|(?:normal|general|regular|initial)is(?:e|ed|es|ing|ation)"
    found = re.findall(rf"\b(?:{instead}|{british})\b", re.sub(r"`[^`]*`", "", page.read_text(encoding="utf-8")))
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_markdown_inside_of_html_is_rendered() -> None:
    """Else the site shows `[word](page)` as it stands here."""
    for page in (ROOT / "docs").rglob("*.md"):
        assert not re.search(r"<details(?! markdown)", page.read_text("utf-8")), page.name


def test_the_site_has_no_markdown_left_in_it(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert [str(page) for page in tmp_path.rglob("*.html") if "](" in page.read_text("utf-8")] == []


def test_the_reference_has_every_public_name() -> None:
    listed = set(re.findall(r"^::: (\S+)", (ROOT / "docs" / "reference.md").read_text("utf-8"), flags=re.M))
    elsewhere = {
        "scales": "projection.scales.Scale",
        "bounds": "measures.bounds",
        "blocks": "blocks.families.register",
    }
    elsewhere |= {name: f"monitoring.{name}" for name in ("sinks", "triggers")}
    for name in (*rekindle.__all__, *rekindle._MODULES):
        assert f"rekindle.{elsewhere.get(name, name)}" in listed, name


PUBLIC = {
    **{f"rekindle.{name}": getattr(rekindle, name) for name in rekindle.__all__},
    **{f"rekindle.methods.{name}": getattr(rekindle.methods, name) for name in rekindle.methods.__all__},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_says_what_each_argument_is(name: str) -> None:
    """In the form that the reference renders as a list: `Args:`, or `Attributes:` of what a verb returns."""
    public = PUBLIC[name]
    if not callable(public):
        return
    parameters = [p.name for p in inspect.signature(public).parameters.values() if p.kind not in (p.VAR_KEYWORD,)]
    section = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", inspect.getdoc(public) or "", flags=re.M)
    said = re.findall(r"^    (\w+):", section[1] if section else "", flags=re.M)
    assert [p for p in parameters if p not in ("self", *said)] == []


def test_examples_in_docstrings_are_rendered_as_code() -> None:
    pytest.importorskip("griffe", reason="the docs extra is not installed")
    made = loaded(ROOT / "docs" / "extensions" / "doctests.py")
    assert made.fenced("A.\n\n>>> 1\n1\n\nB.") == "A.\n\n```pycon\n>>> 1\n1\n```\n\nB."


def loaded(file: Path) -> ModuleType:
    """A script of the docs as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notebook_is_the_tutorial() -> None:
    """Its cells are the page's snippets, which run above; make it again with docs/figures/tutorial.py."""
    figures = loaded(ROOT / "docs" / "figures" / "tutorial.py")
    assert figures.NOTEBOOK.read_text("utf-8") == figures.notebook(figures.PAGE.read_text("utf-8"))


def test_words_of_the_glossary_become_links_once() -> None:
    glossary = loaded(ROOT / "docs" / "extensions" / "glossary.py")
    assert glossary.linked("`DfI` and DfI, DfI", "evidence/a.md") == "`DfI` and [DfI](../glossary.md#dfi), DfI"
    heads = re.findall(r"^### (.+)$", glossary.GLOSSARY.read_text("utf-8"), flags=re.M)
    assert {"DfI", "SFE", "Dormant", "Effective rank", "∂ dormant", "Frame", "Angle out", "Receipt"} <= set(heads)
    assert len(glossary.terms()) >= len(heads)


def test_messages_of_troubleshooting_are_there() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    sources = "\n".join(file.read_text("utf-8") for file in (ROOT / "src").rglob("*.py"))
    messages = re.findall(r"^\| `(.+?)` \|", page, flags=re.M)
    assert len(messages) >= 20
    assert [message for message in messages if message not in sources] == []


def test_every_recipe_names_a_program_that_is_there() -> None:
    named = re.findall(r"`(examples/\w+\.py)`", (ROOT / "docs" / "recipes.md").read_text("utf-8"))
    assert set(named) == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}


def test_nobody_is_told_to_install_the_other_rekindle() -> None:
    """The name belongs to another project on PyPI; `rekindle.extras` is the one place that knows ours."""
    files = [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    wrong = [str(file) for file in files if re.search(r'pip install "?rekindle\b', file.read_text("utf-8"))]
    assert wrong == []
    named = [
        file.name for file in (ROOT / "src").rglob("*.py") if re.search(r'"torch-rekindle"', file.read_text("utf-8"))
    ]
    assert named == ["extras.py"]
