"""Advice for agents: copies play, the agent itself stays as it is, and waiting between steps changes nothing."""

from __future__ import annotations

import copy
import math
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

gymnasium = pytest.importorskip("gymnasium", reason='pip install "torch-rekindle[rl]"')
sb3 = pytest.importorskip("stable_baselines3", reason='pip install "torch-rekindle[rl]"')

from stable_baselines3.common import envs  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv  # noqa: E402

import rekindle  # noqa: E402
from rekindle import Receipt, methods  # noqa: E402
from rekindle.advice import keeping  # noqa: E402
from rekindle.advice.candidates import Candidate  # noqa: E402
from rekindle.integrations.agent_advice import AgentQuestion, advise_agent  # noqa: E402
from rekindle.integrations.sb3 import (  # noqa: E402
    RekindleCallback,
    apply_to_agent,
    empty_replay,
    trained,
    value_regression,
)
from rekindle.isolation import random_states_kept  # noqa: E402
from rekindle.methods.remedy import Remedy  # noqa: E402

BitFlipping = partial(envs.BitFlippingEnv, n_bits=3, continuous=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "DQN": {"learning_starts": 20, "buffer_size": 500, "learning_rate": 5e-3, "train_freq": 1, "gamma": 0.5},
    "SAC": {"learning_starts": 20, "buffer_size": 500},
    "PPO": {"n_steps": 32, "batch_size": 16, "n_epochs": 2},
    "A2C": {"n_steps": 8},
}


