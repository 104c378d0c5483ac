"""Sharded models on real processes (torchrun, gloo); the cases are in `*_cases.py`, many to a launch."""

from __future__ import annotations

import pytest
from launching import cases, launch


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str | None]]:
    return launch(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str | None]]:
    return launch(4, tmp_path_factory.mktemp("four"))


def well(results: dict[str, list[str | None]], name: str, processes: int) -> None:
    assert len(results[name]) == processes
    for rank, error in enumerate(results[name]):
        assert error is None, f"rank {rank}: {error}"


@pytest.mark.parametrize("name", cases(2))
def test_on_two_processes(two: dict[str, list[str | None]], name: str) -> None:
    well(two, name, 2)


@pytest.mark.parametrize("name", cases(4))
def test_on_four_processes(four: dict[str, list[str | None]], name: str) -> None:
    well(four, name, 4)
