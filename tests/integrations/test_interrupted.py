"""An error or Ctrl-C at any line while an attachment, a schedule or a keeper acts: a true receipt, or all as it was."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_faults import DATA, loss, ready
from torch import nn

import callbacks
import faults
import rekindle
from rekindle import methods
from rekindle.advice import keeping
from rekindle.monitoring.guard import Guard
from rekindle.monitoring.schedules import Schedule
from rekindle.monitoring.triggers import Every

PER_CASE = 12
Case = Callable[[nn.Module, Any, nn.Module], Callable[[], Any]]


def attached(method: str, **options: Any) -> Case:
    """An attachment that is due."""

    def make(model: nn.Module, optimizer: Any, mirror: nn.Module) -> Callable[[], Any]:
        given = {"batches": DATA, "loss": loss, "rewarm": 3, **options}
        remedy = rekindle.attach(model, optimizer, method, every=1, mirrors=mirror, **given)
        loss(model, DATA[0]).backward()
        optimizer.step()
        remedy.step()
        return remedy.start

    return make


def scheduled(**options: Any) -> Case:
    """A schedule that fires now."""

    def make(model: nn.Module, optimizer: Any, mirror: nn.Module) -> Callable[[], Any]:
        schedule = Schedule(methods.FIRE(), Every(1), **options)
        return lambda: schedule.step(model, optimizer, {}, batches=DATA, loss=loss)

    return make


def kept(**options: Any) -> Case:
    """A keeper whose advice is to apply a remedy."""

    def make(model: nn.Module, optimizer: Any, mirror: nn.Module) -> Callable[[], Any]:
        seconds = iter(range(0, 10**6, 1000))
        candidates = {"fire": methods.FIRE(), "nothing": None}
        keeper = rekindle.Keeper(
            DATA, loss, every=1, candidates=candidates, background=False, clock=lambda: next(seconds), **options
        )
        keeper.bind(model, optimizer)
        return lambda: keeper.step(model, optimizer, {})

    return make


def guard() -> Guard:
    return Guard(DATA, loss, max_rise=1e9)


CASES: dict[str, tuple[Case, bool]] = {
    "attached fire": (attached("fire"), False),
    "attached redo": (attached("redo"), False),
    "attached fire guarded": (attached("fire", guard=guard()), True),
    "attached shrink-perturb": (attached("shrink-perturb", mirrors_copy="everything"), False),
    "schedule": (scheduled(), False),
    "schedule guarded": (scheduled(guard=guard()), True),
    "keeper": (kept(), False),
    "keeper guarded": (kept(guard=guard()), True),
}


@pytest.fixture(autouse=True)
def advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a keeper would be told after a minute of probing."""
    monkeypatch.setattr(keeping.Inquiry, "ask", callbacks.advice)


def case(name: str) -> tuple[nn.Module, Any, nn.Module, Callable[[], Any]]:
    model, optimizer, _ = ready(methods.FIRE)
    mirror = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in mirror.parameters():
            parameter.mul_(0.9)
    return model, optimizer, mirror, CASES[name][0](model, optimizer, mirror)


def fault(name: str, at: int, kind: type[BaseException]) -> tuple[BaseException | None, str | None]:
    """What a case raises if it fails at this line, and what is wrong with how that ends."""
    model, optimizer, mirror, act = case(name)
    before = faults.Before(model, optimizer, mirrors=[mirror])
    error = faults.interrupted(act, at, kind)
    return error, faults.judged(error, before, whole=CASES[name][1])


@pytest.mark.parametrize("name", CASES)
def test_no_line_can_fail_unseen(name: str) -> None:
    total = faults.lines(case(name)[3])
    raised = 0
    for number, at in enumerate(faults.positions(total, PER_CASE, seed=len(name))):
        error, wrong = fault(name, at, KeyboardInterrupt if number % 2 else faults.Fault)
        assert wrong is None, f"line {at} of {total}: {error}"
        raised += error is not None
    assert raised


@pytest.mark.parametrize(
    ("trainer", "way"),
    [
        ("transformers", "guarded"),
        *((name, way) for name in callbacks.TRAINERS if name != "transformers" for way in ("fire", "schedule guarded")),
        ("lightning", "keeper"),
        ("sb3 dqn", "clip"),
    ],
)
def test_no_line_of_a_callback_can_fail_unseen(trainer: str, way: str) -> None:
    pytest.importorskip({"sb3": "stable_baselines3"}.get(trainer[:3], trainer))
    case = callbacks.CallbackCase(trainer, way)
    for number, at in enumerate([*faults.positions(case.lines, 3, seed=len(way)), case.lines]):
        error, wrong = case.failed(at, KeyboardInterrupt if number % 2 else faults.Fault)
        assert wrong is None, f"line {at} of {case.lines}: {error}"
