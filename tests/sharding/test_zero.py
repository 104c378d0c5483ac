"""DeepSpeed ZeRO 1-3 on two real processes; skipped where DeepSpeed is not installed.

It was run with deepspeed 0.19.8 on a CPU, outside of the environment of the other tests:

    pip install --target DIR --no-deps deepspeed hjson py-cpuinfo ninja einops msgpack
    PYTHONPATH=DIR PATH=DIR/bin:$PATH TORCH_EXTENSIONS_DIR=DIR/extensions pytest tests/sharding/test_zero.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import TIMEOUT, surroundings

CASES = [(stage, dtype) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]
CHECKS = [
    "fire ends where one process ends",
    "moments of changed weights are zero, of others not",
    "the next forward pass uses the new weights",
    "all ranks hold the same",
    "training goes on from there",
    "a step count of single parameters is refused and nothing changes",
    "an error on one rank is raised by all and nothing changes",
    "other methods refuse with a way that works",
    "momentum without a count starts afresh",
    "a parameter group that changes as a whole starts afresh",
    "biases are zeroed",
    "a part that is not finite is found before anything is written",
    "an error in the middle is raised by all with what was written",
    "a rank holds three whole parameters at most",
    "a forward pass inside is refused before anything is written",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    folder, here = tmp_path_factory.mktemp("zero"), Path(__file__).parent
    environment = surroundings()
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    environment["DS_ACCELERATOR"] = "cpu"
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(folder))  # a build that was killed leaves a lock in a shared one
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(here / "zero_worker.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    paths = [folder / f"{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in paths), done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(path.read_text("utf-8")) for path in paths]


@pytest.mark.parametrize(("stage", "dtype"), CASES)
@pytest.mark.parametrize("check", CHECKS)
def test_zero(results: list[dict[str, str | None]], stage: int, dtype: str, check: str) -> None:
    for rank, found in enumerate(results):
        assert found[f"{stage} {dtype} {check}"] is None, f"rank {rank}: {found[f'{stage} {dtype} {check}']}"
