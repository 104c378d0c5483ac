"""What a step is, that nothing acts after the last one, and that methods of every step go the way of events."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rekindle
from rekindle import methods
from rekindle.integrations import Application, attaching
from rekindle.triggers import DormancyAbove, Plateau, RankBelow
from trained import adam, batches, loop, network, same, train


class ActorCritic(nn.Module):
    """A model that is never called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.actor = network(), network()


def alternate(model: ActorCritic, remedy: Any, critic: Any, actor: Any, pattern: str, blocks: int) -> None:
    x, y = batches(8)[0]
    for _ in range(blocks):
        for letter in pattern:
            optimizer, part = (critic, model.critic) if letter == "q" else (actor, model.actor)
            optimizer.zero_grad()
            F.cross_entropy(part(x), y).backward()
            optimizer.step()
        remedy.step()


@pytest.mark.parametrize("pattern", ["qqaa", "qa", "qqqqa", "aq"])
@pytest.mark.parametrize("named", [None, "actor", 1])
def test_a_step_is_an_update_of_the_clock_optimizer(pattern: str, named: Any) -> None:
    model = ActorCritic()
    critic, actor = adam(model.critic), adam(model.actor)
    clock = actor if named == "actor" else named
    calls: list[int] = []

    class Counted(methods.WeightClip):
        def __call__(self, *args: Any, **more: Any) -> Any:
            calls.append(0)
            return super().__call__(*args, **more)

    letter = "q" if named is None else "a"
    with rekindle.attach(model, [critic, actor], Counted(), clock=clock) as remedy:
        alternate(model, remedy, critic, actor, pattern, 6)
        assert remedy.steps == 6 * pattern.count(letter)
    assert abs(len(calls) - 6 * pattern.count(letter)) <= 1
    with rekindle.attach(model, [critic, actor], "fire", clock=clock, at=6 * pattern.count(letter) // 2) as remedy:
        alternate(model, remedy, critic, actor, pattern, 6)
    assert len(remedy.firings) == 1 and abs(remedy.firings[0].step - 3 * pattern.count(letter)) <= 1


def test_a_clock_is_one_of_the_optimizers() -> None:
    model = network()
    for wrong in (adam(network()), 1, True):
        with pytest.raises(ValueError, match="is none of the 1 optimizers"):
            rekindle.attach(model, adam(model), "fire", every=2, clock=wrong)


def test_param_groups_and_schedulers_do_not_change_the_count() -> None:
    model = network()
    optimizer = torch.optim.SGD([{"params": layer.parameters(), "lr": 0.1} for layer in (model[0], model[2], model[4])])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with rekindle.attach(model, optimizer, every=5) as remedy:
        train(model, optimizer, batches(4), remedy, scheduler)
        assert remedy.steps == 12
    assert [f.step for f in remedy.firings] == [5, 10]


def test_a_closure_that_is_run_many_times_is_one_step() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x, y = batches(8)[0]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with rekindle.attach(model, optimizer, every=2) as remedy:
        for _ in range(5):
            optimizer.step(closure)
            remedy.step()
        assert remedy.steps == 5
    assert [f.step for f in remedy.firings] == [2, 4]


@pytest.mark.parametrize("closed", [True, False])
def test_a_run_that_ends_simply_ends(closed: bool) -> None:
    model, plain = network(), network()
    own, other = adam(model), adam(plain)
    remedy = rekindle.attach(model, own, "fire", every=4)
    train(model, own, batches(4), remedy)
    loop(plain, other, batches(4), lambda s: rekindle.fire(plain, other) if s in (4, 8) else None)
    x = batches(4)[0][0]
    with torch.no_grad():
        model(x)  # an evaluation is no step
    model.eval()
    model(x)
    model.train()
    if closed:
        remedy.finish()
        model(x)
        assert not any(module._forward_pre_hooks for module in model.modules())
    assert [f.step for f in remedy.firings] == [4, 8] and same(model, plain)
    copied = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    for each in copied:
        each(x)  # hooks that wait are not those of a copy
        assert same(each, plain)


@pytest.mark.parametrize("zero", ["first", "before backward", "last"])
@pytest.mark.parametrize("compiled", ["", "given", "called", "in place", "function"])
def test_passes_that_are_not_trained_on_begin_no_step(zero: str, compiled: str) -> None:
    """An evaluation, and rollouts with gradients (CleanRL), run in training mode and with gradients enabled."""
    model = network()
    optimizer = adam(model)
    called: Any = torch.compile(model, backend="eager") if compiled in ("given", "called") else model
    if compiled == "in place":
        model.compile(backend="eager")
    given = called if compiled == "given" else model
    loss_of = lambda x, y: F.cross_entropy(called(x), y)  # noqa: E731
    if compiled == "function":
        loss_of = torch.compile(loss_of, backend="eager")
    acted: list[int] = []

    class Noted(methods.FIRE):
        def __call__(self, *args: Any, **more: Any) -> Any:
            acted.append(remedy.steps)
            return super().__call__(*args, **more)

    remedy = rekindle.attach(given, optimizer, Noted(), every=5)
    x, y = batches(8)[0]
    for _ in range(15):
        called(x[:1])  # a rollout
        if zero == "first":
            optimizer.zero_grad()
        loss = loss_of(x, y)
        if zero == "before backward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if zero == "last":
            optimizer.zero_grad()
        remedy.step()
        called(x[:1])
    trained = copy.deepcopy(model.state_dict())
    assert torch.isfinite(F.cross_entropy(called(x), y))
    late = compiled == "function"  # what runs inside of a compiled function is not seen
    assert acted == ([6, 11] if late else [5, 10]) and [f.step for f in remedy.firings] == [5, 10]
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    remedy.finish()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_loop_may_be_called_from_several_places() -> None:
    model = network()
    optimizer = adam(model)
    with rekindle.attach(model, optimizer, "fire", every=4) as remedy:

        def phase() -> list[int]:
            done = []
            for x, y in batches(8):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if remedy.step() is not None:
                    done.append(remedy.steps)
            return done

        assert phase() == [5]
        assert phase() == [9]  # in the step after 8, and not one later


def test_a_rollout_without_gradients_can_begin_a_step() -> None:
    model = network()
    optimizer = adam(model)
    with rekindle.attach(model, optimizer, "fire", every=3) as remedy:
        for _ in range(2):
            receipt = remedy.start()
            with torch.no_grad():
                model(batches(4)[0][0])
            train(model, optimizer, batches(4)[:3], remedy)
    assert receipt is not None and [f.step for f in remedy.firings] == [3]


def test_a_method_that_needs_gradients_acts_before_a_rollout_in_inference_mode() -> None:
    """rsl-rl plays in inference mode, in which nothing can be differentiated."""
    model = network()
    optimizer = adam(model)
    given: Any = {"batches": batches(8)[:1], "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])}
    with rekindle.attach(model, optimizer, methods.DASH(), every=3, **given) as remedy:
        train(model, optimizer, batches(4)[:3], remedy)
        with torch.inference_mode():
            assert remedy.start() is not None
        train(model, optimizer, batches(4)[:2], remedy)


def test_what_waits_is_in_the_state() -> None:
    model = network()
    optimizer = adam(model)
    remedy = rekindle.attach(model, optimizer, "fire", every=3)
    train(model, optimizer, batches(4)[:3], remedy)
    again = rekindle.attach(model, optimizer, "fire", every=3)
    again.load_state_dict(remedy.state_dict())
    remedy.finish()
    train(model, optimizer, batches(4)[:1], again)
    assert [f.step for f in again.firings] == [3]


def test_step_before_the_optimizer_is_noticed() -> None:
    model = network()
    optimizer = adam(model)
    x, y = batches(8)[0]

    def run(wrong: bool, accumulate: int = 1) -> None:
        with rekindle.attach(model, optimizer, "fire", every=50) as remedy:
            for number in range(8):
                F.cross_entropy(model(x), y).backward()
                if wrong:
                    remedy.step()
                if (number + 1) % accumulate == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                if not wrong:
                    remedy.step()

    with pytest.warns(UserWarning, match=r"call it after optimizer\.step\(\)"):
        run(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(False)
        run(False, accumulate=2)


# Methods of every step


def test_new_neurons_reach_a_target_network_and_the_log() -> None:
    model = network()
    target = copy.deepcopy(model)
    optimizer = adam(model)
    rows: list[Any] = []
    method = methods.ContinualBackprop(replacement_rate=0.2, maturity_threshold=2)
    with rekindle.attach(
        model, optimizer, method, mirrors=(target,), log=lambda step, numbers: rows.append((step, numbers))
    ) as remedy:
        before = copy.deepcopy(target.state_dict())
        train(model, optimizer, batches(4), remedy)
    assert any(not torch.equal(value, before[name]) for name, value in target.state_dict().items())
    assert len(remedy.receipts) == len(remedy.firings) == len(rows) == 1
    assert remedy.receipts[0].mirrors == 1 and remedy.receipts[0].changed and remedy.firings[0].step == 12
    assert "of 12 steps" in remedy.firings[0].reason
    assert sum(remedy.receipts[0].totals()["counts"].values()) > 0
    assert not same(model, target)  # what was not replaced keeps its lag


def test_a_small_change_of_every_step_moves_a_mirror_by_as_much() -> None:
    model = network()
    target = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with rekindle.attach(model, optimizer, methods.WeightClip(0.1), mirrors={"": target}) as remedy:
        start = network()
        train(model, optimizer, batches(4)[:1], remedy)
    assert not same(model, start) and len(remedy.receipts) == 1
    for a, b in zip(model.parameters(), target.parameters(), strict=True):
        assert torch.allclose(b - a, torch.ones_like(a), atol=1e-6)


def test_receipts_of_every_step_are_added_up_over_intervals_and_survive_a_resume() -> None:
    def run(cut: int | None) -> Any:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        remedy = rekindle.attach(model, optimizer, methods.WeightClip(0.05))
        stream = batches(4) * 11  # 132 steps
        train(model, optimizer, stream[:cut], remedy)
        if cut is not None:
            later = rekindle.attach(model, optimizer, methods.WeightClip(0.05))
            later.load_state_dict(remedy.state_dict())
            remedy.clock.remove()
            remedy = later
            train(model, optimizer, stream[cut:], remedy)
        remedy.finish()
        return remedy.firings

    whole = run(None)
    assert [f.step for f in whole] == [100, 132]
    assert run(37) == whole and run(110) == whole


# Mirrors by part


def test_a_mirror_follows_a_part() -> None:
    model = ActorCritic()
    target = copy.deepcopy(model.critic)
    critic, actor = adam(model.critic), adam(model.actor)
    for copied in ("changed", "everything"):
        with rekindle.attach(model, [critic, actor], "fire", mirrors={"critic": target}, mirrors_copy=copied) as remedy:
            alternate(model, remedy, critic, actor, "qa", 2)
            receipt = remedy.boundary()
        assert receipt is not None and receipt.mirrors == 1
        assert torch.equal(target[0].weight, model.critic[0].weight)
        assert torch.equal(target[4].bias, model.critic[4].bias) == (copied == "everything")


def test_a_part_that_does_not_exist_or_fit_is_found_when_training_starts() -> None:
    model = ActorCritic()
    with pytest.raises(ValueError, match="no part 'qf1'; it has critic, actor"):
        rekindle.attach(model, adam(model), "fire", every=9, mirrors={"qf1": network()})
    with pytest.raises(ValueError, match="mirror 'critic'"):
        rekindle.attach(model, adam(model), "fire", every=9, mirrors={"critic": lambda: nn.LSTM(2, 2)})
    with pytest.raises(ValueError, match="mirrors_copy"):
        rekindle.attach(model, adam(model), "fire", every=9, mirrors_copy="all")


# Everything is checked at the start


def test_batches_may_be_a_function_and_are_tried_when_training_starts() -> None:
    model = network()
    optimizer = adam(model)
    reads: list[int] = []

    def stored() -> list[Any]:
        reads.append(1)
        return [batches(8)[0][0]] if len(reads) > 1 else []  # a replay buffer that is empty at first

    with rekindle.attach(model, optimizer, methods.ReDo(), at=3, batches=stored) as remedy:
        train(model, optimizer, batches(4), remedy)
    assert len(reads) == 2 and len(remedy.firings) == 1
    with pytest.raises(ValueError, match="does not run on a batch of float64"):
        rekindle.attach(model, optimizer, methods.ReDo(), at=3, batches=[torch.zeros(2, 6).double()])
    with pytest.raises(ValueError, match="does not run on a dict with pixels"):
        rekindle.attach(model, optimizer, methods.ReDo(), at=3, batches=lambda: [{"pixels": torch.zeros(2, 6)}])
    with pytest.raises(ValueError, match="return an empty list"):
        rekindle.attach(model, optimizer, methods.ReDo(), at=3, batches=lambda: [1 / 0])
    with pytest.raises(TypeError, match="function that returns batches, or an iterable of batches"):
        rekindle.attach(model, optimizer, methods.ReDo(), at=3, batches=3)


def test_a_model_without_forward_is_run_as_told() -> None:
    model = ActorCritic()
    optimizer = adam(model)
    data = [batches(8)[0][0]]
    with pytest.raises(ValueError, match="run=lambda model, batch"):
        rekindle.attach(model, optimizer, methods.FIRE(recalibrate=True), at=1, batches=data)
    with rekindle.attach(
        model,
        optimizer,
        methods.FIRE(recalibrate=True),
        batches=data,
        run=lambda model, batch: (model.critic(batch), model.actor(batch)),
    ) as remedy:
        assert remedy.boundary() is not None


def test_a_trigger_says_what_it_needs() -> None:
    for kind in (DormancyAbove, RankBelow):
        with pytest.raises(ValueError, match=r"50% is 0\.5"):
            kind(50)
    model = network()
    with pytest.warns(UserWarning, match="there is no monitor="):
        rekindle.attach(model, adam(model), when=DormancyAbove(0.5))
    optimizer = adam(model)
    with (
        pytest.warns(UserWarning, match="reads 'eval_loss'; the metrics were loss"),
        rekindle.attach(model, optimizer, when=Plateau(2, key="eval_loss")) as remedy,
    ):
        train(model, optimizer, batches(4), remedy)
    with pytest.warns(UserWarning, match="never applied"), rekindle.attach(model, optimizer, "fire") as remedy:
        train(model, optimizer, batches(4), remedy)


@pytest.mark.parametrize("closed", [True, False])
def test_a_loop_that_forgets_something_hears_of_it_at_the_end(closed: bool) -> None:
    """With a `with` block when it ends, without one at the exit of the interpreter."""
    for options, called, said in (({}, True, "never applied"), ({"every": 5}, False, "step() was never called in 12")):
        model = network()
        optimizer = adam(model)
        remedy = rekindle.attach(model, optimizer, "fire", **options)  # type: ignore[arg-type]
        train(model, optimizer, batches(4), remedy if called else None)
        with pytest.warns(UserWarning, match=re.escape(said)):
            remedy.finish() if closed else attaching._report_open()


def test_a_trigger_and_a_verdict_mean_the_worst_layer() -> None:
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 2))
    with torch.no_grad():
        net[0].weight[:60] = 0
        net[0].bias[:60] = -1
        net[2].bias.fill_(1)
    health = rekindle.health(net, [torch.randn(64, 4)])
    assert health.whole["dormant"] < 0.5 < health.whole["dormant_worst"]
    assert DormancyAbove(0.5)(health) is not None and DormancyAbove(0.5, key="dormant")(health) is None


def test_a_callback_that_is_used_again_watches_the_new_training() -> None:
    model = network()
    rows: list[int] = []
    application = Application("fire", every=100, monitor=2)
    for _ in range(2):
        optimizer = adam(model)
        application.bind(model, optimizer, log=lambda step, numbers: rows.append(step))
        train(model, optimizer, batches(4)[:4])
        application.finish()
    assert rows == [2, 4, 2, 4]
    other = rekindle.Monitor(model, adam(model))
    with pytest.raises(ValueError, match="another optimizer"):
        Application("fire", every=3, monitor=other).bind(model, adam(model))


# State


@pytest.mark.parametrize("kind", ["fire", "cbp", "plateau"])
def test_a_distributed_checkpoint_holds_the_state(tmp_path: Path, kind: str) -> None:
    import torch.distributed.checkpoint as dcp

    def make(model: nn.Module) -> tuple[Any, Any]:
        optimizer = adam(model)
        if kind == "cbp":
            method = methods.ContinualBackprop(replacement_rate=0.1, maturity_threshold=2, seed=3)
            return optimizer, rekindle.attach(model, optimizer, method)
        when: Any = {"every": 3} if kind == "fire" else {"when": Plateau(1), "rewarm": 2}
        return optimizer, rekindle.attach(model, optimizer, methods.ShrinkPerturb(noise="fresh", seed=2), **when)

    whole = network()
    optimizer, remedy = make(whole)
    train(whole, optimizer, batches(4), remedy)
    first = network()
    own, before = make(first)
    train(first, own, batches(4)[:7], before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dcp says that it runs without a process group
        dcp.save({"model": first.state_dict(), "rekindle": before}, checkpoint_id=tmp_path)
        second = network()
        other, after = make(second)
        state = {"model": second.state_dict(), "rekindle": after}
        dcp.load(state, checkpoint_id=tmp_path)
    second.load_state_dict(state["model"])
    other.load_state_dict(own.state_dict())
    train(second, other, batches(4)[7:], after)
    assert same(second, whole)
    remedy.finish()
    after.finish()
    assert after.firings == remedy.firings and after.firings


# Trainers have an end too


@pytest.mark.parametrize("kind", ["DQN", "SAC", "PPO"])
def test_nothing_acts_at_the_end_of_learning(kind: str) -> None:
    pytest.importorskip("stable_baselines3")
    from integrations.test_sb3 import agent
    from rekindle.integrations.sb3 import RekindleCallback

    callback = RekindleCallback("fire", every=64)
    made = agent(kind)
    made.learn(128, callback=callback)
    assert [f.step for f in callback.firings] == [64]
    made.learn(64, callback=callback, reset_num_timesteps=False)
    assert callback.firings[0].step == 64 and 128 <= callback.firings[1].step < 192


def test_a_target_network_of_an_agent_gets_new_neurons() -> None:
    pytest.importorskip("stable_baselines3")
    from integrations.test_sb3 import agent
    from rekindle.integrations.sb3 import RekindleCallback

    callback = RekindleCallback(methods.ContinualBackprop(replacement_rate=0.2, maturity_threshold=1))
    made = agent("DQN", target_update_interval=10**6)
    start = copy.deepcopy(made.q_net_target.state_dict())
    made.learn(104, callback=callback)
    assert callback.receipts and callback.receipts[0].mirrors == 1
    assert callback.firings[-1].step == 104  # in environment steps, as everything in SB3
    assert any(not torch.equal(value, start[name]) for name, value in made.q_net_target.state_dict().items())


def test_lightning_counts_the_clock_optimizer_and_warns_of_averages(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from integrations.test_lightning import loader, trainer
    from rekindle.integrations.lightning import RekindleCallback

    class Adversaries(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.parts, self.automatic_optimization = ActorCritic(), False

        def training_step(self, batch: Any, index: int) -> None:
            critic, actor = self.optimizers()
            for optimizer, part in (
                (critic, self.parts.critic),
                (critic, self.parts.critic),
                (actor, self.parts.actor),
            ):
                optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(part(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [adam(self.parts.critic), adam(self.parts.actor)]

    for clock, expected in ((None, [8, 16]), (1, [8])):
        callback = RekindleCallback("fire", every=8, clock=clock)
        trainer(tmp_path, callback).fit(Adversaries(), loader())
        assert [f.step for f in callback.firings] == expected
    from integrations.test_lightning import Classifier

    with pytest.warns(UserWarning, match="StochasticWeightAveraging averages the weights"):
        trainer(tmp_path, RekindleCallback("fire", at=3), StochasticWeightAveraging(1e-2)).fit(Classifier(), loader())
    other = Classifier()  # a mirror, but not the average
    callback = RekindleCallback("fire", at=3, mirrors=other)
    with pytest.warns(UserWarning, match="StochasticWeightAveraging averages the weights"):
        trainer(tmp_path, callback, StochasticWeightAveraging(1e-2)).fit(Classifier(), loader())
