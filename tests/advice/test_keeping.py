"""A keeper: it asks within its share of the time, acts where plasticity is lost, and says why."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rekindle
from rekindle.advice import advising, keeping, probing, racing
from rekindle.advice.keeping import Keeper, Reply
from rekindle.integrations.application import Application
from rekindle.methods import FIRE, FullReset


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def lost() -> nn.Module:
    model = net()
    nn.init.constant_(model[2].bias, -50.0)
    return model


def data() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(4)]


class Clock:
    """A loss takes a hundredth of a second, and whoever trains says how long a step takes."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.now += 0.01
        return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (probing, advising, racing):
        monkeypatch.setattr(module, "perf_counter", made)
    return made


def answering(monkeypatch: pytest.MonkeyPatch, *findings: Reply) -> list[float]:
    """Questions are answered with these, one after the other; the seconds that each was given."""
    given, left = [], list(findings)

    def ask(self: Any, model: Any, optimizer: Any, seconds: float, clock: Clock) -> Reply:
        given.append(seconds)
        clock.now += left[0].seconds
        return left.pop(0)

    monkeypatch.setattr(keeping.Inquiry, "ask", ask)
    return given


KEEP = Reply(1.2, "better than fresh", "all is well", None, 0.0)


def test_the_share_of_the_time_is_kept(clock: Clock) -> None:
    """Training steps of half a second, questions that cost what their losses cost: never above two per cent."""
    model = lost()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    keeper = Keeper(data(), clock.loss, every=20, candidates=[FIRE()], background=False, clock=clock, seeds=2)
    asking = keeper.trigger
    for _ in range(600):
        clock.now += 0.5
        keeper.step(model, optimizer, {})
        assert asking.spent <= 0.02 * asking.elapsed
    assert asking.elapsed == pytest.approx(300, rel=0.01) and asking.spent > 0.5
    assert {entry.what for entry in keeper.log} >= {"ask"}


def test_it_acts_where_plasticity_is_lost_and_says_why(clock: Clock) -> None:
    model = lost()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    candidates = {"nothing": None, "full-reset": FullReset()}
    keeper = Keeper(
        data(), clock.loss, every=10, candidates=candidates, background=False, clock=clock, share=0.12, seeds=3
    )
    keeper.bind(model, optimizer)
    clock.now += 200
    receipts = [keeper.step(model, optimizer, {}) for _ in range(10)]
    receipt = receipts[-1]
    assert receipts[:-1] == [None] * 9 and receipt is not None
    assert receipt.method == "full-reset" and "plasticity is lost; Apply full-reset" in receipt.notes[0]
    assert bool((model[2].bias > -1).all())
    assert [entry.what for entry in keeper.log] == ["ask", "act"] and keeper.log[1].score is not None
    assert keeper.firings[0].step == 10 and "Apply full-reset" in keeper.firings[0].reason


def test_nothing_is_asked_before_the_time_is_saved_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    short = Reply(float("nan"), "unknown", "too short to say", None, 1.0, short=True)
    given = answering(monkeypatch, short, Reply(1.0, "as fresh", "fine", None, 50.0))
    keeper = Keeper(data(), every=1, background=False, clock=clock)
    keeper.bind(model, optimizer)
    for _ in range(400):
        clock.now += 1.0
        keeper.step(model, optimizer, {})
    # 2 % of 50 s are the first second; then twice as much, on top of what was spent.
    assert given == pytest.approx([1.0, 2.0], rel=0.05)
    assert [note.step for note in keeper.log if note.what == "ask"] == [50, 150]


def test_a_verdict_asks_earlier_than_the_period(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(), net()
    given = answering(monkeypatch, KEEP)
    keeper = Keeper(data(), every=1000, background=False, clock=clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper.bind(model, optimizer)
    clock.now += 1e4
    for _ in range(120):
        keeper.step(model, optimizer, {"verdict": 2.0})
    assert len(given) == 1 and keeper.log[0].step == 100 and "verdict act" in keeper.log[0].why


def test_a_probe_that_fails_does_not_stop_training() -> None:
    clock, model = Clock(), net()
    keeper = Keeper([torch.zeros(2, 8)], every=1, background=False, clock=clock)  # batches without targets
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper.bind(model, optimizer)
    clock.now += 1e4
    with pytest.warns(RuntimeWarning, match="no loss was given"):
        assert keeper.step(model, optimizer, {}) is None
    assert keeper.log[-1].what == "failed"


def test_state_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answering(monkeypatch, Reply(1.0, "as fresh", "fine", None, 3.0), KEEP)
    first, second = (Keeper(data(), every=5, background=False, clock=clock) for _ in range(2))
    first.step(model, optimizer, {})
    clock.now += 1e4
    for _ in range(6):
        first.step(model, optimizer, {})
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.trigger.spent == 3.0 and second.trigger.elapsed == pytest.approx(1e4) and second.log == first.log
    for _ in range(4):
        second.step(model, optimizer, {})
    assert [entry.step for entry in second.log if entry.what == "ask"] == [5, 10]


def test_the_background_probes_a_copy_while_training_goes_on() -> None:
    model = lost()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    candidates = {"nothing": None, "full-reset": FullReset()}
    keeper = Keeper(data(), every=1, share=0.9, candidates=candidates, steps=60, background=True, seeds=3)
    keeper.trigger.elapsed = 100.0  # a long run
    weights = copy.deepcopy(model.state_dict())
    assert keeper.step(model, optimizer, {}) is None  # it has only begun
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    receipt, end = None, time.monotonic() + 120
    while receipt is None and time.monotonic() < end:
        time.sleep(0.05)
        receipt = keeper.step(model, optimizer, {})
    assert receipt is not None and receipt.method == "full-reset" and keeper.trigger.spent > 0
    keeper.close()


def test_a_callback_takes_a_keeper_as_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(), lost()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    answering(monkeypatch, Reply(0.1, "lost", "lost; apply", "full-reset", 1.0))
    keeper = Keeper(data(), every=3, candidates=[FullReset()], background=False, clock=clock)
    application = Application(keeper)
    application.bind(model, optimizer)
    clock.now += 1e4
    receipts = [application.begin(step) for step in range(4)]
    assert [receipt is not None for receipt in receipts] == [False, False, False, True]
    assert application.firings[0].reason == "lost; apply" and application.name == "keeper"
    state = application.state_dict()
    application.finish()
    again = Application(Keeper(data(), every=3, candidates=[FullReset()], background=False, clock=clock))
    again.load_state_dict(state)
    again.bind(net(), optimizer=torch.optim.SGD(net().parameters(), lr=0.1))
    assert isinstance(again.when.trigger, keeping.Asking) and again.when.trigger.spent == 1.0
    again.finish()


def test_what_cannot_be_kept_is_said() -> None:
    with pytest.raises(ValueError, match="share"):
        Keeper(data(), share=2.0)
    with pytest.raises(TypeError, match="only once"):
        rekindle.Keeper(iter(data()))
