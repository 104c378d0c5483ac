"""Two processes under torchrun: models in shards, and DDP as transformers and Lightning set it up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rekindle
from trained import batches, loop, network

WORKER = Path(__file__).with_name("launched_worker.py")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("launched")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(WORKER), str(folder)], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def one(both: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    found = [each.get(name) for each in both]
    if found == [None, None]:
        pytest.skip(f"{name} is not installed")
    assert all(isinstance(each, dict) for each in found), found
    return found  # type: ignore[return-value]


def close(ours: list[Tensor], theirs: list[Tensor], atol: float = 2e-5) -> bool:
    return len(ours) == len(theirs) and all(torch.allclose(a, b, atol=atol) for a, b in zip(ours, theirs, strict=True))


def alone(fire_at: int | None, also: Callable[[Any], None] = lambda optimizer: None) -> list[Tensor]:
    """The same training in this process: weights and momenta."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(batches(8), start=1):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == fire_at:
            rekindle.fire(model, optimizer)
            also(optimizer)
    return [p.detach() for p in model.parameters()] + [
        optimizer.state[p]["momentum_buffer"] for p in model.parameters()
    ]


def forget(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()


@pytest.mark.parametrize(
    ("run", "expected", "firings"),
    [
        ("fire", lambda: alone(3), [3]),
        ("trigger", lambda: alone(1), [1]),
        ("guard", lambda: alone(None), [3]),
        ("joined", lambda: alone(3, forget), [3]),
        ("plain", lambda: alone(None), []),
    ],
)
def test_a_model_in_shards_ends_like_one_process(
    both: list[dict[str, Any]], run: str, expected: Callable[[], list[Tensor]], firings: list[int]
) -> None:
    for found in one(both, "shards"):
        assert found[f"{run} firings"] == firings
        assert found[f"{run} rolled back"] == [run == "guard"] * len(firings)
        assert found[f"{run} changed"] == [[] if run == "guard" else ["0.weight", "2.weight", "4.weight"]] * len(
            firings
        )
        assert close(found[run], expected())


def test_a_mirror_in_shards_gets_what_changed(both: list[dict[str, Any]]) -> None:
    model = network()
    loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batches(8)[:5])
    rekindle.fire(model)
    for found in one(both, "shards"):
        for index, (tensor, own, start) in enumerate(
            zip(found["mirror"], model.parameters(), network().parameters(), strict=True)
        ):
            assert torch.allclose(tensor, own if index in (0, 2, 4) else start / 2, atol=2e-5)


def test_methods_that_need_whole_weights_refuse_shards_by_name_before_training(both: list[dict[str, Any]]) -> None:
    for found in one(both, "shards"):
        for name, kind in {"redo": "ReDo", "l2-init": "L2Init", "compose": "ShrinkPerturb"}.items():
            assert found[f"refused {name}"].startswith(f"LayoutNotSupported: {kind} works on whole parameters")


def test_lightning_under_ddp(both: list[dict[str, Any]]) -> None:
    first, second = one(both, "lightning")
    assert first["strategy"] == "DDPStrategy" and first["firings"] == second["firings"] == [3, 6]
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))


def test_lightnings_ddp_ends_like_one_process_with_batches_of_both(both: list[dict[str, Any]]) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def between(step: int) -> None:
        if step in (3, 6):
            rekindle.fire(model, optimizer)

    loop(model, optimizer, batches(8) * 2, between)
    for found in one(both, "lightning"):
        assert close(found["weights"], list(model.parameters()), atol=1e-3)


def test_transformers_under_ddp(both: list[dict[str, Any]]) -> None:
    first, second = one(both, "transformers")
    assert first["wrapper"] == "DistributedDataParallel" and first["firings"] == second["firings"] == [3, 6]
    # The noise of the method was seeded differently on the ranks: that of rank 0 holds.
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
    assert not close(first["weights"], list(network().parameters()))