class Lights(gymnasium.Env):  # type: ignore[misc, name-defined]
    """Eight steps: one of two lamps is lit, and pressing its button gives 1."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left, self.lit = 8, int(self.np_random.integers(2))
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        reward = float(action == self.lit)
        self.left, self.lit = self.left - 1, int(self.np_random.integers(2))
        return self._seen(), reward, self.left == 0, False, {}

    def _seen(self) -> Any:
        return np.eye(2, dtype=np.float32)[self.lit]


def environment(kind: str) -> Any:
    return gymnasium.make("Pendulum-v1", max_episode_steps=20) if kind == "SAC" else Lights()


def agent(kind: str, steps: int = 64) -> Any:
    policy = {"net_arch": [16, 16], "activation_fn": nn.ReLU}
    made = getattr(sb3, kind)(
        "MlpPolicy", environment(kind), policy_kwargs=policy, seed=0, device="cpu", **OPTIONS[kind]
    )
    return made.learn(steps)


def held(made: Any) -> dict[str, Any]:
    """Everything of an agent that trials could touch."""
    found: dict[str, Any] = {name: each.clone() for name, each in made.policy.state_dict().items()}
    for place, optimizer in enumerate(trained(made)[1]):
        for index, state in optimizer.state_dict()["state"].items():
            found |= {f"{place}.{index}.{name}": torch.as_tensor(value).clone() for name, value in state.items()}
    buffer = getattr(made, "replay_buffer", None) or made.rollout_buffer
    found |= {"rewards": torch.from_numpy(buffer.rewards.copy()), "place": torch.tensor(buffer.pos)}
    found["counters"] = torch.tensor([made.num_timesteps, made._n_updates])
    return found


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_the_agent_and_the_random_states_are_untouched(kind: str) -> None:
    made = agent(kind)
    before, environment_before = held(made), made.env
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    tried: dict[str, Any] = {
        "nothing": None,
        "fire": methods.FIRE(),
        "reset": methods.FullReset(),
        "l2": methods.L2Init(0.01),
    }
    tried["both"] = methods.Compose([methods.FIRE(), methods.Parseval(0.01)])
    advice = advise_agent(made, lambda: environment(kind), steps=48, candidates=tried, seeds=2, workers=1)
    assert {row.name: row.error for row in advice.rows} == dict.fromkeys(tried)
    after = held(made)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert made.env is environment_before and random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1]) and torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_waiting_between_steps_is_plain_learning(kind: str) -> None:
    made = agent(kind)
    question = AgentQuestion(made, lambda: environment(kind), 96)
    trial = question.trial(Candidate("nothing"), 3)
    for steps in (1, 5, 40, 50):
        trial.advance(steps)
    trial.close()
    plain = question.copied()
    plain.set_random_seed(3)
    plain.learn(96)
    expected = [(step, round(value, 6)) for step, value in _episodes(plain) if step <= 96]
    assert trial._pace.episodes == expected != []
    again = question.trial(Candidate("nothing"), 3)
    again.advance(96)
    again.close()
    for one, other in zip(trial._agent.policy.parameters(), again._agent.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def _episodes(made: Any) -> list[tuple[int, float]]:
    lengths = np.cumsum(made.env.env_method("get_episode_lengths")[0])
    returns = made.env.env_method("get_episode_rewards")[0]
    return [(int(step), float(value)) for step, value in zip(lengths, returns, strict=True)]


def dead(made: Any) -> Any:
    """No hidden unit ever fires, and none has a gradient: only the biases of the output can learn."""
    with torch.no_grad():
        for module in trained(made)[0].modules():
            if isinstance(module, nn.Linear) and module.out_features == 16:
                module.bias.fill_(-100.0)
    return made


def test_an_agent_that_cannot_learn_is_told_to_start_again_and_one_that_can_is_not() -> None:
    broken = dead(agent("DQN"))
    tried = {"nothing": None, "reset": methods.FullReset()}
    options: dict[str, Any] = {"steps": 400, "candidates": tried, "prepare": empty_replay, "workers": 1, "seeds": 4}
    advice = advise_agent(broken, Lights, **options)
    assert (advice.answer, advice.chosen, advice.measure) == ("apply", "reset", "return")
    rows = {row.name: row for row in advice.rows}
    assert rows["reset"].level > 5.5 > 4.8 > rows["nothing"].level  # of 8; chance is 4
    low, high = rows["reset"].difference_interval
    assert 0 < low < rows["reset"].difference < high and "its return is" in advice.sentence and "higher" in str(advice)
    assert advice.call.startswith("rekindle.integrations.sb3.apply_to_agent(agent, rekindle.methods.FullReset(")
    apply_to_agent(broken, advice.choice)
    target = broken.policy.q_net_target.state_dict()
    assert all(torch.equal(target[name], each) for name, each in broken.policy.q_net.state_dict().items())
    assert all(
        float(module.bias.detach().min()) > -1
        for module in trained(broken)[0].modules()
        if isinstance(module, nn.Linear)
    )
    well = agent("DQN", 1_000)
    assert advise_agent(well, Lights, **options).answer != "apply"


def test_processes_give_the_same_answer() -> None:
    made = agent("DQN")
    one, two = (
        advise_agent(made, Lights, steps=60, candidates=[methods.FIRE()], seeds=2, workers=count) for count in (1, 2)
    )
    assert [(row.name, row.level) for row in one.rows] == [(row.name, row.level) for row in two.rows]


def test_a_candidate_that_does_not_fit_says_why() -> None:
    made = agent("DQN")
    inside = methods.Compose([methods.FIRE(), methods.L2Init(0.01)])  # which learns that it has no start while learning
    tried = {"nothing": None, "injection": methods.PlasticityInjection(head="q_net"), "inside": inside}
    rows = {row.name: row for row in advise_agent(made, Lights, steps=40, candidates=tried, workers=1).rows}
    assert (
        "none is stored" in str(rows["inside"].error)
        and "outside the modules" in str(rows["injection"].error)
        and rows["nothing"].error is None
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_the_environment_reaches_the_caller(workers: int) -> None:
    class Broken(Lights):
        def step(self, action: Any) -> Any:
            raise OSError("the lamp is broken")

    made = agent("DQN")
    with pytest.raises(OSError, match="the lamp is broken"):
        advise_agent(made, Broken, steps=20, candidates=[methods.FIRE()], workers=workers)


def test_hindsight_replay_is_copied_too() -> None:
    made = sb3.SAC(
        "MultiInputPolicy",
        BitFlipping(),
        replay_buffer_class=sb3.HerReplayBuffer,
        learning_starts=30,
        buffer_size=300,
        policy_kwargs={"net_arch": [8]},
    ).learn(60)
    advice = advise_agent(made, BitFlipping, steps=40, candidates=[methods.FIRE()], seeds=1, workers=1)
    assert all(row.error is None for row in advice.rows)


def test_weights_that_diverge_lose() -> None:
    class Ruin(Remedy):
        name = "ruin"

        def apply(self, call: Any) -> Any:
            with torch.no_grad():
                for parameter in call.inner.parameters():
                    parameter.fill_(float("nan"))
            return Receipt(self.name)

    made = agent("PPO")
    advice = advise_agent(made, Lights, steps=64, candidates={"nothing": None, "ruin": Ruin()}, workers=1)
    rows = {row.name: row for row in advice.rows}
    assert advice.chosen == "nothing" and rows["ruin"].error is None and rows["ruin"].level == -math.inf
    with torch.no_grad():
        for parameter in made.policy.parameters():
            parameter.fill_(1e38)
    advice = advise_agent(made, Lights, steps=64, candidates={"nothing": None, "reset": methods.FullReset()}, workers=1)
    assert advice.chosen == "reset" and "doing nothing diverges" in advice.sentence


def test_an_episode_that_does_not_end_counts_with_what_it_has_earned() -> None:
    trial = AgentQuestion(agent("DQN"), Long, 60).trial(Candidate("nothing"), 0)
    assert trial.advance(20).losses[-1] == -20 and trial.advance(40).losses[-1] == -60
    trial.close()


class Long(Lights):
    def step(self, action: Any) -> Any:
        return self._seen(), 1.0, False, False, {}


def test_without_an_episode_that_ended_it_cannot_tell() -> None:
    advice = advise_agent(agent("DQN"), Long, steps=60, candidates=[methods.FIRE()], workers=1)
    assert advice.answer == "cannot tell" and "no episode of doing nothing has ended" in advice.sentence


def test_a_game_is_over_when_the_monitor_says_so() -> None:
    class Lives(gymnasium.Wrapper):  # type: ignore[misc, name-defined]
        """Says that an episode has ended with each of two lives, and begins a new game after both."""

        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self.over = True

        def reset(self, **options: Any) -> Any:
            return self.env.reset(**options) if self.over else (self.env.unwrapped._seen(), {})

        def step(self, action: Any) -> Any:
            seen, reward, self.over, cut, info = self.env.step(action)
            return seen, reward, self.over or self.env.unwrapped.left == 4, cut, info

    question = AgentQuestion(agent("DQN"), lambda: Lives(Monitor(Lights())), 40)
    trial = question.trial(Candidate("nothing"), 0)
    trial.advance(40)
    trial.close()
    assert [step for step, _ in trial._pace.episodes] == [8, 16, 24, 32, 40]
    assert trial.trace.begun == -trial._pace.episodes[0][1]  # none ended in the first eighth


def test_the_first_eighth_is_where_learning_began() -> None:
    question = AgentQuestion(agent("DQN"), Lights, 160)
    trial = question.trial(Candidate("nothing"), 0)
    trial.advance(1)
    trial.advance(130)
    trial.close()
    first = [value for step, value in trial._pace.episodes if step <= 20]
    assert len(first) == 2 and trial.trace.begun == pytest.approx(-sum(first) / 2)


def test_what_is_applied_is_what_was_tried() -> None:
    made = agent("PPO")
    question = AgentQuestion(made, Lights, 40)
    trial = question.trial(Candidate("reset", methods.FullReset()), 4)
    trial.close()
    method = methods.FullReset()
    with random_states_kept():
        torch.manual_seed(4)
        apply_to_agent(made, method, generator=torch.Generator().manual_seed(4))
    assert float(made.policy.action_net.weight.detach().norm()) < 0.1  # SB3's own scheme: a gain of .01
    for one, other in zip(made.policy.parameters(), trial._agent.policy.parameters(), strict=True):
        assert torch.equal(one, other)
    assert method._fresh is None  # it may be applied to another agent


def test_a_method_that_acts_while_learning_has_a_call_for_that() -> None:
    made = agent("DQN")
    question = AgentQuestion(made, Lights, 40)
    both = Candidate("both", methods.Compose([methods.FIRE(), methods.Parseval(0.01)]))
    assert "apply_to_agent" in question.call(both) and "RekindleCallback" in question.call(both)
    assert question.call(Candidate("l2", methods.L2Init(0.1))).startswith("agent.learn(…, callback=")
    assert question.call(Candidate("nothing")) == "pass  # do nothing"
    with pytest.raises(ValueError, match="acts while an agent learns"):
        apply_to_agent(made, methods.Parseval(0.01))


def poles() -> Any:
    return SubprocVecEnv([partial(gymnasium.make, "CartPole-v1")] * 2, start_method="fork")


def test_environments_in_processes_work_and_all_are_closed() -> None:
    closed = []

    class Closing(Lights):
        def close(self) -> None:
            closed.append(self)

    made = agent("DQN")
    tried = {"nothing": None, "fire": methods.FIRE(), "injection": methods.PlasticityInjection(head="q_net")}
    advise_agent(made, Closing, steps=20, candidates=tried, seeds=1, workers=1)
    assert len(closed) == 2 + 3  # two to see that they differ
    several = sb3.PPO("MlpPolicy", poles(), n_steps=16, batch_size=16, n_epochs=1)
    try:
        advice = advise_agent(several, poles, steps=32, candidates=[methods.FIRE()], seeds=1, workers=2)
    finally:
        several.get_env().close()
    assert all(row.error is None for row in advice.rows)


def test_the_environment_must_be_new_and_fit() -> None:
    own = Lights()
    made = sb3.DQN("MlpPolicy", own)
    for env in (own, Lights()):
        with pytest.raises(ValueError, match="must make a new one"):
            advise_agent(made, lambda env=env: env, steps=20)
    with pytest.raises(ValueError, match="returned 2 environments at once, and the agent plays in 1"):
        advise_agent(made, lambda: DummyVecEnv([Lights] * 2), steps=20)


def test_copies_write_nothing(tmp_path: Path) -> None:
    made = sb3.DQN("MlpPolicy", Lights(), tensorboard_log=str(tmp_path), verbose=1)
    advise_agent(made, Lights, steps=20, candidates=[methods.FIRE()], seeds=1, workers=1)
    assert not list(tmp_path.iterdir()) and made.tensorboard_log is not None


def test_an_error_that_cannot_be_sent_still_has_its_words() -> None:
    class Own(Exception):
        def __init__(self, where: str, what: str) -> None:
            super().__init__(f"{where}: {what}")

    class Broken(Lights):
        def step(self, action: Any) -> Any:
            raise Own("lamp", "no current")

    made = agent("DQN")
    with pytest.raises(RuntimeError, match="Own: lamp: no current"):
        advise_agent(made, Broken, steps=20, candidates=[methods.FIRE()], workers=2)


def test_the_budget_counts_before_training_begins() -> None:
    made = sb3.DQN("MlpPolicy", Lights(), learning_starts=10**6)
    question = AgentQuestion(made, Lights, 10**6)
    assert question.first_steps > 10**6
    advice = advise_agent(made, Lights, steps=10**6, candidates=[methods.FIRE()], seeds=1, workers=1, budget="1s")
    # Rounds double, so that the last one may take as long as all before it.
    assert advice.answer == "cannot tell" and advice.steps < 10**5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"make_env": Lights(), "steps": 10}, "make_env is a function"),
        ({"make_env": Lights, "steps": 0}, "steps=0"),
        ({"make_env": Lights, "steps": 10, "seeds": 0}, "at least one seed"),
        ({"make_env": Lights, "steps": 10, "budget": "soon"}, "is not a time"),
        ({"make_env": Lights, "steps": 10, "otherwise": "prayer"}, "none of the candidates"),
    ],
)
def test_bad_arguments_say_what_is_wrong(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        advise_agent(agent("DQN", 0), **copy.copy(options))


@pytest.mark.parametrize("verb", [rekindle.advise, rekindle.probe])
def test_the_verbs_for_networks_name_those_for_agents(verb: Any) -> None:
    with pytest.raises(TypeError, match=r"got DQN: for an agent take advise_agent"):
        verb(agent("DQN", 0), [])


def test_ray_gives_the_same_answer() -> None:
    pytest.importorskip("ray", reason='pip install "torch-rekindle[ray]"')
    made = sb3.DQN("MlpPolicy", "CartPole-v1", seed=0, device="cpu", **OPTIONS["DQN"]).learn(64)  # Ray imports classes
    make = partial(gymnasium.make, "CartPole-v1")
    ask = partial(advise_agent, made, make, steps=48, candidates=[methods.FullReset()], seeds=2, workers=1)
    there, here = ask(on="ray"), ask()
    assert [row.level for row in there.rows] == pytest.approx([row.level for row in here.rows], rel=1e-5)


def test_a_keeper_of_an_agent_lets_copies_play(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the probe says that plasticity is lost, its remedy is chosen by playing, not by stored returns."""
    lost = SimpleNamespace(score=0.1, verdict="lost", enough=True)
    monkeypatch.setattr(keeping, "probe", lambda *_, **__: lost)
    made, candidates = agent("DQN"), {"nothing": None, "full-reset": methods.FullReset()}
    asked: list[float] = []

    def playing(seconds: float) -> Any:
        asked.append(seconds)
        return advise_agent(made, Lights, steps=96, candidates=candidates, otherwise="full-reset", seeds=2, workers=1)

    keeper = rekindle.Keeper(
        lambda: value_regression(made)[0], every=40, share=0.9, candidates=candidates, advise=playing, background=False
    )
    keeper.trigger.elapsed = 1e6
    before = held(made)
    callback = RekindleCallback(keeper)
    made.learn(60, callback=callback, reset_num_timesteps=False)
    assert [note.what for note in keeper.log] == ["ask", "act"] and len(asked) == 1
    assert {receipt.method for receipt in callback.receipts} == {"full-reset"}
    assert any(not torch.equal(before[name], each) for name, each in made.policy.state_dict().items())


def test_a_keeper_is_told_where_its_advice_names_what_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "probe", lambda *_, **__: SimpleNamespace(score=0.1, verdict="lost", enough=True))
    other = SimpleNamespace(chosen="dash", sentence="", answer="apply")
    keeper = rekindle.Keeper([torch.zeros(2, 8)], candidates=[methods.FIRE()], advise=lambda _: other)
    with pytest.raises(ValueError, match=r"chose 'dash'.*nothing, fire.*same candidates="):
        keeper.trigger.inquiry.ask(nn.Linear(8, 4), None, 1.0, lambda: 0.0)
