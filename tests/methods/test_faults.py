"""An error or Ctrl-C at any line of a call: a receipt that names what differs, or everything as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_everywhere import MAKERS
from torch import nn

import faults
import rekindle
from rekindle import methods
from rekindle.monitoring.guard import Guard
from rekindle.optimizers import resetting
from rekindle.projection import stores
from rekindle.projection.method import MethodError, MethodInterrupt
from rekindle.projection.transaction import Transaction

INPUTS = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(3, (16,), generator=torch.Generator().manual_seed(2))
DATA = [(INPUTS, LABELS)]
CASES = {
    **MAKERS,
    "fire zero": lambda: methods.FIRE(biases="zero", recalibrate=True),
    "fire atomic": lambda: methods.FIRE(biases="zero", atomic=True),
}
PER_CASE = 6


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def ready(make: Callable[[], Any]) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A network with gradients, an optimizer that has stepped, and a method that has watched."""
    torch.manual_seed(0)
    first, second = nn.Linear(6, 8), nn.Linear(8, 8)
    model = nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), second, nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer, method = torch.optim.Adam(model.parameters(), lr=1e-2), make()
    if hasattr(method, "remember"):
        method.remember(model)
    if hasattr(method, "observe"):
        method.observe(model, DATA)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, DATA[0]).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss(model, DATA[0]).backward()
    return model, optimizer, method


def called(model: nn.Module, optimizer: Any, method: Any, guarded: bool) -> Callable[[], Any]:
    if guarded:
        return lambda: Guard(DATA, loss, max_rise=1e9)(method, model, optimizer, batches=DATA, loss=loss)
    return lambda: method(model, optimizer, batches=DATA, loss=loss)


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize("name", CASES)
def test_no_line_of_a_method_can_fail_unseen(name: str, guarded: bool) -> None:
    total = faults.lines(called(*ready(CASES[name]), guarded))
    for number, at in enumerate(faults.positions(total, PER_CASE, seed=len(name))):
        model, optimizer, method = ready(CASES[name])
        before = faults.Before(model, optimizer)
        kind = KeyboardInterrupt if number % 2 else faults.Fault
        error = faults.interrupted(called(model, optimizer, method, guarded), at, kind)
        whole = guarded or method.atomic or name == "fire atomic"
        assert faults.judged(error, before, whole=whole) is None, f"line {at} of {total}: {error}"


def test_a_failed_reset_of_the_optimizer_leaves_a_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no state today")

    monkeypatch.setattr(resetting, "start_over", fails)
    for make in (methods.FIRE, methods.FullReset, methods.HeadReset, lambda: methods.SingularClip(high=0.1)):
        model, optimizer, method = ready(make)
        before = faults.Before(model, optimizer)
        with pytest.raises(MethodError, match="no state today") as caught:
            method(model, optimizer, batches=DATA)
        assert set(caught.value.receipt.differs) == before.differences()
        assert set(caught.value.receipt.changed) == before.differences() & dict(model.named_parameters()).keys()


def test_an_interrupt_between_blocks_is_an_interrupt_with_a_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = stores.LiveWeight.write, []

    def second(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*arguments)

    model, optimizer, _ = ready(methods.FIRE)
    before = faults.Before(model, optimizer)
    monkeypatch.setattr(stores.LiveWeight, "write", second)
    with pytest.raises(MethodInterrupt) as caught:
        rekindle.fire(model, optimizer)
    assert isinstance(caught.value, KeyboardInterrupt) and isinstance(caught.value, MethodError)
    assert len(caught.value.receipt.changed) == 1
    assert before.differences() <= set(caught.value.receipt.differs)


def test_a_method_that_was_rolled_back_does_not_go_on() -> None:
    model, optimizer, method = ready(methods.UPGD)
    before = faults.Before(model, optimizer)
    assert Guard(DATA, loss, max_rise=-1e9)(method, model, optimizer).rolled_back
    assert not before.differences() and not before.surroundings_differ(set())
    assert not method.state_dict()["utility"]


def test_a_gradient_that_cannot_be_put_back_does_not_keep_the_others_from_it() -> None:
    from rekindle.isolation import isolated

    class Odd(nn.Linear):
        """Cannot be put back into training mode once."""

        broken = False

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "training" and value is True and self.broken:
                raise OSError("no")
            super().__setattr__(name, value)

    model = nn.Sequential(nn.Linear(2, 2), Odd(2, 2), nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(OSError, match="no"), isolated(model):
        model[1].broken = True
    assert model.training and model[0].training and model[2].training
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_tiny_matrix_that_stays_is_skipped_and_not_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    plan = rekindle.plan(model, targets="auto")
    model[1].weight.data.fill_(1e-42)
    receipt = rekindle.fire(model, plan=plan)
    assert receipt.changed == ("0.weight",) and "min_norm" in receipt.skipped["1.weight"]
    assert bool((model[1].weight == 1e-42).all())


def test_a_fault_while_statistics_are_put_back_does_not_lose_them() -> None:
    from rekindle.isolation import isolated

    model, optimizer, _ = ready(methods.FIRE)
    before = faults.Before(model, optimizer)

    def passes() -> None:
        with isolated(model, training=True):
            model(INPUTS)

    for at in range(1, faults.lines(passes) + 1):
        faults.interrupted(passes, at)
        assert not before.differences() and not before.surroundings_differ(set()), f"line {at}"


def test_statistics_that_a_forward_pass_changes_are_named() -> None:
    model, _, _ = ready(methods.FIRE)

    def fails() -> None:
        with Transaction("pass", [model]):
            model(INPUTS)
            raise OSError("no")

    with pytest.raises(MethodError) as caught:
        fails()
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} == set(caught.value.receipt.differs)


@pytest.mark.parametrize("kind", [faults.Fault, KeyboardInterrupt])
def test_what_is_put_back_after_the_marks_were_left_is_not_named(kind: type[BaseException]) -> None:
    """An error on the last line of a transaction around an atomic call: its weights are put back, and not named."""
    model, optimizer, _ = ready(methods.FIRE)
    before, around = faults.Before(model, optimizer), Transaction("around", [model], optimizer)
    leave = around._leave

    def late() -> None:
        around._leave = leave  # type: ignore[method-assign]
        leave()
        raise kind("late")

    around._leave = late  # type: ignore[method-assign]
    with pytest.raises(BaseException) as caught, around:  # noqa: PT011
        rekindle.fire(model, optimizer, atomic=True)
    assert not before.differences()
    assert faults.judged(caught.value, before, whole=False) is None
