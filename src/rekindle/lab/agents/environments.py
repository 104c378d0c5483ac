"""Environments that change from task to task: Gymnasium wrappers, each of which keeps the spaces as they were."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from rekindle.extras import require

gymnasium: Any = require("gymnasium", "rl", "an environment for agents")

CHANNELS = 10
"""Of a MinAtar observation; games have 4 to 10, and one network plays them all."""


def made(name: str) -> Any:
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

    >>> env = Shuffled(gymnasium.make("CartPole-v1"), 3)
    >>> plain, moved = env.env.reset(seed=0)[0], env.reset(seed=0)[0]
    >>> bool(np.array_equal(np.sort(np.abs(plain)), np.sort(np.abs(moved))))
    True
    """

    def __init__(self, env: Any, seed: int) -> None:
        super().__init__(env)
        numbers = np.random.default_rng(seed)
        (size,) = env.observation_space.shape
        self._order = numbers.permutation(size)
        self._signs = numbers.choice(np.array([-1, 1], dtype=env.observation_space.dtype), size)

    def observation(self, observation: Any) -> Any:
        """The observation as this task shows it."""
        return observation[self._order] * self._signs


class Shifted(gymnasium.ObservationWrapper):  # type: ignore[misc]
    """A constant of N(0, spread) per entry added to every observation.

    >>> env = Shifted(gymnasium.make("CartPole-v1"), 3, 2.0)
    >>> a = env.reset(seed=0)[0] - env.env.reset(seed=0)[0]
    >>> b = env.reset(seed=1)[0] - env.env.reset(seed=1)[0]
    >>> bool(np.allclose(a, b, atol=1e-6)) and float(np.abs(a).max()) > 0.1
    True
    """

    def __init__(self, env: Any, seed: int, spread: float) -> None:
        super().__init__(env)
        space = env.observation_space
        self._offset = np.random.default_rng(seed).normal(0, spread, space.shape).astype(space.dtype)

    def observation(self, observation: Any) -> Any:
        """The observation with this task's constant."""
        return observation + self._offset


class Padded(gymnasium.ObservationWrapper):  # type: ignore[misc]
    """A MinAtar observation (10, 10, channels) of truth values as (10, 10, 10) of uint8, channels first.

    uint8 because a replay buffer of floats would be four times as large.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(0, 1, (CHANNELS, 10, 10), np.uint8)

    def observation(self, observation: Any) -> Any:
        """Channels first, missing ones zero."""
        shown = np.zeros((CHANNELS, 10, 10), np.uint8)
        shown[: observation.shape[-1]] = np.moveaxis(observation, -1, 0)
        return shown


def minatar(game: str) -> Any:
    """A MinAtar game with all six actions and ten channels.

    >>> env = minatar("Freeway")
    >>> env.observation_space.shape, int(env.action_space.n), env.reset(seed=0)[0].dtype.name
    ((10, 10, 10), 6, 'uint8')
    """
    registering = require("minatar.gym", "rl", "a MinAtar game")
    name = f"MinAtar/{game}-v0"  # v1 has only the actions that a game uses: another space in each
    if name not in gymnasium.registry:
        registering.register_envs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return Padded(gymnasium.make(name))


def atari(name: str) -> Any:
    """An Atari game as DQN sees it: 84×84 grey, four frames, sticky actions, rewards clipped; returns are unclipped."""
    gymnasium.register_envs(require("ale_py", "rl", "an Atari game"))
    monitor = require("stable_baselines3.common.monitor", "rl", "an Atari game").Monitor
    wrappers = gymnasium.wrappers
    game = gymnasium.make(name, frameskip=1, repeat_action_probability=0.25)
    game = monitor(wrappers.AtariPreprocessing(game))  # inside, so that it sees the rewards as they are
    game = wrappers.TransformReward(game, lambda reward: float(np.sign(reward)))
    return wrappers.FrameStackObservation(game, 4)


def dm_control(name: str) -> Any:
    """A task of the DeepMind control suite, its observations as one vector of float32."""
    gymnasium.register_envs(require("shimmy", "rl-more", "a task of dm_control"))
    wrappers = gymnasium.wrappers
    return wrappers.DtypeObservation(wrappers.FlattenObservation(gymnasium.make(f"{name}-v0")), np.float32)


def changed_physics(env: Any, *, friction: float | None = None, gravity: float | None = None) -> Any:
    """The MuJoCo environment with its friction and gravity multiplied; a reset does not undo that."""
    model = env.unwrapped.model
    if friction is not None:
        model.geom_friction[:, 0] *= friction
    if gravity is not None:
        model.opt.gravity[:] = model.opt.gravity * gravity
    return env


def factor(seed: int, ends: Sequence[float] | None) -> float | None:
    """A number between the ends, log-uniformly.

    >>> 0.1 <= factor(0, (0.1, 10.0)) <= 10.0, factor(0, None)
    (True, None)
    """
    if ends is None:
        return None
    low, high = ends
    if not 0 < low <= high:
        raise ValueError(f"{list(ends)}: the ends of a factor are above zero, the lower first")
    return float(math.exp(np.random.default_rng(seed).uniform(math.log(low), math.log(high))))
