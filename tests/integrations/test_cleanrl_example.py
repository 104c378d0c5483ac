"""The plain DQN loop of examples/cleanrl_dqn.py runs, and its remedy acts at every switch."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason='pip install "torch-rekindle[rl]"')

FILE = Path(__file__).parents[2] / "examples" / "cleanrl_dqn.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("cleanrl_dqn", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cleanrl_dqn"] = module
    spec.loader.exec_module(module)
    return module


def test_the_plain_loop_runs(capsys: pytest.CaptureFixture[str]) -> None:
    made = example()
    small = {"tasks": 2, "steps": 200, "starts": 60, "width": 16, "batch": 16}
    found = {remedy: made.learn(made.Options(remedy=remedy, **small)) for remedy in ("nothing", "fire")}
    assert found["nothing"][0] == found["fire"][0]
    assert all(math.isfinite(value) and value > 0 for values in found.values() for value in values)
    assert capsys.readouterr().out.count("task 1: 2 matrices projected") == 1
    assert len(FILE.read_text().splitlines()) <= 150
