"""Advice: the remedy that helps is chosen, and nothing is where nothing helps; the model stays as it is."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rekindle.advice.advising import HORIZONS, advise, seconds_of
from rekindle.advice.candidates import candidates_for, layer_groups
from rekindle.advice.trials import Question, Trial
from rekindle.methods import FIRE, FullReset, L2Init, WeightClip
from rekindle.receipt import Receipt


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def data(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(count)]


class Ruin:
    """Makes any network worse at once, and for long."""

    name = "ruin"

    def __call__(self, model: nn.Module, optimizer: Any = None, **_: Any) -> Receipt:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.0) if parameter.dim() > 1 else parameter.fill_(-5.0)
        return Receipt("ruin")


def lost() -> nn.Module:
    """No unit of the second layer fires."""
    model = net()
    with torch.no_grad():
        model[2].bias.fill_(-50.0)
    return model


def test_a_network_that_cannot_learn_is_told_to_start_again() -> None:
    model = lost()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    candidates = {"nothing": None, "full-reset": FullReset(), "ruin": Ruin()}
    advice = advise(model, data(), optimizer=optimizer, candidates=candidates, steps=100, workers=1)
    assert advice.answer == "apply" and advice.chosen == "full-reset"
    assert advice.choice is candidates["full-reset"] and "FullReset" in advice.call
    best = advice.rows[0]
    assert best.name == "full-reset" and best.difference_interval[1] < 0 and len(best.ranks) == len(HORIZONS)
    receipt = advice.apply(model, optimizer)
    assert receipt.method == "full-reset" and bool((model[2].bias > -1).all())


def test_a_network_that_learns_well_is_left_as_it_is() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    advice = advise(model, data(), optimizer=optimizer, candidates=[Ruin()], steps=60, workers=1)
    assert advice.answer == "do not" and advice.choice is None
    before = copy.deepcopy(model.state_dict())
    assert advice.apply(model, optimizer).changed == ()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_too_little_time_cannot_tell() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    advice = advise(model, data(), optimizer=optimizer, candidates=[FIRE()], steps=100_000, budget=1.0, workers=1)
    assert advice.answer == "cannot tell" and advice.choice is None and "budget" in advice.sentence
    assert advice.steps < advice.horizon


def test_the_original_is_untouched_and_seeds_are_common() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    functional.cross_entropy(model(data()[0][0]), data()[0][1]).backward()
    optimizer.step()
    new, old = data(), data(2)
    state, slots, random = (
        copy.deepcopy(model.state_dict()),
        copy.deepcopy(optimizer.state_dict()),
        torch.get_rng_state(),
    )
    advice = advise(model, new, old_batches=old, optimizer=optimizer, steps=20, workers=1, seeds=2)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    for before, after in zip(slots["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(random, torch.get_rng_state())
    assert {row.name for row in advice.rows} == {one.name for one in candidates_for(model)}
    assert str(advice).startswith(advice.sentence) and advice.to_dict()["rows"][0]["name"]


def test_doing_nothing_is_plain_training_with_the_optimizers_state() -> None:
    model, batches = net(), data(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def train(steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            value = loss(model, batches[0])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
        return losses

    train(3)
    trial = Trial(Question(model, optimizer, batches, [], loss), candidates_for(model)[0], seed=0)
    assert trial.advance(5).losses == pytest.approx(train(5), rel=1e-6)


@pytest.mark.parametrize("workers", [2])
def test_processes_give_the_same_answer(workers: int) -> None:
    model, batches = lost(), data()
    both = [advise(model, batches, candidates=[FullReset()], steps=24, seeds=2, workers=w) for w in (1, workers)]
    assert [row.level for row in both[0].rows] == pytest.approx([row.level for row in both[1].rows], rel=1e-5)


def test_an_error_in_a_process_reaches_the_caller() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        advise(net(), data(), loss=loss, candidates=[FIRE()], steps=20, workers=2)
    assert threading.active_count() < 50


def test_methods_of_every_moment_can_be_candidates() -> None:
    start = net()
    pull, clip = L2Init(1e-2), WeightClip()
    pull.remember(start)
    advice = advise(start, data(), candidates={"nothing": None, "l2": pull, "clip": clip}, steps=20, workers=1)
    assert all(row.error is None for row in advice.rows)


def test_a_candidate_that_does_not_fit_says_why_and_the_others_go_on() -> None:
    advice = advise(net(), data(), candidates=[FIRE(targets="attention.qk"), FIRE()], steps=20, workers=1)
    refused = [row for row in advice.rows if row.error]
    assert len(refused) == 1 and "attention.qk" in str(refused[0].error) and "not tried" in str(advice)


def test_a_model_that_cannot_be_copied_has_a_way_out() -> None:
    model = net()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="pass copy="):
        advise(model, data(), candidates=[FullReset()], steps=20, workers=1)

    def again() -> nn.Module:
        other = net()
        other.load_state_dict(model.state_dict())
        return other

    assert advise(model, data(), candidates=[FullReset()], steps=20, workers=1, copy=again).rows


def test_layers_adds_thirds() -> None:
    assert [one.name for one in layer_groups(net())] == ["fire-first-third", "fire-middle-third"]


def test_the_budget_is_kept() -> None:
    began = time.perf_counter()
    advise(net(), data(), candidates=[FIRE()], budget="2s", workers=1)
    assert time.perf_counter() - began < 6  # a busy machine may stall a step


def test_budgets_are_times() -> None:
    assert seconds_of("90s") == 90
    with pytest.raises(ValueError, match="not a time"):
        seconds_of("soon")
