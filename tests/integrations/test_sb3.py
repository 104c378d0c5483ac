"""Remedies in stable-baselines3 agents: real, short runs of each agent with each moment of a remedy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sb3 = pytest.importorskip("stable_baselines3", reason='pip install "torch-rekindle[rl]"')
gymnasium = pytest.importorskip("gymnasium", reason='pip install "torch-rekindle[rl]"')

from stable_baselines3.common import envs  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize  # noqa: E402

import rekindle  # noqa: E402
from rekindle import Receipt  # noqa: E402
from rekindle.integrations.agent_networks import _last_layers  # noqa: E402
from rekindle.integrations.sb3 import (  # noqa: E402
    RekindleCallback,
    follow_targets,
    fresh_networks,
    observations,
    trained,
    value_regression,
)
from rekindle.isolation import Recorded  # noqa: E402
from rekindle.methods import (  # noqa: E402
    FIRE,
    FullReset,
    L2Init,
    OptimizerReset,
    PlasticityInjection,
    ReDo,
    ShrinkPerturb,
)
from rekindle.methods.remedy import Remedy  # noqa: E402
from rekindle.triggers import Every  # noqa: E402

SMALL = {"net_arch": [16, 16]}
SIZES: dict[str, dict[str, Any]] = {
    "DQN": {"learning_starts": 20, "batch_size": 8, "train_freq": 4, "target_update_interval": 30, "buffer_size": 500},
    "SAC": {"learning_starts": 20, "batch_size": 8, "train_freq": 8, "gradient_steps": 1, "buffer_size": 500},
    "TD3": {"learning_starts": 20, "batch_size": 8, "train_freq": 8, "gradient_steps": 1, "buffer_size": 500},
    "PPO": {"n_steps": 32, "batch_size": 16, "n_epochs": 2},
    "A2C": {"n_steps": 8},
}


def agent(kind: str, env: Any = None, seed: int = 0, **options: Any) -> Any:
    world = env or ("Pendulum-v1" if kind in ("SAC", "TD3") else "CartPole-v1")
    policy = options.pop("policy", "MlpPolicy")
    settings = {**SIZES[kind], "policy_kwargs": dict(SMALL), "seed": seed, "device": "cpu", **options}
    return getattr(sb3, kind)(policy, world, **settings)


def heads(made: Any) -> dict[str, torch.Tensor]:
    """The output layers, written down by hand for each agent."""
    policy = made.policy
    if hasattr(policy, "q_net"):
        return {"q": policy.q_net.q_net[-1].weight}
    if hasattr(policy, "critic"):
        found = {f"critic{i}": net[-1].weight for i, net in enumerate(policy.critic.q_networks)}
        mean = policy.actor.mu  # TD3's ends in a tanh
        return found | {"mu": (mean[-2] if isinstance(mean, nn.Sequential) else mean).weight}
    return {"action": policy.action_net.weight, "value": policy.value_net.weight}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("when", [{"at": 64}, {"at": 0.5}, {"every": 40}, {"when": lambda: Every(2, most=1)}])
def test_every_agent_acts_at_every_moment(kind: str, when: dict[str, Any]) -> None:
    callback = RekindleCallback(
        "fire-body", **{key: value() if callable(value) else value for key, value in when.items()}
    )
    made = agent(kind).learn(128, callback=callback)
    assert callback.receipts and all(receipt.records for receipt in callback.receipts)
    assert all(torch.isfinite(p).all() for p in made.policy.parameters())


@pytest.mark.parametrize("kind", SIZES)
def test_heads_stay_and_hidden_layers_become_isometries(kind: str) -> None:
    made = agent(kind)
    made.learn(40)
    module, optimizers = trained(made)
    before = {name: weight.clone() for name, weight in heads(made).items()}
    receipt = FIRE(targets="auto")(module, optimizers)
    assert all(torch.equal(weight, before[name]) for name, weight in heads(made).items())
    changed = {name for name in receipt.changed if name.endswith("weight")}
    expected = {"DQN": 2, "SAC": 6, "TD3": 6, "PPO": 4, "A2C": 4}[kind]
    assert len(changed) == expected, sorted(changed)


def test_an_actor_drawn_small_keeps_its_output_scale() -> None:
    made = agent("PPO")
    x = torch.randn(64, 4)
    before = made.policy.get_distribution(x).distribution.logits.std()
    FIRE(targets="auto")(*trained(made))
    assert made.policy.get_distribution(x).distribution.logits.std() < 3 * before


@pytest.mark.parametrize("kind", ["DQN", "SAC", "TD3"])
@pytest.mark.parametrize("method", [FIRE(), FullReset(), ShrinkPerturb(0.5, "fresh"), ReDo()])
def test_targets_equal_their_networks_right_after(kind: str, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    callback = RekindleCallback(copy.deepcopy(method), at=64, replay="keep")
    if isinstance(method, ReDo):
        callback.what.batches = [Recorded((torch.randn(32, 4 if kind == "DQN" else 3), torch.randn(32, 1)), {})]
    change = callback.change

    def look() -> Any:
        receipt = change()
        policy = callback.model.policy
        for name in ("q_net", "critic", "actor"):
            target = getattr(policy, f"{name}_target", None)
            if target is not None:
                pairs = zip(target.state_dict().values(), getattr(policy, name).state_dict().values(), strict=True)
                seen.append(all(torch.equal(a, b) for a, b in pairs))
        return receipt

    monkeypatch.setattr(callback, "change", look)
    made = agent(kind).learn(104, callback=callback)
    assert seen and all(seen)
    assert made.replay_buffer.size() == 104


def test_replay_is_emptied_only_when_asked() -> None:
    made = agent("DQN").learn(100, callback=RekindleCallback("fire", at=64, replay="empty"))
    assert made.replay_buffer.size() == 100 - 64


def test_the_temperature_starts_again_only_when_asked() -> None:
    values = {}
    for choice in ("keep", "reset"):
        callback = RekindleCallback("fire", at=96, temperature=choice)  # type: ignore[arg-type]
        made = agent("SAC", ent_coef="auto_0.5", learning_rate=0.05).learn(104, callback=callback)
        values[choice] = abs(made.log_ent_coef.item() - torch.log(torch.tensor(0.5)).item())
    assert values["reset"] < 0.5 * values["keep"]


def test_optimizer_slots_are_fresh_after_the_remedy() -> None:
    made = agent("DQN")
    made.learn(60)
    module, optimizers = trained(made)
    receipt = FIRE(targets="auto")(module, optimizers)
    hidden = made.policy.q_net.q_net[0].weight
    assert receipt.optimizer is not None and receipt.optimizer.reset >= 6
    assert all(not state.any() for state in optimizers[0].state[hidden].values() if isinstance(state, torch.Tensor))
    head = made.policy.q_net.q_net[-1].weight
    assert optimizers[0].state[head]["exp_avg"].any()


def test_a_full_reset_draws_by_sb3s_own_scheme() -> None:
    callback = RekindleCallback(FullReset(), at=32)
    made = agent("PPO")
    callback.init_callback(made)
    made.learn(33, callback=callback)
    module, _ = trained(made)
    FullReset(fresh=callback.method._fresh)(module)
    assert made.policy.action_net.weight.detach().norm() < 0.05  # orthogonal with gain .01
    assert made.policy.value_net.weight.detach().norm() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("kind", ["DQN", "PPO"])
def test_an_idle_callback_changes_nothing(kind: str) -> None:
    plain = agent(kind).learn(96)
    idle = agent(kind).learn(96, callback=RekindleCallback("fire", at=10_000, monitor=20))
    both = zip(plain.policy.state_dict().values(), idle.policy.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in both)


def test_health_is_measured_and_logged() -> None:
    callback = RekindleCallback("fire", monitor=32)
    made = agent("SAC").learn(96, callback=callback)
    assert set(callback.health) == {"actor", "critic"}
    assert "dormant" in callback.health["critic"].flat()
    assert any(key.startswith("rekindle/critic/") for key in made.logger.name_to_value)


def test_a_boundary_between_phases_and_vecnormalize() -> None:
    env = VecNormalize(DummyVecEnv([lambda: gymnasium.make("CartPole-v1") for _ in range(2)]))
    made, callback = agent("PPO", env), RekindleCallback(OptimizerReset())
    for _ in range(3):
        made.learn(64, callback=callback, reset_num_timesteps=False)
        callback.boundary()
    assert len(callback.receipts) == 2 and made.num_timesteps == 192


def test_save_and_load_keep_the_callbacks_place(tmp_path: Path) -> None:
    made = agent("DQN")
    made.learn(80, callback=RekindleCallback("fire", at=[40, 120]))
    made.save(tmp_path / "agent")
    again = sb3.DQN.load(tmp_path / "agent", env=gymnasium.make("CartPole-v1"), device="cpu")
    callback = RekindleCallback("fire", at=[40, 120])
    again.learn(80, callback=callback, reset_num_timesteps=False)
    assert [firing.step for firing in callback.firings] == [40, 120]


def test_shared_and_separate_extractors() -> None:
    for shared in (True, False):
        made = agent("PPO", policy_kwargs={**SMALL, "share_features_extractor": shared})
        callback = RekindleCallback("fire", every=32)
        made.learn(96, callback=callback)
        assert len(callback.receipts) == 2


class Frames(gymnasium.Env):  # type: ignore[misc,name-defined]
    """A picture of noise and two actions: enough for a convolutional policy."""

    observation_space = gymnasium.spaces.Box(0, 255, (36, 36, 1), dtype="uint8")
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), float(action), bool(self.np_random.random() < 0.1), False, {}


def test_a_convolutional_policy() -> None:
    callback = RekindleCallback("fire", at=24)
    made = agent("DQN", Frames(), policy="CnnPolicy", policy_kwargs={"features_extractor_kwargs": {"features_dim": 16}})
    made.learn(32, callback=callback)
    assert sum(block.role == "conv" for block in callback.receipts[0].records) == 3


def test_a_recurrent_policy() -> None:
    contrib = pytest.importorskip("sb3_contrib", reason="pip install sb3-contrib")
    callback = RekindleCallback("fire", every=32)
    made = contrib.RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=32, batch_size=32, n_epochs=1, device="cpu")
    made.learn(96, callback=callback)
    assert any(block.count == 4 for block in callback.receipts[0].records)  # the gates of an LSTM


def test_a_recurrent_policys_hidden_layers_are_no_heads_and_its_health_is_known() -> None:
    contrib = pytest.importorskip("sb3_contrib", reason="pip install sb3-contrib")
    made = contrib.RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=16, batch_size=16, n_epochs=1, device="cpu")
    plan = rekindle.plan(trained(made)[0], targets="auto")
    heads = {each.name for each in plan.skipped if each.reason == "output head"}
    assert heads == {"policy.action_net.weight", "policy.value_net.weight"}
    callback = RekindleCallback("fire", monitor=16)
    made.learn(32, callback=callback)
    assert callback.health["policy"].units


def test_what_breaks_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="which module is the head"):
        agent("SAC").learn(10, callback=RekindleCallback(PlasticityInjection(), at=5))
    with pytest.raises(ValueError, match="outside the modules too"):
        agent("SAC").learn(10, callback=RekindleCallback(PlasticityInjection("critic.qf0"), at=5))
    with pytest.raises(ValueError, match="fraction"):
        RekindleCallback("fire", at=1.5)


@pytest.mark.parametrize("head", [None, "q_net.q_net"])
def test_an_injected_head_is_followed_by_the_target_network(head: str | None) -> None:
    made, x = agent("DQN"), torch.randn(5, 4)
    made.learn(60)
    before = made.q_net(x).detach()
    made.learn(4, callback=RekindleCallback(PlasticityInjection(head), at=60), reset_num_timesteps=False)
    follow_targets(made)
    assert torch.equal(made.q_net(x), made.q_net_target(x))
    callback = RekindleCallback(PlasticityInjection(head), at=[100, 140], name="again")
    made.learn(120, callback=callback, reset_num_timesteps=False)
    assert len(callback.receipts) == 2 and not torch.equal(made.q_net(x), before)
    names = [sorted(each.state_dict()) for each in (made.q_net, made.q_net_target)]
    assert names[0] == names[1] and any("minus" in name for name in names[0])


@pytest.mark.parametrize("kind", ["SAC", "TD3"])
def test_a_loss_term_holds_actor_and_critic(kind: str) -> None:
    """Each has an optimizer and a backward pass of its own: what is added before the other's is cleared again."""
    moved = {}
    for coefficient in (0.0, 100.0):
        made = agent(kind, learning_rate=0.01, train_freq=2)
        start = {name: p.detach().clone() for name, p in trained(made)[0].named_parameters()}
        made.learn(120, callback=RekindleCallback(L2Init(coefficient)))
        for name, p in trained(made)[0].named_parameters():
            part = name.partition(".")[0], coefficient
            moved[part] = moved.get(part, 0.0) + float((p.detach() - start[name]).norm())
    assert all(moved[part, 100.0] < 0.3 * moved[part, 0.0] for part in ("actor", "critic")), moved


