"""Plain loops and accelerate: when a method acts, that it acts once, and what it does to everything around it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rekindle
from rekindle import methods
from rekindle.integrations import Application
from rekindle.triggers import AllOf, AtBoundary, DormancyAbove, Every, Plateau, VerdictIs
from trained import adam, batches, loop, network, same, train


def test_at_and_every_are_what_a_plain_loop_with_fire_does() -> None:
    expected = network()
    optimizer = adam(expected)
    loop(expected, optimizer, batches(4), lambda s: rekindle.fire(expected, optimizer) if s in (3, 6, 9) else None)
    for when in ({"at": [3, 6, 9]}, {"every": 3, "name": "x"}):
        model = network()
        own = adam(model)
        with rekindle.attach(model, own, "fire", **when) as remedy:
            train(model, own, batches(4)[:11], remedy)
        train(model, own, batches(4)[11:])
        assert [f.step for f in remedy.firings] == [3, 6, 9] and same(model, expected)
        assert len(remedy.receipts) == 3 and remedy.receipts[0].method == "fire"


def test_state_goes_on_in_another_process() -> None:
    def make(model: nn.Module) -> tuple[Any, Any]:
        optimizer = adam(model)
        method = methods.ShrinkPerturb(noise="fresh", seed=4)
        return optimizer, rekindle.attach(model, optimizer, method, when=Plateau(2), rewarm=2)

    whole = network()
    optimizer, remedy = make(whole)
    train(whole, optimizer, batches(4), remedy)
    assert len(remedy.firings) >= 2
    for cut in range(1, 12):
        first = network()
        optimizer, before = make(first)
        train(first, optimizer, batches(4)[:cut], before)
        second = network()
        other, after = make(second)
        second.load_state_dict(first.state_dict())
        other.load_state_dict(optimizer.state_dict())
        after.load_state_dict(before.state_dict())
        train(second, other, batches(4)[cut:], after)
        assert same(second, whole) and after.firings == remedy.firings, cut


def test_a_boundary_acts_at_once_and_not_twice() -> None:
    model = network()
    optimizer = adam(model)
    with rekindle.attach(model, optimizer, at=2) as remedy:
        train(model, optimizer, batches(4)[:2], remedy)
        assert not remedy.receipts  # the next step has not begun
        assert remedy.boundary() is not None
        assert [f.reason for f in remedy.firings] == ["at step 2"]
        train(model, optimizer, batches(4)[:2], remedy)
        assert remedy.boundary() is not None
        assert [f.reason for f in remedy.firings] == ["at step 2", "task boundary"]
        train(model, optimizer, batches(4)[:2], remedy)
    assert len(remedy.receipts) == 2


def test_a_trigger_decides_at_a_boundary() -> None:
    model = network()
    optimizer = adam(model)
    with pytest.warns(UserWarning, match="there is no monitor="):
        remedy = rekindle.attach(model, optimizer, when=AllOf(AtBoundary(), DormancyAbove(0.5)))
    with remedy:
        remedy.note({"dormant": 0.1})
        assert remedy.boundary() is None
        remedy.note({"dormant": 0.9})
        assert remedy.boundary() is not None


def test_an_epoch_is_a_time() -> None:
    model = network()
    optimizer = adam(model)
    with rekindle.attach(model, optimizer, every="epoch") as remedy:
        for epoch in range(3):
            for x, y in batches(16):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                remedy.step(epoch=epoch + ((x, y) is None))
    assert [f.reason for f in remedy.firings] == ["epoch 1", "epoch 2"]


def test_accumulated_gradients_count_as_one_step_with_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")

    def run(size: int, accumulate: int) -> tuple[nn.Module, Any]:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        model = network()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with rekindle.attach(model, optimizer, "fire", at=3) as remedy:
            for x, y in batches(size):
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                remedy.step()
        assert [f.step for f in remedy.firings] == [3] and type(optimizer).__name__ == "AcceleratedOptimizer"
        return model, remedy

    whole, _ = run(8, 1)
    parts, _ = run(2, 4)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_skipped_step_of_a_scaler_does_not_count() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with rekindle.attach(model, optimizer, methods.WeightClip(0.5)) as remedy:
        for number, (x, y) in enumerate(batches(8)[:3]):
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            remedy.step()
        assert remedy.steps == 2


def test_a_trigger_is_asked_once_per_step_whatever_else_fires() -> None:
    model = network()
    optimizer = adam(model)
    with rekindle.attach(model, optimizer, at=2, when=Every(4)) as remedy:
        train(model, optimizer, batches(4), remedy)
    assert [(f.step, f.reason) for f in remedy.firings] == [
        (2, "at step 2"), (4, "every 4 steps"), (8, "every 4 steps"),
    ]  # and not at 12, the last one  # fmt: skip


def test_a_step_that_calls_that_of_its_base_class_is_one_step() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = network()
    torch.optim.SGD(model.parameters())  # torch puts hooks on a class when its first object is made
    optimizer = Own(model.parameters(), lr=0.1)
    with rekindle.attach(model, optimizer, every=5, rewarm=3, monitor=4) as remedy:
        train(model, optimizer, batches(4), remedy)
        assert remedy.steps == 12
    assert [f.step for f in remedy.firings] == [5, 10] and optimizer.param_groups[0]["lr"] == 0.1
    assert remedy.monitor is not None and [sample.step for sample in remedy.monitor.history] == [4, 8, 12]


def test_an_idle_method_looks_only_when_something_can_be_due() -> None:
    looked: list[int] = []

    class Looking(Application):
        def decide(self, step: int, epoch: int | None = None, *, again: bool = False) -> None:
            looked.append(step)
            super().decide(step, epoch, again=again)

    model = network()
    remedy = Looking("fire", at=[6, 11], every=4)
    remedy.bind(model, adam(model), counting=False)
    for step in range(13):
        if step == 9:
            remedy.boundary()
        remedy.begin(step)
    assert looked == [0, 4, 6, 8, 9, 11, 12], looked
    assert [firing.step for firing in remedy.firings] == [4, 6, 8, 9, 11, 12]
    own = adam(model)
    remedy.bind(model, own, step=12, counting=False)
    assert not own._optimizer_step_pre_hooks and not own._optimizer_step_post_hooks  # the trainer counts
    with rekindle.attach(model, own, every=10**6) as attached:
        train(model, own, batches(4)[:5], attached)  # in the first steps the order of the calls is watched
        assert not own._optimizer_step_pre_hooks and len(own._optimizer_step_post_hooks) == 1


def test_a_step_that_breaks_off_leaves_the_learning_rate() -> None:
    class Breaking(torch.optim.SGD):
        broken = False

        def step(self, closure: Any = None) -> Any:
            if self.broken:
                raise MemoryError
            return super().step(closure)

    model = network()
    optimizer = Breaking(model.parameters(), lr=0.1)
    remedy = rekindle.attach(model, optimizer, at=2, rewarm=4)
    train(model, optimizer, batches(4)[:3], remedy)
    optimizer.broken = True
    for _ in range(2):
        with pytest.raises(MemoryError):
            train(model, optimizer, batches(4)[:1], remedy)
    optimizer.broken = False
    train(model, optimizer, batches(4)[:1], remedy)
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.broken = True
    with pytest.raises(MemoryError):
        train(model, optimizer, batches(4)[:1], remedy)
    remedy.finish()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_rewarming_leaves_the_schedule_as_it_was() -> None:
    def rates(rewarm: int) -> tuple[list[float], list[float], nn.Module]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # ExponentialLR multiplies what it finds in the group: a rate that was left changed would stay changed.
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        used: list[float] = []
        seen: list[float] = []
        with rekindle.attach(model, optimizer, at=3, rewarm=rewarm) as remedy:
            optimizer.register_step_pre_hook(lambda o, a, k: used.append(o.param_groups[0]["lr"]))
            for x, y in batches(4):
                seen.append(optimizer.param_groups[0]["lr"])
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                remedy.step()
        return seen, used, model

    seen, used, _ = rates(3)
    plain, same_used, _ = rates(0)
    assert seen == plain == same_used
    assert used == pytest.approx([r * f for r, f in zip(plain, [1, 1, 1, 1 / 4, 2 / 4, 3 / 4] + [1] * 6, strict=True)])


def test_an_average_of_the_weights_follows_what_was_changed_and_nothing_else() -> None:
    model = network()
    optimizer = adam(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    remedy = rekindle.attach(model, optimizer, "fire-body", mirrors=(average,))
    for x, y in batches(8):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    head, bias = average.module[4].weight.clone(), average.module[0].bias.clone()
    receipt = remedy.boundary()
    assert receipt is not None and set(receipt.changed) == {"0.weight", "2.weight"}
    for layer in (0, 2):
        assert torch.equal(average.module[layer].weight, model[layer].weight)
    assert torch.equal(average.module[4].weight, head) and torch.equal(average.module[0].bias, bias)
    assert not torch.equal(head, model[4].weight)


@pytest.mark.parametrize("wrong", ["shape", "name", "other"])
def test_a_mirror_that_does_not_fit_leaves_everything_as_it_was(wrong: str) -> None:
    def wider() -> nn.Module:
        if wrong == "shape":
            return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 13), nn.ReLU(), nn.Linear(13, 3))
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU()) if wrong == "name" else nn.LSTM(2, 2)

    model, fits, mirror = network(), network(), wider()
    optimizer = adam(model)
    train(model, optimizer, batches(4)[:3])
    models, said = (model, fits, mirror), "has none of the" if wrong == "other" else r"mirror 1.*'2\.weight'"
    late: list[nn.Module] = []
    with rekindle.attach(model, optimizer, "fire", mirrors=(fits, lambda: late[0] if late else None)) as remedy:
        late.append(mirror)
        F.cross_entropy(model(batches(4)[0][0]), batches(4)[0][1]).backward()
        kept = copy.deepcopy([each.state_dict() for each in models]), copy.deepcopy(optimizer.state_dict()["state"])
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        with pytest.raises(ValueError, match=said):
            remedy.boundary()
    for each, before in zip(models, kept[0], strict=True):
        assert all(torch.equal(value, before[name]) for name, value in each.state_dict().items())
    for number, slots in optimizer.state_dict()["state"].items():
        assert slots.keys() == kept[1][number].keys()
        assert all(torch.equal(value, kept[1][number][name]) for name, value in slots.items())
    now = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients, now, strict=True))
    assert not remedy.receipts and not remedy.firings
    if wrong != "name":  # whether what it lacks is missed, nobody knows before
        with pytest.raises(ValueError, match="mirror 0"):
            rekindle.attach(model, optimizer, "fire", mirrors=mirror)


def test_a_compiled_model_goes_on_with_the_new_weights() -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    optimizer = adam(model)
    with rekindle.attach(compiled, optimizer, "fire", at=3) as remedy:
        train(compiled, optimizer, batches(4), remedy)
    expected = network()
    own = adam(expected)
    loop(expected, own, batches(4), lambda s: rekindle.fire(expected, own) if s == 3 else None)
    assert same(model, expected)


def test_a_schedule_free_optimizer_starts_from_the_new_weights() -> None:
    schedulefree = pytest.importorskip("schedulefree")
    rekindle.optimizers.register(schedulefree.AdamWScheduleFree, {"z": "weight", "exp_avg_sq": 0.0})
    model = network()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2)
    optimizer.train()
    with rekindle.attach(model, optimizer, "fire", at=3) as remedy:
        train(model, optimizer, batches(4)[:3], remedy)
        assert remedy.start() is not None
        z = optimizer.state[model[0].weight]["z"]
        assert torch.equal(z, model[0].weight)
        train(model, optimizer, batches(4)[3:], remedy)


def test_health_feeds_the_trigger_and_the_log() -> None:
    model = network()
    optimizer = adam(model)
    rows: list[tuple[int, dict[str, float]]] = []
    with rekindle.attach(
        model,
        optimizer,
        "fire",
        when=VerdictIs("healthy", most=1),
        monitor=4,
        log=lambda step, numbers: rows.append((step, numbers)),
    ) as remedy:
        train(model, optimizer, batches(4), remedy)
    assert [f.step for f in remedy.firings] == [4]
    names = {name for _, numbers in rows for name in numbers}
    assert "health/dormant" in names and "health/verdict" in names and "rekindle/fire/sfe_relative" in names
    assert [step for step, numbers in rows if any(n.startswith("rekindle/") for n in numbers)] == [4]


def test_a_metric_counts_as_one_look_only() -> None:
    model = network()
    optimizer = adam(model)
    with rekindle.attach(model, optimizer, when=Plateau(2, key="eval_loss")) as remedy:
        remedy.note({"eval_loss": 1.0})
        train(model, optimizer, batches(4)[:6], remedy)
        assert not remedy.firings


def test_a_guard_in_a_loop() -> None:
    model = network()
    optimizer = adam(model)
    guard = rekindle.Guard(batches(8)[:2], lambda m, b: F.cross_entropy(m(b[0]), b[1]), max_rise=-1.0)
    with rekindle.attach(model, optimizer, at=3, guard=guard, rewarm=5) as remedy:
        train(model, optimizer, batches(4), remedy)
    assert remedy.receipts[0].rolled_back and remedy.receipts[0].loss_before is not None
    plain = network()
    assert same(model, train(plain, adam(plain), batches(4)))


def test_a_schedule_brings_its_trigger() -> None:
    model = network()
    optimizer = adam(model)
    schedule = rekindle.Schedule(methods.FIRE(), Every(4))
    with rekindle.attach(model, optimizer, schedule) as remedy:
        train(model, optimizer, batches(4), remedy)
    assert [f.step for f in schedule.firings] == [4, 8] and remedy.firings == schedule.firings


def test_a_stored_start_is_taken_when_training_begins() -> None:
    model = network()
    optimizer = adam(model)
    with rekindle.attach(model, optimizer, methods.ShrinkPerturb(1.0), at=5) as remedy:
        train(model, optimizer, batches(4)[:5], remedy)
        remedy.start()
    start = network()
    assert torch.allclose(model[0].weight, start[0].weight) and remedy.receipts
