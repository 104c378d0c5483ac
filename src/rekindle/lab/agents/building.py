"""The agent of a setting, and its environments.

An agent is a stable-baselines3 class with the setting's options, its weights drawn from the run's seed.
`network_options` are SB3's own, but for three: `width` and `activation` of the hidden layers, and `extractor`
("minatar": a small convolutional network for 10×10 observations, "nature": SB3's for Atari, "normed": two hidden layers
with a LayerNorm behind each).

`state_of` is what an agent needs to continue from a task boundary bit for bit: tensors and plain values, nothing
pickled. Environments and random generators are not part of it: each task has a new environment, and all generators are
seeded by the run's seed and the task's number when it begins.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rekindle.extras import require
from rekindle.integrations.sb3 import trained
from rekindle.lab.arms import Arm
from rekindle.lab.settings import Setting
from rekindle.lab.sources import derive
from rekindle.lab.train import Refused, optimizer_of

gymnasium: Any = require("gymnasium", "rl", "an environment for agents")
_sb3 = require("stable_baselines3", "rl", "an agent in the laboratory")
_extractors: Any = require("stable_baselines3.common.torch_layers", "rl", "an agent in the laboratory")

CHANNELS = 10
"""Of a MinAtar observation; games have 4 to 10, and one network plays them all."""
AGENTS = {"dqn": "DQN", "sac": "SAC", "td3": "TD3", "ppo": "PPO", "a2c": "A2C"}
_ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "elu": nn.ELU, "silu": nn.SiLU}
_OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


class SmallCNN(_extractors.BaseFeaturesExtractor):  # type: ignore[misc]
    """One convolution of 3×3 and one hidden layer, for 10×10 observations, as the MinAtar paper has them."""

    def __init__(self, observation_space: object, features_dim: int = 128, filters: int = 16) -> None:
        super().__init__(observation_space, features_dim)
        self.convolution = nn.Conv2d(CHANNELS, filters, 3)
        self.hidden = nn.Linear(filters * 8 * 8, features_dim)

    def forward(self, observations: Tensor) -> Tensor:
        """Features (batch, features_dim) of observations (batch, 10, 10, 10)."""
        found: Tensor = self.hidden(self.convolution(observations).relu().flatten(1)).relu()
        return found


class NormedMLP(_extractors.BaseFeaturesExtractor):  # type: ignore[misc]
    """Two hidden layers without a bias and with a LayerNorm behind each: the norms of their weights are free."""

    def __init__(self, observation_space: Any, features_dim: int = 64) -> None:
        super().__init__(observation_space, features_dim)
        layers: list[nn.Module] = []
        for size in (int(np.prod(observation_space.shape)), features_dim):
            layers += [nn.Linear(size, features_dim, bias=False), nn.LayerNorm(features_dim), nn.ReLU()]
        self.body = nn.Sequential(nn.Flatten(), *layers)

    def forward(self, observations: Tensor) -> Tensor:
        """Features (batch, features_dim)."""
        found: Tensor = self.body(observations)
        return found


_EXTRACTORS = {"minatar": SmallCNN, "normed": NormedMLP}


def build(setting: Setting, arm: Arm, env: object, seed: int) -> Any:
    """The agent as it starts; `seed` is the run's. Draws from torch's global random state: fork it first."""
    if setting.network not in AGENTS:
        raise ValueError(f"setting {setting.name!r}: network {setting.network!r} is not one of {', '.join(AGENTS)}")
    options = dict(setting.network_options)
    policy: dict[str, Any] = dict(options.pop("policy_kwargs", {}))
    extractor, width = options.pop("extractor", None), options.pop("width", [64, 64])
    policy["net_arch"] = {key: list(each) for key, each in width.items()} if isinstance(width, dict) else list(width)
    activation = options.pop("activation", "relu")
    if activation not in _ACTIVATIONS or extractor not in (None, "nature", *_EXTRACTORS):
        raise ValueError(
            f"setting {setting.name!r}: activation={activation!r} is one of {', '.join(_ACTIVATIONS)}; "
            f'extractor={extractor!r} is "minatar", "nature", "normed" or none'
        )
    policy["activation_fn"] = _ACTIVATIONS[activation]
    if extractor in _EXTRACTORS:
        policy["features_extractor_class"] = _EXTRACTORS[extractor]
    policy |= _optimizer(setting, arm)
    if setting.network != "a2c":
        options["batch_size"] = setting.batch
    if "train_freq" in options and isinstance(options["train_freq"], list):
        options["train_freq"] = tuple(options["train_freq"])  # JSON has lists only
    rate = setting.lr * (1.0 if arm.lr is None else arm.lr)
    kind = getattr(_sb3, AGENTS[setting.network])
    try:
        return kind(
            "CnnPolicy" if extractor == "nature" else "MlpPolicy",
            env,
            learning_rate=rate,
            policy_kwargs=policy,
            seed=derive(seed, "agent") % 2**31,
            device="cpu",
            **options,
        )
    except TypeError as error:
        raise ValueError(f"setting {setting.name!r}: {kind.__name__} does not take {options}: {error}") from error


def _optimizer(setting: Setting, arm: Arm) -> dict[str, Any]:
    kind, options = optimizer_of(setting, arm)
    if kind not in _OPTIMIZERS:
        raise Refused(f"an agent's optimizer is {', '.join(_OPTIMIZERS)}; {kind} is for networks in the laboratory")
    if options.pop("lr", None) is not None:
        raise Refused("SB3 writes the learning rate itself: give the setting's lr or the arm's factor")
    return {"optimizer_class": _OPTIMIZERS[kind], "optimizer_kwargs": options}


_COUNTERS = ("num_timesteps", "_episode_num", "_n_updates", "_n_calls", "exploration_rate")
_SEEN = ("observations", "actions", "returns")  # of a rollout, which methods read before the next one begins
_ROWS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


def state_of(agent: Any, *, buffer: bool) -> dict[str, Any]:
    """The state of an agent between two calls of `learn`; with its replay if `buffer` says so."""
    state: dict[str, Any] = {
        "policy": agent.policy.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trained(agent)[1]],
        "counters": {name: getattr(agent, name) for name in _COUNTERS if hasattr(agent, name)},
        "temperature": None,
        "buffer": None,
        "rollout": None,
    }
    if isinstance(getattr(agent, "log_ent_coef", None), Tensor):
        state["temperature"] = [agent.log_ent_coef.detach().clone(), agent.ent_coef_optimizer.state_dict()]
    if buffer and getattr(agent, "replay_buffer", None) is not None:
        state["buffer"] = _replay(agent.replay_buffer)
    rollout = getattr(agent, "rollout_buffer", None)
    if buffer and rollout is not None and rollout.full:
        rows = {name: torch.from_numpy(getattr(rollout, name).copy()) for name in _SEEN}
        state["rollout"] = {"rows": rows, "flat": bool(rollout.generator_ready)}
    return state


def restore(agent: Any, state: Mapping[str, Any]) -> None:
    """Make an agent of the same setting what `state_of` saw."""
    agent.policy.load_state_dict(state["policy"])
    for optimizer, kept in zip(trained(agent)[1], state["optimizers"], strict=True):
        optimizer.load_state_dict(kept)
    for name, value in state["counters"].items():
        setattr(agent, name, value)
    if state["temperature"] is not None:
        coefficient, optimizer = state["temperature"]
        with torch.no_grad():
            agent.log_ent_coef.copy_(coefficient)
        agent.ent_coef_optimizer.load_state_dict(optimizer)
    if state["buffer"] is not None:
        _refill(agent.replay_buffer, state["buffer"])
    if state["rollout"] is not None:
        rollout = agent.rollout_buffer
        for name, rows in state["rollout"]["rows"].items():
            setattr(rollout, name, rows.numpy().copy())
        rollout.full, rollout.generator_ready = True, state["rollout"]["flat"]


def _replay(buffer: Any) -> dict[str, Any]:
    """Only the rows that are filled: SB3's own file holds the whole capacity."""
    filled = buffer.buffer_size if buffer.full else buffer.pos
    rows = {name: getattr(buffer, name, None) for name in _ROWS}
    return {
        "position": int(buffer.pos),
        "full": bool(buffer.full),
        "rows": {name: torch.from_numpy(each[:filled].copy()) for name, each in rows.items() if each is not None},
    }