def test_gradients_are_looked_at_when_they_are_new() -> None:
    seen = []

    class Looking(Remedy):
        moment = "backward"

        def apply(self, call: Any) -> Receipt:
            seen.append({name.partition(".")[0] for name, p in call.model.named_parameters() if p.grad is not None})
            return Receipt("looking")

    agent("SAC").learn(64, callback=RekindleCallback(Looking()))
    assert len(seen) > 4 and seen == [{"critic"}, {"actor"}] * (len(seen) // 2)


def test_a_full_reset_with_state_dependent_exploration() -> None:
    callback = RekindleCallback(FullReset(), at=32)
    agent("PPO", "Pendulum-v1", use_sde=True).learn(40, callback=callback)
    assert "policy.log_std" in callback.receipts[0].changed


@pytest.mark.parametrize("kind", ["DQN", "PPO"])
def test_steps_that_are_counted_from_zero_again(kind: str) -> None:
    made, callback = agent(kind), RekindleCallback("fire", at=[0, 64])
    for _ in range(2):
        made.learn(96, callback=callback)
    first = {"DQN": 4, "PPO": 0}[kind]
    assert [firing.step for firing in callback.firings] == [first, 64] * 2
    other = RekindleCallback(OptimizerReset())
    for _ in range(2):
        other.boundary()
        made.learn(64, callback=other)
    assert [firing.step for firing in other.firings] == [first] * 2


def test_hindsight_replay_is_emptied_too() -> None:
    env = envs.BitFlippingEnv(n_bits=3, continuous=False, max_steps=3)
    options = {"replay_buffer_class": sb3.HerReplayBuffer, "policy": "MultiInputPolicy"}
    made = agent("DQN", env, **options).learn(64, callback=RekindleCallback("fire", at=40, replay="empty"))
    assert 0 < int((made.replay_buffer.ep_length > 0).sum()) <= 24


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("DQN", lambda: FullReset()),
        ("DQN", lambda: ReDo(tau=0.5)),
        ("SAC", lambda: ShrinkPerturb(0.5, "fresh")),
        ("PPO", lambda: L2Init(0.1)),
    ],
)
def test_saved_loaded_and_continued_is_as_uninterrupted(kind: str, method: Any, tmp_path: Path) -> None:
    def callback() -> RekindleCallback:
        made = method()
        return RekindleCallback(made, **({} if made.moment == "loss" else {"every": 32}))

    def continued(made: Any, own: RekindleCallback) -> Any:
        made.set_env(made.env or gymnasium.make("Pendulum-v1" if kind == "SAC" else "CartPole-v1"))
        made.set_random_seed(7)
        made.learn(96, callback=own, reset_num_timesteps=False)
        return {**made.policy.state_dict(), "steps": [firing.step for firing in own.firings]}

    first, begun = agent(kind), callback()
    first.learn(96, callback=begun)
    first.save(tmp_path / "agent")
    if kind != "PPO":
        first.save_replay_buffer(tmp_path / "replay")
    again = getattr(sb3, kind).load(tmp_path / "agent", device="cpu")
    if kind != "PPO":
        again.load_replay_buffer(tmp_path / "replay")
    whole, resumed = continued(first, begun), continued(again, callback())
    assert whole.pop("steps") == resumed.pop("steps")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_a_probe_of_values_from_the_replay_buffer() -> None:
    made = agent("DQN")
    made.learn(100)
    batch = observations(made)
    assert batch is not None and rekindle.health(made.q_net, [batch["q_net"]]).units


