"""What a user of stable-baselines3 tries first: tables, triggers on returns, two callbacks, another agent, mistakes."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sb3 = pytest.importorskip("stable_baselines3", reason='pip install "torch-rekindle[rl]"')
gymnasium = pytest.importorskip("gymnasium", reason='pip install "torch-rekindle[rl]"')

from stable_baselines3.common.callbacks import BaseCallback, EveryNTimesteps  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize  # noqa: E402

from rekindle.integrations.sb3 import RekindleCallback, observations, trained, value_regression  # noqa: E402
from rekindle.methods import DASH, FIRE, Compose, FullReset, L2Init, OptimizerReset, ReDo, ShrinkPerturb  # noqa: E402
from rekindle.triggers import DormancyAbove, Plateau  # noqa: E402

OFF = {"learning_starts": 20, "batch_size": 8, "train_freq": 8, "gradient_steps": 1, "buffer_size": 500}
SIZES: dict[str, dict[str, Any]] = {
    "DQN": OFF,
    "SAC": OFF,
    "TD3": OFF,
    "PPO": {"n_steps": 32, "batch_size": 16, "n_epochs": 1},
    "A2C": {"n_steps": 16},
}


def agent(kind: str, env: Any = None, maker: Any = None, **options: Any) -> Any:
    world = env or ("Pendulum-v1" if kind in ("SAC", "TD3") else "CartPole-v1")
    given = {**SIZES[kind], "policy_kwargs": {"net_arch": [16, 16]}, "seed": 0, "device": "cpu", **options}
    return (maker or getattr(sb3, kind))("MlpPolicy", world, **given)


@pytest.mark.parametrize("kind", ["PPO", "SAC"])
def test_sb3s_table_has_the_health_of_networks_but_not_of_layers(kind: str) -> None:
    """The table cuts long names, and SB3 stops the training where two are equal then."""
    table = io.StringIO()
    with contextlib.redirect_stdout(table):
        callback = RekindleCallback(
            "fire", every=64, monitor=64, name="a-name-that-is-longer-than-the-column-of-a-table"
        )
        agent(kind, verbose=1).learn(208 if kind == "SAC" else 128, callback=callback, log_interval=1)
    part = "actor" if kind == "SAC" else "policy"
    assert callback.receipts and f"{part}/dormant " in table.getvalue() and f"{part}/verdict" in table.getvalue()
    assert "units/" not in table.getvalue()


@pytest.mark.parametrize("kind", SIZES)
def test_a_trigger_knows_the_returns(kind: str) -> None:
    steps = 450 if kind in ("SAC", "TD3") else 128
    trigger = DormancyAbove(-1e9, key="rollout/ep_rew_mean", most=1)
    callback = RekindleCallback("fire", when=trigger)
    agent(kind).learn(steps, callback=callback)
    assert len(callback.firings) == 1 and "rollout/ep_rew_mean" in callback.firings[0].reason


def test_returns_are_looked_at_once_for_each_episode() -> None:
    looks: list[float] = []

    class Looking(Plateau):
        def look(self, metrics: Any) -> str | None:
            looks.extend([metrics[self.key]] if self.key in metrics else [])
            return super().look(metrics)

    made = agent("DQN", train_freq=1)
    made.learn(128, callback=RekindleCallback("fire", when=Looking(100, key="rollout/ep_rew_mean")))
    assert len(looks) == len(made.ep_info_buffer) > 2


def test_a_metric_that_never_came_is_reported() -> None:
    with pytest.warns(UserWarning, match=r"reads 'reward'; the metrics were .*rollout/ep_rew_mean"):
        agent("PPO").learn(96, callback=RekindleCallback("fire", when=Plateau(3, key="reward")))


def test_the_network_with_the_worst_verdict_is_the_one_that_a_trigger_sees() -> None:
    made = agent("SAC")
    with torch.no_grad():
        for layer in (0, 2):
            made.actor.latent_pi[layer].bias.fill_(-100.0)  # every neuron of the actor is dead
    callback = RekindleCallback("optimizer-reset", when=DormancyAbove(0.9, most=1), monitor=32)
    made.learn(64, callback=callback)
    assert callback.firings and callback.health["critic"].whole["dormant"] < 0.9


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"at": "half"}, "environment steps or fractions"),
        ({"at": [True]}, "environment steps or fractions"),
        ({"at": 1e5}, "steps are whole numbers"),
        ({"every": "epoch"}, "every is a positive number of environment steps"),
        ({"every": 0.5}, "every is a positive number of environment steps"),
        ({"monitor": 0}, "monitor is a positive number of environment steps"),
        ({"monitor": {"every": 5}}, "monitor is a positive number of environment steps"),
    ],
)
def test_wrong_times_are_refused_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RekindleCallback("fire", **options)


@pytest.mark.parametrize("at", [np.int64(32), np.float32(0.5), np.array([32])])
def test_numbers_of_numpy_are_numbers(at: Any) -> None:
    callback = RekindleCallback("fire", at=at)
    agent("PPO").learn(64, callback=callback)
    assert [firing.step for firing in callback.firings] == [32]


def test_a_fraction_that_no_rollout_reaches_is_reported() -> None:
    with pytest.warns(UserWarning, match=r"at 0\.9 of the training"):
        agent("PPO").learn(64, callback=RekindleCallback("fire", at=0.9))


def test_two_callbacks_need_two_names_and_nothing_is_left_behind() -> None:
    made = agent("DQN")
    with pytest.raises(ValueError, match="two callbacks are called 'fire'"):
        made.learn(64, callback=[RekindleCallback("fire", at=32), RekindleCallback("fire", at=48)])
    callbacks = [RekindleCallback("fire", at=32), RekindleCallback("fire", at=48, name="later")]
    made.learn(64, callback=callbacks)
    assert [each.firings[0].step for each in callbacks] == [32, 48]
    assert set(made.rekindle_state) == {"fire", "later"}


def test_an_interrupted_learning_leaves_no_hooks_for_the_next() -> None:
    class Interrupt(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps == 40:
                raise KeyboardInterrupt
            return True

    made = agent("SAC")
    with pytest.raises(KeyboardInterrupt):
        made.learn(64, callback=[RekindleCallback(L2Init(0.1)), Interrupt()])
    made.learn(8, callback=RekindleCallback(L2Init(0.1), name="another"), reset_num_timesteps=False)
    assert not any(each._optimizer_step_pre_hooks for each in trained(made)[1])


def test_a_callback_inside_an_event_callback_is_refused() -> None:
    with pytest.raises(ValueError, match="give RekindleCallback to learn"):
        agent("PPO").learn(64, callback=EveryNTimesteps(32, RekindleCallback("fire")))


@pytest.mark.parametrize("method", [lambda: ShrinkPerturb(0.5), lambda: FullReset()])
def test_on_another_agent_a_callback_starts_as_it_was_made(method: Any) -> None:
    used, found = RekindleCallback(method(), at=32), []
    agent("DQN", seed=1, policy_kwargs={"net_arch": [8, 8]}).learn(40, callback=used)
    for callback in (used, RekindleCallback(method(), at=32)):
        made = agent("DQN").learn(64, callback=callback)
        found.append((made.policy.state_dict(), [firing.step for firing in callback.firings]))
    assert found[0][1] == found[1][1] == [32]
    assert all(torch.equal(value, found[1][0][name]) for name, value in found[0][0].items())


def test_the_state_of_another_method_is_refused_by_its_name(tmp_path: Path) -> None:
    made = agent("DQN")
    made.learn(40, callback=RekindleCallback("fire", at=32, name="mine"))
    made.save(tmp_path / "agent")
    again = sb3.DQN.load(tmp_path / "agent", env=gymnasium.make("CartPole-v1"), device="cpu")
    with pytest.raises(ValueError, match="under the name 'mine' is not the state of ShrinkPerturb"):
        again.learn(8, callback=RekindleCallback(ShrinkPerturb(0.5), at=48, name="mine"), reset_num_timesteps=False)


def test_an_agent_without_gradients_is_refused() -> None:
    contrib = pytest.importorskip("sb3_contrib", reason="pip install sb3-contrib")
    with pytest.raises(TypeError, match="learn by gradients"):
        contrib.ARS("LinearPolicy", "CartPole-v1", n_delta=1).learn(32, callback=RekindleCallback("fire", at=16))


@pytest.mark.parametrize(
    ("method", "equal"),
    [
        (FIRE(), {"actor": True, "critic": True}),
        (FIRE(targets="critic.*"), {"actor": False, "critic": True}),
        (OptimizerReset(), {"actor": False, "critic": False}),
    ],
)
def test_targets_of_networks_that_did_not_change_keep_their_lag(method: Any, equal: dict[str, bool]) -> None:
    found = {}

    class Looking(RekindleCallback):
        def change(self) -> Any:
            receipt = super().change()
            for name in equal:
                pairs = (getattr(self.model.policy, each).state_dict() for each in (name, f"{name}_target"))
                found[name] = all(torch.equal(*both) for both in zip(*(each.values() for each in pairs), strict=True))
            return receipt

    agent("TD3").learn(64, callback=Looking(method, at=56))
    assert found == equal


@pytest.mark.parametrize("kind", ["DQN", "SAC", "PPO", "TQC", "QRDQN"])
def test_a_method_that_needs_a_loss_gets_the_values_that_are_stored(kind: str) -> None:
    known = {"TQC": "SAC", "QRDQN": "DQN"}.get(kind, kind)
    contrib = pytest.importorskip("sb3_contrib", reason="pip install sb3-contrib") if known != kind else None
    callback = RekindleCallback(Compose([DASH(), OptimizerReset()]), every=32)
    agent(known, maker=contrib and getattr(contrib, kind)).learn(256 if known == "SAC" else 96, callback=callback)
    assert callback.receipts and callback.receipts[0].changed


def test_a_method_that_judges_neurons_waits_for_td3s_delayed_actor() -> None:
    callback = RekindleCallback(ReDo(0.1), every=8)
    agent("TD3").learn(80, callback=callback)
    assert callback.receipts and callback.firings[0].step == 40  # two gradient steps after 20


def test_redo_has_its_own_period_here_too() -> None:
    assert RekindleCallback("redo").when.every == ReDo().period


def test_values_are_learned_from_observations_as_the_networks_see_them() -> None:
    env = VecNormalize(DummyVecEnv([lambda: gymnasium.make("Pendulum-v1")] * 2))
    made = agent("SAC", env, buffer_size=2_000).learn(600)
    found, seen = value_regression(made), observations(made)
    assert found is not None and seen is not None
    values = torch.cat([batch["observations"] for batch in found[0]])
    stored = torch.cat([batch["actions"] for batch in found[0]])
    assert len(values) == len(stored) == 400
    assert torch.allclose(values.std(0), seen["actor"].args[0].std(0), rtol=0.3)  # unnormalized: 3.5 for the speed


def test_monitoring_waits_until_something_is_learned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback = RekindleCallback("fire", monitor=8)
        agent("DQN", learning_starts=100).learn(96, callback=callback)
    assert not callback.health
