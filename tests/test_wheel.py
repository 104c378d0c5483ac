"""A stranger's first minute: the wheel in an environment that has torch and what torch needs, and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What `pip install torch-rekindle` brings: torch, numpy, safetensors, and what those ask for in turn.
FIRST = ("torch", "numpy", "safetensors")


def needed() -> set[str]:
    """Distributions that the first ones need here, themselves included."""
    found: set[str] = set()
    waiting = list(FIRST)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            requirement = re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0]
            try:
                importlib.metadata.distribution(requirement)
            except importlib.metadata.PackageNotFoundError:
                continue
            if "extra ==" not in line:
                waiting.append(requirement)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that stands for the site-packages of a fresh environment: links to torch and co., and the wheel."""
    pytest.importorskip("setuptools")
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in (
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "src",
    ):  # a copy: the build leaves folders behind
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    build = "from setuptools.build_meta import build_wheel; import sys; print(build_wheel(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", build, str(work)], cwd=source, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr[-2000:]
    packages = work / "site-packages"
    packages.mkdir()
    with zipfile.ZipFile(next(work.glob("torch_rekindle-*.whl"))) as wheel:
        wheel.extractall(packages)
    for name in needed():
        distribution = importlib.metadata.distribution(name)
        tops = {Path(file).parts[0] for file in distribution.files or () if ".." not in Path(file).parts}
        for top in tops - {"__pycache__"}:
            there = Path(str(distribution.locate_file(top)))
            if there.exists() and not (packages / top).exists():
                (packages / top).symlink_to(there)
    return packages


def bare_python(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # -S: no site-packages of this environment; -s: none of the user's. The wheel's folder is all there is.
    known = {"PATH": os.environ["PATH"], "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-S", "-s", *arguments]
    return subprocess.run(
        line, capture_output=True, text=True, env=known, cwd=packages.parent, timeout=300, check=False
    )


def test_the_quickstart_runs_with_torch_alone(bare: Path) -> None:
    done = bare_python(bare, str(ROOT / "examples" / "quickstart.py"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "verdict: act" in done.stdout and "fire: 3 parameters" in done.stdout


def test_nothing_optional_is_there_and_nothing_of_the_source_tree(bare: Path) -> None:
    code = (
        "import importlib.util as u, rekindle; print(rekindle.__file__)\n"
        "print([n for n in ('typer', 'rich', 'pandas', 'scipy', 'sklearn', 'transformers') if u.find_spec(n)])"
    )
    file, optional = bare_python(bare, "-c", code).stdout.splitlines()
    assert Path(file).is_relative_to(bare)
    assert optional == "[]"


def test_the_command_says_what_to_install(bare: Path) -> None:
    done = bare_python(bare, "-m", "rekindle", "--help")
    assert done.returncode == 2
    assert done.stderr.strip() == 'the command line needs rich: pip install "torch-rekindle[cli]"'


def test_every_page_and_script_is_in_the_wheel(bare: Path) -> None:
    for file in (ROOT / "src" / "rekindle").rglob("*"):
        if file.is_file() and file.suffix in (".py", ".html", ".css", ".js", ".typed"):
            assert (bare / "rekindle" / file.relative_to(ROOT / "src" / "rekindle")).is_file(), file