def test_a_method_that_watches_waits_for_the_first_gradient_step() -> None:
    callback = RekindleCallback(ReDo(), every=8)
    agent("DQN", learning_starts=40).learn(64, callback=callback)
    assert callback.firings and callback.firings[0].step > 40


@pytest.mark.parametrize("kind", ["DQN", "SAC", "PPO"])
def test_value_regression_holds_the_discounted_returns_of_what_is_stored(kind: str) -> None:
    made = agent(kind, gamma=0.9)
    assert value_regression(made) is None
    made.learn(448 if kind == "SAC" else 96)
    found = value_regression(made, batch=64)
    assert found is not None
    batches, loss = found
    assert loss(trained(made)[0], batches[0]).isfinite()
    if kind == "PPO":
        assert sum(len(batch["returns"]) for batch in batches) == 32
        return
    buffer, expected = made.replay_buffer, {}
    after, known = 0.0, False
    for row in reversed(range(buffer.pos)):  # slow and obvious
        if buffer.dones[row, 0]:
            after, known = 0.0, True
        after = float(buffer.rewards[row, 0]) + 0.9 * after
        if known:
            expected[tuple(buffer.observations[row, 0].tolist())] = after
    values = torch.tensor(list(expected.values()), dtype=torch.double)
    for batch in batches:
        for seen, value in zip(batch["observations"], batch["returns"], strict=True):
            wanted = (expected[tuple(seen.tolist())] - values.mean()) / values.std(correction=0)
            assert abs(float(value) - float(wanted)) < 1e-3


