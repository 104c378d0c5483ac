"""Agents in the laboratory: stable-baselines3 agents that learn environments which change from task to task.

- here: which environment each task has, by name (`observations`, `offsets`, `games`, …), without Gymnasium;
- `building`: the agent of a setting, what a later continuation of it needs, and the wrappers of environments;
- `learning`: one run, the counterpart of `rekindle.lab.train` for networks.

A setting is one of agents when its stream is one of `STREAMS`; its network is then "dqn", "sac", "td3", "ppo" or "a2c",
and `network_options` go to SB3. Needs the extra `rl`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any, TypedDict, TypeVar, Unpack

from rekindle.lab.sources import derive

GAMES = ("Breakout", "SpaceInvaders", "Freeway", "Asterix", "Seaquest")
_BOUNDARY = {"buffer": ("empty", "keep"), "temperature": ("reset", "keep")}


class BoundaryOptions(TypedDict, total=False):
    """What every stream takes, see `AgentStream`."""

    buffer: str
    temperature: str
    continuing: bool


@dataclass(frozen=True)
class AgentStream:
    """The tasks of a stream for agents, and what happens to the rest of an agent at a boundary, for every arm alike.

    >>> stream("observations", 0, env="CartPole-v1", tasks=2, steps=100).steps
    (100, 100)

    Args:
        names: What each task is called.
        steps: How long each is.
        make: Gives a new environment of a task.
        buffer: Whether its replay is "empty" or "keep".
        temperature: For SAC's entropy coefficient, "reset" or "keep".
        continuing: The training is one and the boundary only a moment in it, so that exploration and learning rates
            continue instead of starting again.
    """

    names: Sequence[str]
    steps: Sequence[int]
    make: Callable[[int], Any] = field(repr=False)
    buffer: str = "empty"
    temperature: str = "reset"
    continuing: bool = False

    def __post_init__(self) -> None:
        if not self.steps or len(self.names) != len(self.steps) or min(self.steps) < 1:
            raise ValueError(f"a stream has at least one task, each of at least one step; got steps={self.steps}")
        for name, known in _BOUNDARY.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is neither {known[0]!r} nor {known[1]!r}")

    def __len__(self) -> int:
        return len(self.steps)

    def environment(self, index: int) -> Any:
        """A new environment of this task."""
        return self.make(index)


Builder = Callable[..., AgentStream]
B = TypeVar("B", bound=Builder)


def observations(seed: int, *, env: str, tasks: int, steps: int, **boundary: Unpack[BoundaryOptions]) -> AgentStream:
    """The same environment, whose observations come in a new order and with new signs in each task but the first."""

    def make(index: int) -> object:
        made = _environments().made(env)
        return made if index == 0 else _environments().Shuffled(made, derive(seed, "observations", index))

    return AgentStream(_numbered("order", tasks), (steps,) * tasks, make, **boundary)


def offsets(
    seed: int, *, env: str, tasks: int, steps: int, spread: float = 2.0, **boundary: Unpack[BoundaryOptions]
) -> AgentStream:
    """The same environment with a constant added to its observations, N(0, spread) per entry, new in each task.

    As TRAC and C-CHAIN have it; the first task has an offset too.
    """

    def make(index: int) -> object:
        return _environments().Shifted(_environments().made(env), derive(seed, "offset", index), spread)

    return AgentStream(_numbered("offset", tasks), (steps,) * tasks, make, **boundary)


def games(
    seed: int,
    *,
    games: Sequence[str] = GAMES[:3],
    rounds: int = 2,
    steps: int = 50_000,
    **boundary: Unpack[BoundaryOptions],
) -> AgentStream:
    """MinAtar games in turn: (10, 10, 10) observations of 0 and 1 as uint8, and all six actions, in every game."""
    unknown = [game for game in games if game not in GAMES]
    if unknown or not games:
        named = repr(unknown[0]) if unknown else "to play"
        raise ValueError(f"MinAtar has no game {named}; it has {', '.join(GAMES)}")
    turns = list(games) * rounds
    return AgentStream(turns, (steps,) * len(turns), lambda index: _environments().minatar(turns[index]), **boundary)


def dynamics(
    seed: int,
    *,
    env: str,
    tasks: int,
    steps: int,
    friction: Sequence[float] | None = None,
    gravity: Sequence[float] | None = None,
    **boundary: Unpack[BoundaryOptions],
) -> AgentStream:
    """A MuJoCo task whose friction or gravity changes: factors are drawn log-uniformly between the two ends given.

    Slippery Ant (Dohare et al.) is env="Ant-v5", friction=(1e-4, 1e4). The first task is the environment as it is.
    """
    if friction is None and gravity is None:
        raise ValueError("dynamics needs friction=(low, high) or gravity=(low, high)")

    def make(index: int) -> object:
        here = _environments()
        factors = {"friction": friction, "gravity": gravity} if index else {}
        drawn = {name: here.factor(derive(seed, name, index), ends) for name, ends in factors.items()}
        return here.changed_physics(here.made(env), **drawn)

    return AgentStream(_numbered("physics", tasks), (steps,) * tasks, make, **boundary)


def midpoint(seed: int, *, env: str, steps: int, tasks: int = 2, **boundary: Unpack[BoundaryOptions]) -> AgentStream:
    """The paper's protocol: one environment, the remedy once at half of the training, which then goes on.

    env: a Gymnasium name, "MinAtar/Breakout", "ALE/Breakout-v5" (84×84, four frames, sticky actions), or
    "dm_control/walker-walk". With more tasks the remedy comes between all equal parts.
    """
    edges = [round(index * steps / tasks) for index in range(tasks + 1)]
    parts = tuple(high - low for low, high in pairwise(edges))
    given: BoundaryOptions = {"buffer": "keep", "temperature": "keep", "continuing": True, **boundary}
    return AgentStream(_numbered("part", tasks), parts, lambda index: _environments().made(env), **given)


def replay_ratio(
    seed: int, *, env: str, steps: int, tasks: int = 4, **boundary: Unpack[BoundaryOptions]
) -> AgentStream:
    """The primacy bias of Nikishin et al.: one environment, many updates per step, the remedy between equal parts.

    The number of updates is the agent's own `gradient_steps`; replay is kept, so that a reset agent learns from it.
    """
    return midpoint(seed, env=env, steps=steps, tasks=tasks, **boundary)


STREAMS: dict[str, Builder] = {
    "observations": observations,
    "offsets": offsets,
    "games": games,
    "dynamics": dynamics,
    "midpoint": midpoint,
    "replay-ratio": replay_ratio,
}


def register(name: str) -> Callable[[B], B]:
    """Add your own stream for agents: a function of a seed and options that gives an `AgentStream`.

    >>> @register("nothing-happens")
    ... def still(seed, *, steps=10):
    ...     return AgentStream(["still"], [steps], lambda index: None)
    >>> stream("nothing-happens", 0).steps
    [10]
    >>> del STREAMS["nothing-happens"]

    Args:
        name: What settings call it.
    """

    def keep(builder: B) -> B:
        STREAMS[name] = builder
        return builder

    return keep


def stream(name: str, seed: int, **options: object) -> AgentStream:
    """The stream of this name."""
    if name not in STREAMS:
        close = difflib.get_close_matches(name, STREAMS, 1)
        known = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(STREAMS)}"
        raise ValueError(f"there is no stream for agents {name!r}; {known}")
    try:
        return STREAMS[name](seed, **options)
    except TypeError as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
        raise ValueError(f"stream {name!r} does not take {shown}: {error}") from error


def _environments() -> ModuleType:
    return import_module("rekindle.lab.agents.building")


def _numbered(word: str, count: int) -> tuple[str, ...]:
    return tuple(f"{word} {index + 1}" for index in range(count))
