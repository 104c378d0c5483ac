"""The small version of benchmarks/faults.py: seeded damages, kills and pairs of commands, judged by other software."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import damage
import kills

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forked processes"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    logging.disable(logging.CRITICAL)
    folder = tmp_path_factory.mktemp("templates")
    damage.make_templates(folder)
    yield folder
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", damage.FORMATS)
def test_a_damaged_file_is_refused_or_fired_at_as_the_receipt_says(kind: str, templates: Path, tmp_path: Path) -> None:
    for seed in range(2 if kind == "config" else 6):  # transformers are slow
        assert damage.Case(kind, seed, tmp_path / str(seed), templates).judged() == "", seed


def test_the_referee_sees_what_is_wrong(templates: Path, tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    u, _, vh = torch.linalg.svd(weight.double(), full_matrices=False)
    right = ((6 / 4) ** 0.5 * (u @ vh)).float()
    assert damage.not_projected(weight, right) == ""
    assert "no isometry" in damage.not_projected(weight, 1.1 * right)
    assert "nearest" in damage.not_projected(weight, -right)


@pytest.mark.parametrize("kind", ["safetensors", "sharded"])
def test_a_killed_command_loses_nothing(kind: str, tmp_path: Path) -> None:
    case = kills.KillCase(kind, "in place", tmp_path / "job")
    draw = random.Random(0)
    assert [case.tried(draw)[1] for _ in range(3)] == [""] * 3
    assert kills.readable(case.expected, case.folder / "in") == ""


@pytest.mark.parametrize("way", kills.PairCase.WAYS)
def test_two_commands_at_once_never_mix(way: str, tmp_path: Path) -> None:
    case = kills.PairCase("sharded" if way.startswith("in place") else "safetensors", tmp_path / "pair")
    assert case.tried(way, random.Random(0)) == ""