def _refill(buffer: Any, kept: Mapping[str, Any]) -> None:
    for name, rows in kept["rows"].items():
        stored = rows.numpy()
        getattr(buffer, name)[: len(stored)] = np.asarray(stored)
    buffer.pos, buffer.full = kept["position"], kept["full"]


# Environments that change from task to task: Gymnasium wrappers, each of which keeps the spaces as they were


def made(name: str) -> object:
    """The environment of this name: Gymnasium's own, "MinAtar/Breakout", "ALE/Breakout-v5", "dm_control/walker-walk".

    >>> made("CartPole-v1").observation_space.shape
    (4,)
    """
    if name.startswith("MinAtar/"):
        return minatar(name.removeprefix("MinAtar/"))
    if name.startswith("ALE/"):
        return atari(name)
    if name.startswith("dm_control/"):
        return dm_control(name)
    return gymnasium.make(name)


class Shuffled(gymnasium.ObservationWrapper):  # type: ignore[misc]
    """Observations in another order and with other signs, both drawn from a seed.

    The space stays as it is, for an agent has one space in all tasks; its bounds may not hold then, which neither
    Gymnasium's wrappers nor SB3 check.
    """

    def __init__(self, env: Any, seed: int) -> None:
        super().__init__(env)
        numbers = np.random.default_rng(seed)
        (size,) = env.observation_space.shape
        self._order = numbers.permutation(size)
        self._signs = numbers.choice(np.array([-1, 1], dtype=env.observation_space.dtype), size)

    def observation(self, observation: Any) -> object:
        """The observation as this task shows it."""
        return observation[self._order] * self._signs


