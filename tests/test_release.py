"""What a release is made of: one version, one address, a page that renders anywhere, a Makefile that repairs."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import rekindle

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
README = (ROOT / "README.md").read_text("utf-8")


def program(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_version_has_one_place() -> None:
    release = program(".ci/release.py")
    assert release.version() == program("setup.py").version() == rekindle.__version__
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    wrong = release.faults(f"v{rekindle.__version__}")
    assert all("unreleased" in each for each in wrong), wrong
    assert release.faults("v0.0.0")[0] == f"the tag is v0.0.0, the package is {rekindle.__version__}"


def test_the_address_has_one_place() -> None:
    source = PROJECT["urls"]["Source"]
    for file in ("mkdocs.yml", "CITATION.cff"):
        assert source in (ROOT / file).read_text("utf-8"), file
    assert all(address.startswith((source, PROJECT["urls"]["Documentation"])) for address in PROJECT["urls"].values())


def test_the_page_of_the_package_renders_away_from_the_repository() -> None:
    source = PROJECT["urls"]["Source"]
    page = program("setup.py").page(README, source, "v1")
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.S | re.M)
    targets = re.findall(r"\]\(([^)\s]+)", prose)
    assert [target for target in targets if not re.match(r"\w+:|#", target)] == []
    ours = [target.removeprefix(source) for target in targets if target.startswith(source)]
    for kind, path in (re.fullmatch(r"/(raw|blob)/v1/([^#]+)(?:#.*)?", each).groups() for each in ours):  # type: ignore[union-attr]
        assert (ROOT / path).exists(), path
        assert (kind == "raw") == (Path(path).suffix in (".svg", ".png"))
    assert len(ours) > 10
    assert "[!" not in prose.replace("[![", "")
    assert re.findall(r"^```.*?^```$", page, flags=re.S | re.M) == re.findall(
        r"^```.*?^```$", README, flags=re.S | re.M
    )


def test_a_source_distribution_has_everything_that_is_kept() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    tops = {Path(file).parts[0] for file in listed if file}
    if not tops:
        pytest.skip("this is no clone")
    manifest = (ROOT / "MANIFEST.in").read_text("utf-8")
    by_itself = {"MANIFEST.in", "README.md", "LICENSE", "pyproject.toml", "setup.py", "src", ".gitignore"}
    missing = {top for top in tops - by_itself if top not in manifest}
    assert missing <= {"constraints.txt", "constraints-newest.txt"}  # constraints*.txt


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder with the Makefile and a .venv whose Python says that it is 3.11.7 of /a."""
    if shutil.which("make") is None:
        pytest.skip("make is not here")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for stamp in (".made", ".dev"):
        (tmp_path / ".venv" / stamp).touch()
    python(tmp_path / ".venv/bin/python", "echo 3.11.7 /a")
    return tmp_path


def python(path: Path, line: str) -> str:
    path.write_text(f"#!/bin/sh\n{line}\n", "utf-8")
    path.chmod(0o755)
    return str(path)


def todo(folder: Path, *arguments: str) -> str:
    line = ["make", "--dry-run", "test", *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_make_leaves_an_environment_as_it_is(made: Path) -> None:
    assert "rm -rf .venv" not in todo(made)
    assert "rm -rf .venv" not in todo(made, f"PYTHON={python(made / 'same', 'echo 3.11.7 /a')}")


def test_make_honors_another_python_after_the_environment_was_made(made: Path) -> None:
    other = python(made / "other", "echo 3.12.1 /b")
    assert f"{other} -m venv .venv" in todo(made, f"PYTHON={other}")


def test_make_repairs_an_environment_whose_python_does_not_start(made: Path) -> None:
    python(made / ".venv/bin/python", "exit 1")
    assert "rm -rf .venv" in todo(made)


def test_make_repairs_an_environment_that_was_left_half_made(made: Path) -> None:
    (made / ".venv/.made").unlink()
    assert "rm -rf .venv" in todo(made)
