"""Streams for agents: how many tasks there are, how long each is, and how its environment is made.

    stream("observations", seed=0, env="Pendulum-v1", tasks=8, steps=5_000).environment(3)

Builders import Gymnasium only when an environment is made, so that settings can be listed without it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from rekindle.lab.sources import derive

GAMES = ("Breakout", "SpaceInvaders", "Freeway", "Asterix", "Seaquest")
_BUFFERS, _TEMPERATURES = ("empty", "keep"), ("reset", "keep")


@dataclass(frozen=True)
class AgentStream:
    """The tasks of a stream: `make(index)` gives a new environment, `names` and `steps` are one per task.

    What happens to the rest of an agent at a boundary is the same for every arm: `buffer` ("empty" or "keep") is for
    its replay, `temperature` ("reset" or "keep") for SAC's entropy coefficient. continuing: the training is one and the
    boundary only a moment in it, so that exploration and learning rates continue instead of starting again.

    >>> stream("observations", 0, env="CartPole-v1", tasks=2, steps=100).steps
    (100, 100)
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
        for name, known in (("buffer", _BUFFERS), ("temperature", _TEMPERATURES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is neither {known[0]!r} nor {known[1]!r}")

    def __len__(self) -> int:
        return len(self.steps)

    def environment(self, index: int) -> Any:
        """A new environment of this task."""
        return self.make(index)


Builder = Callable[..., AgentStream]
B = TypeVar("B", bound=Builder)


def observations(seed: int, *, env: str, tasks: int, steps: int, **boundary: Any) -> AgentStream:
    """The same environment, whose observations come in a new order and with new signs in each task but the first."""

    def make(index: int) -> Any:
        from rekindle.lab.agents import environments

        made = environments.made(env)
        return made if index == 0 else environments.Shuffled(made, derive(seed, "observations", index))

    return AgentStream(_numbered("order", tasks), (steps,) * tasks, make, **boundary)


def offsets(seed: int, *, env: str, tasks: int, steps: int, spread: float = 2.0, **boundary: Any) -> AgentStream:
    """The same environment with a constant added to its observations, N(0, spread) per entry, new in each task.

    As TRAC and C-CHAIN have it; the first task has an offset too.
    """

    def make(index: int) -> Any:
        from rekindle.lab.agents import environments

        return environments.Shifted(environments.made(env), derive(seed, "offset", index), spread)

    return AgentStream(_numbered("offset", tasks), (steps,) * tasks, make, **boundary)


def games(
    seed: int, *, games: Sequence[str] = GAMES[:3], rounds: int = 2, steps: int = 50_000, **boundary: Any
) -> AgentStream:
    """MinAtar games in turn: (10, 10, 10) observations of 0 and 1 as uint8, and all six actions, in every game."""
    unknown = [game for game in games if game not in GAMES]
    if unknown or not games:
        named = repr(unknown[0]) if unknown else "to play"
        raise ValueError(f"MinAtar has no game {named}; it has {', '.join(GAMES)}")
    turns = list(games) * rounds

    def make(index: int) -> Any:
        from rekindle.lab.agents import environments

        return environments.minatar(turns[index])

    return AgentStream(turns, (steps,) * len(turns), make, **boundary)


def dynamics(
    seed: int,
    *,
    env: str,
    tasks: int,
    steps: int,
    friction: Sequence[float] | None = None,
    gravity: Sequence[float] | None = None,
    **boundary: Any,
) -> AgentStream:
    """A MuJoCo task whose friction or gravity changes: factors are drawn log-uniformly between the two ends given.

    Slippery Ant (Dohare et al.) is env="Ant-v5", friction=(1e-4, 1e4). The first task is the environment as it is.
    """
    if friction is None and gravity is None:
        raise ValueError("dynamics needs friction=(low, high) or gravity=(low, high)")

    def make(index: int) -> Any:
        from rekindle.lab.agents import environments

        made = environments.made(env)
        if index == 0:
            return made
        return environments.changed_physics(
            made,
            friction=environments.factor(derive(seed, "friction", index), friction),
            gravity=environments.factor(derive(seed, "gravity", index), gravity),
        )

    return AgentStream(_numbered("physics", tasks), (steps,) * tasks, make, **boundary)


def midpoint(seed: int, *, env: str, steps: int, tasks: int = 2, **boundary: Any) -> AgentStream:
    """The paper's protocol: one environment, the remedy once at half of the training, which then goes on.

    env: a Gymnasium name, "MinAtar/Breakout", "ALE/Breakout-v5" (84×84, four frames, sticky actions), or
    "dm_control/walker-walk".
    """

    def make(index: int) -> Any:
        from rekindle.lab.agents import environments

        return environments.made(env)

    given = {"buffer": "keep", "temperature": "keep", "continuing": True, **boundary}
    return AgentStream(_numbered("part", tasks), _parts(steps, tasks), make, **given)


def replay_ratio(seed: int, *, env: str, steps: int, tasks: int = 4, **boundary: Any) -> AgentStream:
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
    """

    def keep(builder: B) -> B:
        STREAMS[name] = builder
        return builder

    return keep


def stream(name: str, seed: int, **options: Any) -> AgentStream:
    """The stream of this name."""
    if name not in STREAMS:
        close = difflib.get_close_matches(name, STREAMS, 1)
        known = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(STREAMS)}"
        raise ValueError(f"there is no stream for agents {name!r}; {known}")
    try:
        return STREAMS[name](seed, **options)
    except TypeError as error:
        raise ValueError(f"stream {name!r} does not take {_shown(options)}: {error}") from error


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"


def _numbered(word: str, count: int) -> tuple[str, ...]:
    return tuple(f"{word} {index + 1}" for index in range(count))


def _parts(steps: int, count: int) -> tuple[int, ...]:
    """Equal parts of all steps.

    >>> _parts(10, 3)
    (3, 4, 3)
    """
    edges = [round(index * steps / count) for index in range(count + 1)]
    return tuple(high - low for low, high in pairwise(edges))