class Shifted(gymnasium.ObservationWrapper):  # type: ignore[misc]
    """A constant of N(0, spread) per entry added to every observation."""

    def __init__(self, env: Any, seed: int, spread: float) -> None:
        super().__init__(env)
        space = env.observation_space
        self._offset = np.random.default_rng(seed).normal(0, spread, space.shape).astype(space.dtype)

    def observation(self, observation: object) -> object:
        """The observation with this task's constant."""
        return observation + self._offset


class Padded(gymnasium.ObservationWrapper):  # type: ignore[misc]
    """A MinAtar observation (10, 10, channels) of truth values as (10, 10, 10) of uint8, channels first.

    uint8 because a replay buffer of floats would be four times as large.
    """

    def __init__(self, env: object) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(0, 1, (CHANNELS, 10, 10), np.uint8)

    def observation(self, observation: Any) -> object:
        """Channels first, missing ones zero."""
        shown = np.zeros((CHANNELS, 10, 10), np.uint8)
        shown[: observation.shape[-1]] = np.moveaxis(observation, -1, 0)
        return shown


def minatar(game: str) -> object:
    """A MinAtar game with all six actions and ten channels."""
    registering = require("minatar.gym", "rl", "a MinAtar game")
    name = f"MinAtar/{game}-v0"  # v1 has only the actions that a game uses: another space in each
    if name not in gymnasium.registry:
        registering.register_envs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return Padded(gymnasium.make(name))


def atari(name: str) -> object:
    """An Atari game as DQN sees it: 84×84 gray, four frames, sticky actions, rewards clipped; returns are unclipped."""
    gymnasium.register_envs(require("ale_py", "rl", "an Atari game"))
    monitor = require("stable_baselines3.common.monitor", "rl", "an Atari game").Monitor
    wrappers = gymnasium.wrappers
    game = gymnasium.make(name, frameskip=1, repeat_action_probability=0.25)
    game = monitor(wrappers.AtariPreprocessing(game))  # inside, so that it sees the rewards as they are
    game = wrappers.TransformReward(game, lambda reward: float(np.sign(reward)))
    return wrappers.FrameStackObservation(game, 4)


def dm_control(name: str) -> object:
    """A task of the DeepMind control suite, its observations as one vector of float32."""
    gymnasium.register_envs(require("shimmy", "rl-more", "a task of dm_control"))
    wrappers = gymnasium.wrappers
    return wrappers.DtypeObservation(wrappers.FlattenObservation(gymnasium.make(f"{name}-v0")), np.float32)


def changed_physics(env: Any, *, friction: float | None = None, gravity: float | None = None) -> object:
    """The MuJoCo environment with its friction and gravity multiplied; a reset does not undo that."""
    model = env.unwrapped.model
    if friction is not None:
        model.geom_friction[:, 0] *= friction
    if gravity is not None:
        model.opt.gravity[:] = model.opt.gravity * gravity
    return env


def factor(seed: int, ends: Sequence[float] | None) -> float | None:
    """A number between the ends, log-uniformly."""
    if ends is None:
        return None
    low, high = ends
    if not 0 < low <= high:
        raise ValueError(f"{list(ends)}: the ends of a factor are above zero, the lower first")
    return float(math.exp(np.random.default_rng(seed).uniform(math.log(low), math.log(high))))
