"""Trials that learn as one give what each gives by itself, up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rekindle.advice import executors, together
from rekindle.advice.candidates import Candidate, given_candidates
from rekindle.advice.executors import Trials
from rekindle.advice.stacked_layers import Unstackable
from rekindle.advice.stacking import Stack
from rekindle.advice.tasks import default_loss
from rekindle.advice.trials import Question, Trace
from rekindle.methods import FIRE, FullReset, L2Init, LearningRate, ReDo, Rewarm, WeightClip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 10))


def cnn() -> nn.Module:
    body = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10)]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *body)


class Own(nn.Module):
    """A weight of its own, which only vmap can do for many."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 10) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def twice(model: nn.Module, batch: Any) -> Tensor:
    """A loss that calls the model more than once."""
    return functional.cross_entropy(model(batch[0]), batch[1]) + model(-batch[0]).square().mean()


OPTIMIZERS = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
}


def run(question: Question, candidates: list[Candidate], stacked: bool, monkeypatch: pytest.MonkeyPatch) -> list[Trace]:
    """All trials with two seeds; how many stacks were made is asserted."""
    made: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(together.TrialStack, "__init__", counted(together.TrialStack.__init__, made))
        if not stacked:
            patch.setattr(executors, "kind_of", lambda trial: None)
        trials = Trials(question, candidates, [0, 1])
        for steps in (1, 4, 6, 5):
            found = trials.advance(range(trials.count), steps, 16)
    assert bool(made) == stacked
    return list(found.values())


def counted(plain: Any, made: list[int]) -> Any:
    def init(self: Any, trials: Any) -> None:
        plain(self, trials)
        made.append(len(trials))

    return init


@pytest.mark.parametrize("loss", [default_loss, twice])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("build", [mlp, cnn, Own])
def test_together_is_what_each_learns_alone(
    build: Any, optimizer: str, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = build()
    x, y = torch.randn(90, 64), torch.randint(10, (90,))
    batches = list(zip(x.split(16), y.split(16), strict=True))  # the last one is smaller
    given = [LearningRate(3.0), Rewarm(2.0, steps=8), L2Init(0.1), WeightClip(2.0)]
    candidates = given_candidates([*given, *([FIRE(), FullReset("he"), ReDo()] if build is not Own else [])])
    options = {"held_out": batches[:2], "schedule": lambda share: min(1.0, 4 * share), "clip": 0.5}
    question = Question(model, OPTIMIZERS[optimizer](model), batches, [], loss, **options)
    one, other = (run(question, candidates, stacked, monkeypatch) for stacked in (True, False))
    for mine, theirs in zip(one, other, strict=True):
        assert mine.error == theirs.error
        assert mine.losses == pytest.approx(theirs.losses, rel=2e-3)
        assert [step for step, _ in mine.looks] == [step for step, _ in theirs.looks]
        assert [loss for _, loss in mine.looks] == pytest.approx([loss for _, loss in theirs.looks], rel=5e-3)


def test_a_loss_that_leaves_the_graph_is_not_done_for_many() -> None:
    stack = Stack([nn.Linear(2, 1) for _ in range(2)])
    with pytest.raises(Unstackable):
        stack.check(lambda model, x: model(x).mean() * float(model(x).mean()), [torch.ones(4, 2)] * 2)
