"""Metrics of a run's rows, and the tracks that the rows come from, against plain sums."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rekindle.lab.evaluation import Track
from rekindle.lab.results import metrics
from rekindle.lab.results.comparison import NUMBERS
from rekindle.lab.settings import Setting

ACCURACY = Setting("a", "random-labels", "mlp", last=2)
LOSS = Setting("l", "alphabet", "gpt", headline="test_loss", last=2)


def row(task: int, **fields: Any) -> dict[str, Any]:
    plain = {"online_accuracy": 0.5, "online_loss": 1.0, "test_accuracy": 0.4, "test_loss": 2.0, "steps": 10}
    old = {"old_accuracy": 0.2, "old_loss": 3.0, "old_accuracy_start": 0.3, "old_loss_start": 2.5}
    return {"kind": "task", "task": task, **plain, **old, "remedy": None, "remedy_seconds": 0.1, **fields}


def remedy(**fields: Any) -> dict[str, Any]:
    plain = {"accuracy_before": 0.9, "accuracy_after": 0.6, "loss_before": 1.0, "loss_after": 3.0}
    return {**plain, "function_drift": 0.5, **fields}


def test_the_headline_is_the_mean_of_the_last_tasks_whatever_their_order() -> None:
    rows = [row(2, online_accuracy=0.3), row(0, online_accuracy=0.9), row(1, online_accuracy=0.5)]
    assert metrics.headline(rows, ACCURACY) == pytest.approx(0.4)
    assert metrics.first_task(rows, ACCURACY) == 0.9
    assert metrics.headline([{"kind": "start"}, *rows, {"kind": "end"}], ACCURACY) == pytest.approx(0.4)


def test_what_was_not_measured_is_none_and_not_zero() -> None:
    assert metrics.headline([row(0, test_loss=None), row(1)], LOSS) is None
    assert metrics.headline([], ACCURACY) is None and metrics.first_task([], ACCURACY) is None
    assert metrics.drop([row(0), row(1)], ACCURACY) is None
    assert metrics.recovery([row(0)], [row(0)], ACCURACY) is None and metrics.drift([row(0)], ACCURACY) is None
    assert metrics.recovery([row(1)], [row(1)], ACCURACY) is None, "no curve to read it from"
    assert metrics.auc([row(0, online_accuracy=None)], ACCURACY) is None
    assert metrics.retention([row(0)], ACCURACY) is None


def test_drop_is_positive_when_things_get_worse() -> None:
    rows = [row(0), row(1, remedy=remedy()), row(2, remedy=remedy(accuracy_after=0.8))]
    assert metrics.drop(rows, ACCURACY) == pytest.approx(0.2)
    assert metrics.drop(rows, LOSS) == pytest.approx(2.0)


def test_recovery_is_how_soon_a_task_is_learned_as_well_as_doing_nothing_learns_it() -> None:
    def curve(*accuracy: float | None) -> list[list[float | None]]:
        return [[10 * (i + 1), each, None if each is None else 1 - each] for i, each in enumerate(accuracy)]

    nothing = [row(i, steps=30, curve=curve(0.1, 0.2, 0.3)) for i in range(4)]
    arm = [
        row(0, steps=30, curve=curve(0.9, 0.9, 0.9)),  # before any boundary
        row(1, steps=30, curve=curve(0.1, 0.3, 0.2)),  # reached at step 20
        row(2, steps=30, curve=curve(0.1, 0.1, 0.1)),  # never: all 30
        row(3, steps=30, curve=curve(0.5, None, 0.1)),  # at once: 10
    ]
    assert metrics.recovery(arm, nothing, ACCURACY) == 20
    assert metrics.recovery(arm, nothing, LOSS) == 20, "by the loss, which is one minus the accuracy here"
    assert metrics.recovery(arm, nothing[:2], ACCURACY) == 20, "the reference ended early"


def test_auc_weighs_tasks_by_their_steps() -> None:
    rows = [row(0, steps=10, online_loss=4.0), row(1, steps=30, online_loss=2.0)]
    assert metrics.auc(rows, LOSS) == pytest.approx(2.5)


def test_retention_leaves_out_the_first_task() -> None:
    rows = [row(0, old_accuracy=None, old_accuracy_start=None), row(1), row(2, old_accuracy=0.4)]
    assert metrics.retention(rows, ACCURACY) == pytest.approx(0.3)
    assert metrics.retention_after_remedy(rows, ACCURACY) == pytest.approx(0.3)


def test_what_doing_nothing_loses_is_a_share_of_its_first_task() -> None:
    run = [row(0, online_accuracy=0.5), row(1, online_accuracy=0.2), row(2, online_accuracy=0.2)]
    assert metrics.share_lost([run], ACCURACY) == pytest.approx(0.6)


@pytest.mark.parametrize("change", [{"stream": "warm-start"}, {"replay": 0.1}])
def test_tasks_that_are_not_equally_hard_cannot_tell(change: dict[str, Any]) -> None:
    run = [row(0, online_accuracy=0.5), row(1, online_accuracy=0.1), row(2, online_accuracy=0.1)]
    assert metrics.share_lost([run], replace(ACCURACY, **change)) is None


def test_a_loss_is_counted_from_chance() -> None:
    chance = math.log(64)
    run = [row(0, test_loss=chance - 2), *(row(i, test_loss=chance - 0.9) for i in (1, 2))]
    assert metrics.share_lost([run], LOSS) is None
    assert metrics.share_lost([run], LOSS, classes=64) == pytest.approx(0.55)


def test_a_run_has_every_number_of_the_table() -> None:
    rows = [row(0), row(1, remedy=remedy())]
    found = {name: number(rows, ACCURACY) for name, number in NUMBERS.items()}
    assert metrics.headline(rows, ACCURACY) == 0.5
    assert found["drop"] == pytest.approx(0.3)
    assert found["remedy_seconds"] == pytest.approx(0.1)  # for one task, of which there are two with .1 each


def made(steps: int = 100) -> tuple[Track, list[int], list[float], list[int]]:
    draws = torch.Generator().manual_seed(0)
    counts = [8] * (steps - 1) + [3]
    right = [int(torch.randint(count + 1, (), generator=draws)) for count in counts]
    loss = torch.rand(steps, generator=draws).tolist()
    track = Track()
    for r, each, count in zip(right, loss, counts, strict=True):
        track.add(torch.tensor(r), torch.tensor(each), count)
    return track, right, loss, counts


def test_a_track_weighs_by_examples() -> None:
    track, right, loss, counts = made()
    assert track.accuracy == pytest.approx(sum(right) / sum(counts))
    assert track.loss == pytest.approx(sum(a * b for a, b in zip(loss, counts, strict=True)) / sum(counts))
    curve = track.curve()
    assert len(curve) == 20 and curve[-1][0] == 100
    assert curve[3][1] == pytest.approx(sum(right[15:20]) / 40)


def test_a_short_track_has_a_short_curve() -> None:
    assert [point[0] for point in made(3)[0].curve()] == [1, 2, 3]
    assert Track().accuracy is None and Track().curve() == []


def test_a_loss_that_is_not_finite_is_seen_once() -> None:
    track = Track()
    track.add(torch.tensor(1), torch.tensor(1.0), 2)
    assert not track.diverged()
    track.add(torch.tensor(1), torch.tensor(float("nan")), 2)
    assert track.diverged() and not track.diverged()
    assert track.loss is None and track.accuracy == 0.5
    assert track.curve() == [[1, 0.5, 1.0], [2, 0.5, None]]
