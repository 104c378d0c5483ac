"""Triggers: when they fire, what they say, and that they go on where they were after a save."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from rekindle.diagnosis.examination import health
from rekindle.monitoring.monitor import Monitor
from rekindle.monitoring.schedules import Firing, Schedule
from rekindle.projection.receipt import Receipt
from rekindle.triggers import (
    AllOf,
    AnyOf,
    AtBoundary,
    DfIAbove,
    DormancyAbove,
    Every,
    GradientVanished,
    Plateau,
    RankBelow,
    Trigger,
    VerdictIs,
)


def fired(trigger: Trigger, rows: list[dict[str, Any]]) -> list[int]:
    """The steps (from 1) at which it fired."""
    return [step for step, row in enumerate(rows, 1) if trigger(row) is not None]


def losses(*values: float) -> list[dict[str, Any]]:
    return [{"loss": value} for value in values]


def test_every_n_steps() -> None:
    assert fired(Every(3), [{}] * 10) == [3, 6, 9]


def test_boundaries_by_flag_and_by_task() -> None:
    assert fired(AtBoundary(), [{"boundary": b} for b in (False, True, False, True)]) == [2, 4]
    assert fired(AtBoundary(), [{"task": t} for t in ("a", "a", "b", "b", "a")]) == [3, 5]
    # A step that does not say which task it is changes nothing.
    assert fired(AtBoundary(), [{"task": 0}, {}, {"task": 0}, {"task": 1}]) == [4]


def test_plateau_waits_for_patience_and_starts_anew() -> None:
    assert fired(Plateau(2), losses(3, 2, 2, 2, 5, 5, 5)) == [4, 7]
    assert fired(Plateau(2, min_delta=0.5), losses(3.0, 2.8, 2.6)) == [3]
    assert fired(Plateau(2, min_delta=0.5), losses(3.0, 2.4, 1.8)) == []
    accuracy = [{"accuracy": a} for a in (0.1, 0.3, 0.2, 0.3)]
    assert fired(Plateau(2, key="accuracy", higher_is_better=True), accuracy) == [4]


def test_plateau_counts_looks_and_nan_is_no_improvement() -> None:
    assert fired(Plateau(2), [{"loss": 1.0}, {}, {"loss": 1.0}, {}, {"loss": 1.0}]) == [5]
    assert fired(Plateau(2), losses(math.nan, math.nan, math.nan)) == [2]


@pytest.mark.parametrize(
    ("trigger", "key", "quiet", "loud"),
    [
        (DormancyAbove(0.3), "dormant", 0.3, 0.31),
        (DormancyAbove(0.3, key="dormant_worst"), "dormant_worst", 0.2, 0.9),
        (RankBelow(0.1), "feature_rank_worst", 0.1, 0.09),
        (DfIAbove(5), "dfi_scale_free", 5.0, 5.1),
        (GradientVanished(1e-6), "gradient_norm", 1e-6, 9e-7),
        (VerdictIs("act"), "verdict", 1.0, 2.0),
        (VerdictIs("watch"), "verdict", 0.0, 1.0),
    ],
)
def test_thresholds(trigger: Trigger, key: str, quiet: float, loud: float) -> None:
    assert trigger({key: quiet}) is None
    assert trigger({"something else": loud}) is None
    assert trigger({key: math.nan}) is None
    reason = trigger({key: loud})
    assert reason is not None
    assert key in reason


def test_a_health_is_metrics_enough() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.fill_(-1.0)
    found = health(net, [torch.ones(4, 2)])
    assert DormancyAbove(0.9)(found) == "dormant_worst 1 > 0.9"
    assert RankBelow(0.5)(found) == "feature_rank_worst 0 < 0.5"
    assert VerdictIs()(found) == "verdict act"


def test_cooldown_and_cap() -> None:
    always = [{"dormant": 1.0}] * 10
    assert fired(DormancyAbove(0.5, cooldown=3), always) == [1, 5, 9]
    assert fired(DormancyAbove(0.5, most=2), always) == [1, 2]
    assert fired(DormancyAbove(0.5, cooldown=2, most=2), always) == [1, 4]
    assert fired(AnyOf(Every(2), Every(3), cooldown=2), [{}] * 12) == [2, 6, 9, 12]


def test_any_and_all() -> None:
    rows = [{"dormant": d} for d in (0.9, 0.1, 0.9, 0.9)]
    assert fired(AnyOf(Every(2), DormancyAbove(0.5)), rows) == [1, 2, 3, 4]
    assert fired(AllOf(Every(2), DormancyAbove(0.5)), rows) == [4]
    trigger = AllOf(Every(2), DormancyAbove(0.5))
    assert [trigger(row) for row in rows][-1] == "every 2 steps and dormant 0.9 > 0.5"


def test_members_of_all_do_not_spend_their_firings_in_vain() -> None:
    member = DormancyAbove(0.5, most=1)
    trigger = AllOf(Every(3), member)
    assert fired(trigger, [{"dormant": 0.9}] * 6) == [3]
    assert member.firings == 1
    plateau = Plateau(2)
    trigger = AllOf(plateau, Every(5))
    # The plateau is there from step 3 on, and forgotten only when the whole fired.
    assert fired(trigger, losses(*[1.0] * 9)) == [5]


def triggers() -> list[Trigger]:
    return [
        Every(3),
        AtBoundary(cooldown=1),
        Plateau(2, 0.1, most=2),
        DormancyAbove(0.5, cooldown=2),
        AnyOf(Every(4), Plateau(3)),
        AllOf(AnyOf(Every(2), Every(3)), DormancyAbove(0.3, most=3), cooldown=1),
    ]


@pytest.mark.parametrize("at", range(len(triggers())))
def test_a_saved_trigger_goes_on_as_if_nothing_had_happened(at: int) -> None:
    generator = torch.Generator().manual_seed(at)
    values = torch.rand(40, 2, generator=generator).tolist()
    rows = [{"task": step // 7, "loss": a, "dormant": b} for step, (a, b) in enumerate(values)]
    whole = [triggers()[at]] * 1
    reasons = [whole[0](row) for row in rows]
    assert any(reasons)
    for cut in (1, 13, 26):
        first, second = triggers()[at], triggers()[at]
        early = [first(row) for row in rows[:cut]]
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert early + [second(row) for row in rows[cut:]] == reasons


def test_states_of_another_trigger_are_refused() -> None:
    with pytest.raises(ValueError, match="not the state of Plateau"):
        Plateau(2).load_state_dict(Every(2).state_dict())
    with pytest.raises(ValueError, match="of 1 triggers, here are 2"):
        AnyOf(Every(1), Every(2)).load_state_dict(AnyOf(Every(1)).state_dict())


class Counting:
    """A method that counts, keeps state, and may refuse."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuse = False

    def __call__(
        self, model: nn.Module, optimizer: Any = None, *, batches: Any = None, loss: Any = None, generator: Any = None
    ) -> Receipt:
        if self.refuse:
            raise ValueError("refused")
        self.calls.append((model, optimizer, batches, loss))
        return Receipt("counting")

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = [()] * state["calls"]


