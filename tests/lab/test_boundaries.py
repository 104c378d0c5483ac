"""The moment between two tasks: the same network as in a run, and every arm goes on from it without changing it."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("sklearn", reason='pip install "torch-rekindle[lab]"')

from rekindle.lab.arms import ARMS
from rekindle.lab.boundaries import reach
from rekindle.lab.execution import execute
from rekindle.lab.settings import Run, Setting

STREAM = {"data": "digits", "count": 96, "tasks": 4, "epochs": 2}
TINY = Setting("tiny", "random-labels", "mlp", STREAM, {"width": [16, 16]}, batch=16, health=False)


@pytest.mark.parametrize("new_optimizer", [True, False])
def test_going_on_without_a_remedy_is_the_run_itself(new_optimizer: bool) -> None:
    setting = replace(TINY, new_optimizer=new_optimizer)
    rows = [row for row in execute(Run(setting, ARMS["nothing"], 3)) if row["kind"] == "task"]
    boundary = reach(setting, 3)
    assert [row["online_loss"] for row in boundary.rows] == [row["online_loss"] for row in rows[:3]]
    for _ in range(2):  # the first time has changed nothing
        assert boundary.follow(ARMS["nothing"])["online_loss"] == rows[3]["online_loss"]
        boundary.follow(ARMS["full-reset"])


def test_arms_differ_and_the_boundary_stays_as_it_is() -> None:
    boundary, numbers = reach(TINY, 0, 2), torch.get_rng_state()
    weights = {name: tensor.clone() for name, tensor in boundary.model.state_dict().items()}
    losses = {name: boundary.follow(ARMS[name])["online_loss"] for name in ("nothing", "fire", "full-reset")}
    assert len(set(losses.values())) == 3
    assert all(torch.equal(weights[name], tensor) for name, tensor in boundary.model.state_dict().items())
    assert torch.equal(numbers, torch.get_rng_state())
    assert boundary.on_to(3).index == 3 and boundary.steps == 12


def test_what_is_asked_with_comes_from_the_next_task() -> None:
    judged = reach(replace(TINY, stream="permuted-inputs", headline="test_accuracy"), 0)
    assert (len(judged.batches), len(judged.held_out), len(judged.old_batches)) == (5, 1, 8)
    assert not reach(TINY, 0, 1).held_out
    with pytest.raises(ValueError, match="boundaries 1 to 3"):
        reach(TINY, 0, 9)
