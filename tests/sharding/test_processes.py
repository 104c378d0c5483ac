"""Sharded models on real processes (torchrun, gloo); the cases are in `*_cases.py`, many to a launch."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import cases, launch, surroundings

# All cases run on four processes; these differ on two, where every cut is another.
ON_TWO = [
    "case_every_layout_in_one_dimension",
    "case_tall_matrices_go_by_their_gram_matrices",
    "case_tall_matrices_end_where_one_process_ends",
    "case_fsdp2",
    "case_distributed_data_parallel_is_bit_identical",
    "case_every_weight_cut_by_rows_by_columns_or_copied",
    "case_tensor_parallel_plan_of_torch",
    "case_optimizer_state_is_reset",
    "case_zero_matrices_and_dead_experts_end_as_on_one_process",
    "case_nan_on_one_rank_only_raises_everywhere_and_changes_nothing",
    "case_errors_of_one_rank_under_tensor_parallel_alone",
    "case_batches_that_differ_within_a_tensor_parallel_group_are_named",
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str | None]]:
    return launch(2, tmp_path_factory.mktemp("two"), ON_TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str | None]]:
    return launch(4, tmp_path_factory.mktemp("four"))


def well(results: dict[str, list[str | None]], name: str, processes: int) -> None:
    assert len(results[name]) == processes
    for rank, error in enumerate(results[name]):
        assert error is None, f"rank {rank}: {error}"


@pytest.mark.parametrize("name", ON_TWO)
def test_on_two_processes(two: dict[str, list[str | None]], name: str) -> None:
    well(two, name, 2)


@pytest.mark.parametrize("name", cases(4))
def test_on_four_processes(four: dict[str, list[str | None]], name: str) -> None:
    well(four, name, 4)


@pytest.mark.parametrize("kind", ["killed", "stuck"])
def test_when_a_rank_dies_or_hangs_the_others_raise_within_the_time_out(tmp_path: Path, kind: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**surroundings(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [sys.executable, str(Path(__file__).parent / "dying.py"), str(tmp_path), kind]
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in (0, 1)]
    try:
        ranks[0].wait(timeout=200)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    result = json.loads((tmp_path / "0.json").read_text("utf-8"))
    assert "rank 0 lost its peers while" in result["error"]
    assert result["kept"]  # atomic=True put back what had been written
