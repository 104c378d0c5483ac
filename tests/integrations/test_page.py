"""The scripts of docs/trainers.md and docs/agents.md run as written, from first to last, in a folder of their own."""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from pathlib import Path

import pytest

PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("trainers.md", "agents.md")]
NEEDS = {
    "accelerate": ("accelerate",),
    "transformers": ("transformers",),
    "LoRA": ("transformers", "peft"),
    "TRL": ("transformers", "trl", "datasets"),
    "Lightning": ("lightning", "sklearn"),
    "Ignite": ("ignite", "sklearn", "lightning"),
    "stable-baselines3": ("stable_baselines3",),
}


def sections() -> list[tuple[str, str]]:
    parts = re.split(r"^## (.*)$", "\n".join(["", *(page.read_text("utf-8") for page in PAGES)]), flags=re.M)
    titled = zip(parts[1::2], parts[2::2], strict=True)
    return [(title, code) for title, text in titled for code in re.findall(r"```python\n(.*?)```", text, flags=re.S)]


@pytest.fixture(scope="module")
def names() -> dict[str, object]:
    return {"__name__": "page"}


RUN: list[int] = []  # scripts that this process has run: another process may have had the earlier ones


def missing(title: str) -> list[str]:
    return [package for package in NEEDS.get(title, ()) if importlib.util.find_spec(package) is None]


@pytest.mark.parametrize(
    "place", range(len(sections())), ids=[f"{title}-{at}" for at, (title, _) in enumerate(sections())]
)
def test_the_script_runs(place: int, names: dict[str, object], tmp_path: Path) -> None:
    if packages := missing(sections()[place][0]):
        pytest.skip(f"needs {', '.join(packages)}")
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for at, (title, code) in enumerate(sections()[: place + 1]):
                if at not in RUN and not missing(title):
                    exec(compile(code, title, "exec"), names)
                    RUN.append(at)
    finally:
        os.chdir(before)