def test_a_schedule_applies_its_method_and_says_why() -> None:
    method, model = Counting(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    schedule = Schedule(method, DormancyAbove(0.5))
    batches, loss = [torch.zeros(1)], lambda m, b: torch.zeros(())
    assert schedule.step(model, optimizer, {"dormant": 0.1}) is None
    receipt = schedule.step(model, optimizer, {"dormant": 0.8}, batches=batches, loss=loss)
    assert isinstance(receipt, Receipt)
    assert method.calls == [(model, optimizer, batches, loss)]
    assert schedule.firings == [Firing(2, "dormant 0.8 > 0.5")]


def test_a_method_that_refused_has_not_fired() -> None:
    method = Counting()
    method.refuse = True
    schedule = Schedule(method, DormancyAbove(0.5, most=1))
    with pytest.raises(ValueError, match="refused"):
        schedule.step(nn.Linear(1, 1), None, {"dormant": 0.8})
    assert schedule.firings == []
    method.refuse = False
    assert schedule.step(nn.Linear(1, 1), None, {"dormant": 0.8}) is not None


def test_a_schedule_survives_a_save() -> None:
    first = Schedule(Counting(), Every(2))
    for _ in range(3):
        first.step(nn.Linear(1, 1), None, {})
    second = Schedule(Counting(), Every(2))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.firings == first.firings
    assert len(second.method.calls) == 1
    assert second.step(nn.Linear(1, 1), None, {}) is not None


def test_errors_speak_of_the_argument() -> None:
    for make, words in [
        (lambda: Every(0), "n is a positive"),
        (lambda: Plateau(0), "patience"),
        (lambda: Plateau(1, -1.0), "min_delta"),
        (lambda: Every(1, cooldown=-1), "cooldown"),
        (lambda: Every(1, most=-1), "most"),
        (lambda: AnyOf(), "at least one"),
        (lambda: VerdictIs("dire"), "dire"),
    ]:
        with pytest.raises(ValueError, match=words):
            make()


class TestMetricsOfASchedule:
    @staticmethod
    def method(model: nn.Module, optimizer: Any = None, **_: Any) -> Receipt:
        return Receipt("nothing")

    def test_a_metric_that_is_not_there_is_warned_of_once(self) -> None:
        model = nn.Linear(2, 2)
        schedule = Schedule(self.method, AnyOf(Every(9), DormancyAbove(0.5), Plateau(3)))
        with pytest.warns(UserWarning, match=r"or 'dormant', which is not among the metrics given \(loss\)"):
            schedule.step(model, None, {"loss": 1.0})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedule.step(model, None, {"loss": 1.0})
            Schedule(self.method, Every(1)).step(model, None, {})
            Schedule(self.method, AtBoundary()).step(model, None, {"task": 1})

    @pytest.mark.parametrize("key", ["dormant", "health/dormant"])
    @pytest.mark.parametrize("given", ["dormant", "health/dormant"])
    def test_names_of_sinks_and_of_triggers_are_the_same(self, key: str, given: str) -> None:
        schedule = Schedule(self.method, DormancyAbove(0.5, key=key))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert schedule.step(nn.Linear(2, 2), None, {given: 0.6}) is not None

    def test_a_monitor_is_asked_for_each_sample_once(self) -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        with torch.no_grad():
            net[0].bias.fill_(-100.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        schedule = Schedule(self.method, DormancyAbove(0.5))
        with Monitor(net, optimizer, every=2) as monitor:
            fired = []
            for _ in range(6):
                optimizer.zero_grad()
                net(torch.ones(3, 4)).mean().backward()
                optimizer.step()
                fired.append(schedule.step(net, optimizer, monitor) is not None)
        assert fired == [False, True] * 3
        assert schedule.trigger.step == 6
        assert monitor.last is not None
        assert Schedule(self.method, DormancyAbove(0.5)).step(net, None, monitor.last) is not None
        assert Schedule(self.method, DormancyAbove(0.5)).step(net, None, monitor.last.health) is not None

    def test_anything_else_is_an_error_that_says_what_to_pass(self) -> None:
        with pytest.raises(TypeError, match="metrics is a dict, a Health"):
            Schedule(self.method, Every(1)).step(nn.Linear(2, 2), None, 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "written",
    ["AtBoundary()", "Every(5, cooldown=3)", "Plateau(2, key='x')", "AllOf(Every(3), RankBelow(0.2, most=1))"],
)
def test_a_trigger_prints_as_it_is_written(written: str) -> None:
    trigger = eval(written)
    assert repr(trigger) == written == repr(copy.deepcopy(trigger))
