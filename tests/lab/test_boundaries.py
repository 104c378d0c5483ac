"""The moment between two tasks: the same network as in a run, and every arm goes on from it without changing it."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("sklearn", reason='pip install "torch-rekindle[lab]"')

from rekindle.lab.arms import ARMS
from rekindle.lab.boundaries import reach
from rekindle.lab.execution.workers import execute
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
    assert (len(judged.batches), len(judged.held_out), len(judged.old_batches)) == (10, 1, 8)  # two passes
    assert judged.judge is not None and reach(TINY, 0, 1).judge is None
    assert not reach(TINY, 0, 1).held_out
    with pytest.raises(ValueError, match="boundaries 1 to 3"):
        reach(TINY, 0, 9)


def test_what_is_held_out_was_never_learned() -> None:
    stream = {"data": "digits", "count": 192, "chunks": 3, "epochs": 2}
    setting = replace(TINY, stream="continual", stream_options=stream, headline="test_accuracy")
    boundary = reach(setting, 0)
    earlier, held_out = setting.make_stream(0)[1].train.x, torch.cat([x for x, _ in boundary.held_out])
    trained = torch.cat([x for x, _ in boundary.batches])
    assert len(earlier) == 128 and len(held_out) == 32  # half of the last chunk
    for seen in (earlier, trained):
        assert not (held_out.flatten(1)[:, None] == seen.flatten(1)[None]).all(-1).any()


def test_a_task_can_be_learned_again_in_another_order_and_methods_have_their_start() -> None:
    boundary = reach(TINY, 0, 1)
    losses = [boundary.follow(ARMS["shrink-perturb"], again)["online_loss"] for again in (0, 1, 1)]
    assert losses[1] == losses[2] != losses[0]
    model, first = boundary.model, boundary.first
    assert first is not None and not torch.equal(next(first.parameters()), next(model.parameters()))
    boundary.method(ARMS["shrink-perturb"])(first)  # an error where no start is remembered


def test_the_schedule_is_by_share() -> None:
    boundary = reach(replace(TINY, warmup=0.5), 0, 1)
    assert boundary.schedule is not None and reach(TINY, 0, 1).schedule is None
    assert [boundary.schedule(share) for share in (0.25, 0.5, 1.0)] == pytest.approx([0.5, 1.0, 1.0], abs=1e-3)