@pytest.mark.parametrize("kind", ["DQN", "SAC", "PPO"])
def test_a_probe_of_an_agent_measures_learning_and_not_the_scale_of_its_values(kind: str) -> None:
    """A fresh network whose values are shifted, or scaled, learns exactly as the same network without that."""
    made = agent(kind)
    made.learn(448 if kind == "SAC" else 96)
    batches, loss = value_regression(made) or ([], None)
    scores = []
    for shift, scale in ((0.0, 1.0), (17.0, 1.0), (0.0, 30.0), (-17.0, 0.03)):
        torch.manual_seed(3)
        network = fresh_networks(made)()
        for last in _last_layers(network):
            last.weight.data.mul_(scale)
            last.bias.data.mul_(scale).add_(shift)
        before = copy.deepcopy(network.state_dict())
        found = rekindle.probe(network, batches, loss=loss, fresh=fresh_networks(made), steps=40, seeds=4)
        assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
        assert found.interval[0] <= 1 <= found.interval[1]
        scores.append(found.score)
    assert scores == pytest.approx([scores[0]] * 4, abs=0.01)


def test_a_probe_on_the_replay_buffer() -> None:
    made = agent("DQN").learn(96)
    found = value_regression(made, batch=32)
    assert found is not None
    result = rekindle.probe(trained(made)[0], found[0], loss=found[1], fresh=fresh_networks(made), steps=5, seeds=1)
    assert result is not None
