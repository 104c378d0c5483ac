"""What people choose among: names, rates, horizons and several tasks."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from torch import nn

import rekindle
from rekindle.advice import progress as progress_module
from rekindle.advice.candidates import candidates_for, given_candidates
from rekindle.advice.progress import Progress
from rekindle.advice.trials import Question, Trial
from rekindle.methods import FIRE, LearningRate, Rewarm


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def data(count: int = 8, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(16, 8, generator=draw), torch.randint(4, (16,), generator=draw)) for _ in range(count)]


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_candidates_are_what_people_choose_among() -> None:
    names = [one.name for one in candidates_for(net())]
    assert {"nothing", "lr:0.33", "lr:3", "rewarm", "fire", "he-reset", "shrink-perturb"} <= set(names)
    calls = {one.name: one.call for one in candidates_for(net())}
    assert calls["fire"] == "rekindle.fire(model, optimizer)"
    for name, call in calls.items():  # what the answer says can be run as it stands
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        batches = data(1)
        exec(call.partition(", which")[0], {"rekindle": rekindle, **locals(), "loss": loss})
        if name == "lr:3":
            assert optimizer.param_groups[0]["lr"] == pytest.approx(3e-3)


def test_names_are_candidates_and_an_unknown_one_says_which_there_are() -> None:
    made = given_candidates(["fire", "lr:3", "he-reset", None])
    assert [one.name for one in made] == ["nothing", "fire", "lr:3", "he-reset"]
    assert isinstance(made[2].method, LearningRate) and not made[3].resets
    for wrong in ("lr:fast", "lr:-1", "fires"):
        with pytest.raises(ValueError, match="lr:"):
            given_candidates([wrong])


def test_a_learning_rate_is_applied_with_its_scheduler() -> None:
    """The rate is what helps a network that learns far too slowly, whatever the seeds."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    batches = [(x, x[:, :4].argmax(1)) for x, _ in data(8)]
    advice = rekindle.advise(
        model, batches, loss=loss, optimizer=optimizer, candidates=["lr:30"], epochs=10, workers=1, progress=False
    )
    assert advice.chosen == "lr:30" and advice.answer == "apply"
    assert advice.passes == 10 and "10.0 passes over your data" in str(advice)
    assert 0.5 < advice.price < 60 and "trainings of one" in str(advice)
    assert advice.lost is None and advice.to_dict()["lost"] is None
    advice.apply(model, optimizer, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3) and scheduler.base_lrs == pytest.approx([0.3])


@pytest.mark.parametrize("schedule", [None, lambda share: 1.0])
def test_trials_train_at_the_candidates_rate(schedule: object) -> None:
    model, optimizer = net(), torch.optim.SGD(net().parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    question = Question(model, optimizer, data(2), [], loss, schedule=schedule)  # type: ignore[arg-type]
    rates = {}
    for one in given_candidates([LearningRate(3.0), Rewarm(2.0, steps=1)]):
        trial = Trial(question, one, 0)
        seen: list[float] = []
        trial.optimizers[0].register_step_pre_hook(lambda each, *_, to=seen: to.append(each.param_groups[0]["lr"]))
        trial.advance(3, 3)
        rates[one.name] = [round(rate, 6) for rate in seen]
    assert rates == {"nothing": [0.1] * 3, "learning-rate": [0.3] * 3, "rewarm": [0.2, 0.1, 0.1]}


def test_several_tasks_apply_the_remedy_at_each_and_judge_the_last() -> None:
    class Counted(FIRE):
        applied = 0

        def __call__(self, *args: object, **options: object) -> object:  # type: ignore[override]
            type(self).applied += 1
            return super().__call__(*args, **options)  # type: ignore[arg-type]

    tasks = [data(4, seed) for seed in range(3)]
    options = {"loss": loss, "epochs": 4, "seeds": 2, "workers": 1, "progress": False}
    advice = rekindle.advise(net(), tasks=tasks, candidates=[Counted()], **options)  # type: ignore[arg-type]
    assert advice.horizon == 48 and Counted.applied == 2 * 3
    with pytest.raises(ValueError, match="new_batches"):
        rekindle.advise(net(), data(), tasks=tasks, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        rekindle.advise(net(), tasks=[data(), []], **options)  # type: ignore[arg-type]


def test_one_batch_gives_no_interval_and_so_no_answer() -> None:
    candidates = [rekindle.methods.FIRE(targets="auto", scale="paper")]
    advice = rekindle.advise(net(), data(1), loss=loss, candidates=candidates, steps=40, workers=1, progress=False)
    assert advice.answer == "cannot tell" and "all seeds gave the same run" in advice.sentence


def test_progress_is_plain_lines_outside_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 6.0, 7.0, 12.0])
    monkeypatch.setattr(progress_module, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    bar = Progress(None)
    for step in range(1, 5):
        bar.show(f"step {step}", step / 4)
    bar.close()
    assert written.getvalue() == "step 2, about 6 s left\nstep 4, about 0 s left\n"
