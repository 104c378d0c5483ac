"""Which remedy for an agent? Copies of it play on, each with another remedy, and the return decides.

    advice = advise_agent(agent, lambda: gymnasium.make("CartPole-v1"), steps=20_000)
    print(advice)
    sb3.apply_to_agent(agent, advice.choice)

What an agent will learn from does not exist yet, so nothing can be tried on stored data: learning the stored returns by
regression was tried, and does not show what an agent will earn (docs/evidence/instruments.md). Copies therefore collect
their own data, in environments of their own. SB3's `learn` cannot be left and entered again without changing what it
does, so each copy learns in a thread that waits between two advances; one thread runs at a time.
"""

from __future__ import annotations

import copy
import io
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from threading import Condition, Thread
from time import perf_counter
from typing import Any

import numpy as np
import torch

from rekindle.advice.advising import Advice, compared
from rekindle.advice.candidates import Candidate, to_try
from rekindle.advice.progress import seconds_of
from rekindle.advice.trials import Trace
from rekindle.extras import require
from rekindle.integrations.agent_networks import (
    apply_to_agent,
    observations,
    trained,
)
from rekindle.integrations.sb3 import RekindleCallback
from rekindle.isolation import random_states_kept
from rekindle.methods.learning_rate import LearningRate, Rewarm
from rekindle.methods.remedy import moments
from rekindle.projection.method import Method

_callbacks: Any = require("stable_baselines3.common.callbacks", "rl", "advise_agent")
_monitor = require("stable_baselines3.common.monitor", "rl", "advise_agent")

_NEVER = 2**62
_OVERFLOWS = 1e18  # the square of a larger number is not finite in float32
_BEGINNING = 0.125  # of a trial: the return until then is where learning began


def advise_agent(
    agent: object,
    make_env: Callable[[], Any],
    *,
    steps: int,
    candidates: Mapping[str, Method | None] | Iterable[Method] | None = None,
    layers: bool = False,
    otherwise: str | None = None,
    prepare: Callable[[Any], object] | None = None,
    restart: bool = True,
    budget: float | str = "10m",
    seeds: int | Sequence[int] = 5,
    copies: Callable[[], Any] | None = None,
    workers: int | None = None,
    on: str | None = None,
    progress: bool | None = None,
) -> Advice:
    """Let copies of an SB3 agent play with different remedies, and say which to apply, if any. The agent is unchanged.

    make_env: returns a new environment of what the agent will play next, wrapped as its own is (several in parallel,
        VecNormalize with its statistics); each copy has one.
    steps: environment steps of a trial. Half of the training that will follow chose well, a tenth did not
        (docs/evidence/instruments.md). Schedules of the agent (exploration, learning rate) are compressed into them.
    prepare: a function of a copy that does what else happens before the agent goes on, after the remedy: for instance
        `sb3.empty_replay`. Without it replay, temperature and optimizers stay as they are.
    restart: whether steps are counted from 0 again, as in `learn(reset_num_timesteps=True)`.
    budget: seconds, or a text such as "90s", "10m"; one that ends before a quarter of the steps gives "cannot tell".
    copies: a function that returns a copy of the agent; without it SB3's own save and load, with the replay buffer.
    seeds: returns differ more from seed to seed than losses: at least five.
    candidates, layers, otherwise, workers, on, progress: those of `rekindle.advise`.

    The advice prints returns: the mean of the episodes that ended in the second half of the steps so far. While no
    candidate earns a fifth more than doing nothing did in the first eighth, the answer is "cannot tell": nobody has
    learned anything yet. It is the same where no episode of doing nothing ended.
    """
    began, seconds = perf_counter(), seconds_of(budget)
    if not callable(make_env):
        raise ValueError(f"make_env is a function that returns an environment, got {type(make_env).__name__}")
    if steps < 1:
        raise ValueError(f"steps={steps}: give the environment steps of a trial")
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not chosen:
        raise ValueError("advise needs at least one seed")
    with random_states_kept():
        seen = observations(agent)
        batches = [] if seen is None else [seen["critic"]]
        tried = to_try(trained(agent)[0], batches, candidates, layers)
        rates = [one.name for one in tried if isinstance(one.method, LearningRate | Rewarm)]
        if candidates is not None and rates:
            raise ValueError(f"candidate {rates[0]!r}: SB3 sets the rate at every update, change agent.lr_schedule")
        tried = [one for one in tried if one.name not in rates]
        question = AgentQuestion(agent, make_env, steps, prepare, restart, copies)
        if question.checked():
            workers = 1  # what has processes of its own cannot be made in a forked one
        return compared(
            question,
            tried,
            chosen,
            until=(began, seconds),
            steps=steps,
            otherwise=otherwise,
            workers=workers,
            on=on,
            progress=progress,
            judged_on="episodes that ended in the second half of the steps so far",
            measure="return",
        )


@dataclass(frozen=True)
class AgentQuestion:
    """What every trial of an agent has in common."""

    agent: Any
    make_env: Callable[[], Any]
    steps: int
    prepare: Callable[[Any], object] | None = None
    restart: bool = True
    copies: Callable[[], Any] | None = None

    @property
    def device(self) -> str:
        """The type of device that the agent is on."""
        return str(torch.device(self.agent.device).type)

    @property
    def first_steps(self) -> int:
        """Until its networks are trained for the first time: before, a step costs less than later ones."""
        per_step = getattr(self.agent, "n_envs", 1)
        before = getattr(self.agent, "learning_starts", None) or getattr(self.agent, "n_steps", 0) * per_step
        if not self.restart and hasattr(self.agent, "learning_starts"):
            before = max(before - self.agent.num_timesteps, 0)
        return int(before) + 8 * per_step

    def call(self, candidate: Candidate) -> str:
        """What to write to apply this candidate."""
        found: list[str] = []
        if candidate.method is not None and _event(candidate.method) is not None:
            found.append(f"rekindle.integrations.sb3.apply_to_agent(agent, {candidate.written})")
        if (when := _while_learning(candidate.method)) is not None:
            more = "".join(f", {name}={value}" for name, value in when.items())
            found.append(
                f"agent.learn(…, callback=rekindle.integrations.sb3.RekindleCallback({candidate.written}{more}))"
            )
        return ", then ".join(found) or candidate.call

    def checked(self) -> bool:
        """Whether environments have processes of their own; an error if `make_env` gives none that is new and fits."""
        made = [self.make_env() for _ in range(2)]
        used = getattr(self.agent.get_env(), "envs", None) or [self.agent.get_env()]
        if any(_inner(made[0]) is _inner(each) for each in (made[1], *used) if each is not None):
            raise ValueError("make_env returned the same environment again, or the agent's own: it must make a new one")
        count, own = getattr(made[0], "num_envs", 1), getattr(self.agent, "n_envs", 1)
        for each in made:
            each.close()
        if count != own:
            raise ValueError(
                f"make_env returned {count} environments at once, and the agent plays in {own}: give as many"
            )
        return any(hasattr(each, "processes") for each in _wrapped(made[0]))

    def trial(self, candidate: Candidate, seed: int) -> AgentTrial:
        """A copy of the agent with this candidate's remedy."""
        return AgentTrial(self, candidate, seed)

    def copied(self) -> Any:
        """A copy of the agent in an environment of its own."""
        if self.copies is not None:
            made = self.copies()
            made.set_env(self.make_env())
            return _silent(made)
        file = io.BytesIO()
        self.agent.save(file)
        file.seek(0)
        made = type(self.agent).load(file, env=self.make_env(), device=self.agent.device)
        for name in ("replay_buffer", "rollout_buffer"):
            if (buffer := getattr(self.agent, name, None)) is not None:
                own = copy.deepcopy(buffer)
                if hasattr(own, "set_env"):
                    own.set_env(made.get_env())  # hindsight replay asks it for rewards
                setattr(made, name, own)
        return _silent(made)


class AgentTrial:
    """One candidate with one seed: an agent that learns in a thread, and waits there between two advances."""

    def __init__(self, question: AgentQuestion, candidate: Candidate, seed: int) -> None:
        self.trace = Trace()
        self._question = question
        self._method: Any = copy.deepcopy(candidate.method)
        self._states = _seeded(seed)
        self._pace = _Pace()
        self._thread = Thread(target=self._learn, daemon=True)
        self._failed: BaseException | None = None
        with self._own_random_states():
            self._agent = question.copied()
            try:
                if self._method is not None and _event(self._method) is not None:
                    apply_to_agent(self._agent, self._method, generator=torch.Generator().manual_seed(seed), seed=seed)
            except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
                self._refuse(error)
                return
            if question.prepare is not None:
                question.prepare(self._agent)
            self._agent.set_random_seed(seed)

    def advance(self, steps: int, horizon: float = math.inf) -> Trace:
        """Let the agent take `steps` more steps."""
        if self.trace.error is not None:
            return self.trace
        with self._own_random_states():
            if not self._thread.is_alive() and self.trace.steps == 0:
                self._thread.start()
            self._pace.allow(steps)
        if self._failed is not None and not self._diverged():
            if self._method is None or not isinstance(self._failed, Exception):
                raise self._failed  # of the agent or its environment
            self._refuse(self._failed)
            return self.trace
        taken = self.trace.steps + steps
        self.trace.losses += [math.inf if self._failed is not None else -self._pace.earned(taken)] * steps
        if math.isnan(self.trace.begun) and taken >= _BEGINNING * self._question.steps:
            self.trace.begun = -self._pace.earned_first(_BEGINNING * self._question.steps)
        return self.trace

    def close(self) -> None:
        """Stop learning, and close the environment."""
        self._pace.stop()
        if self._thread.is_alive():
            self._thread.join()
        if (env := self._agent.get_env()) is not None:
            env.close()

    def _refuse(self, error: Exception) -> None:
        self.trace.error = f"{type(error).__name__}: {error}".splitlines()[0]

    def _learn(self) -> None:
        when = _while_learning(self._method)
        callbacks: list[Any] = []
        if when is not None:
            # A part that acts at an event has acted already.
            never = {"at": _NEVER} if _event(self._method) is not None else {}
            callbacks = [RekindleCallback(self._method, **(when or never))]
        try:
            self._agent.learn(
                self._question.steps,
                callback=[*callbacks, self._pace.callback],
                log_interval=None,
                reset_num_timesteps=self._question.restart,
            )
        except BaseException as error:
            self._failed = error
        finally:
            self._pace.end()

    def _diverged(self) -> bool:
        """Whether it has weights that are not finite, or whose squares are not."""
        return not all(bool((p.detach().abs() < _OVERFLOWS).all()) for p in self._agent.policy.parameters())

    @contextmanager
    def _own_random_states(self) -> Iterator[None]:
        """SB3 draws from the global states, which trials that take turns must not share."""
        with random_states_kept():
            _restore(self._states)
            yield
            self._states = _states()


class _Pace:
    """Allows a number of steps, and waits until they are taken; the agent's thread waits in its callback."""

    def __init__(self) -> None:
        self.callback: Any = _PaceCallback(self)
        self.episodes: list[tuple[int, float]] = []  # step and return
        self.open: list[float] = []  # what the episodes that are going on have earned, one per environment
        self._turn = Condition()
        self._allowed, self._taken = 0, 0
        self._stopped = self._ended = False

    def allow(self, steps: int) -> None:
        """Let the agent go on; returns when it has taken these steps or has ended."""
        with self._turn:
            self._allowed += steps
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._taken >= self._allowed or self._ended)

    def earned(self, taken: int) -> float:
        """The mean return of the episodes that ended in the second half of the steps taken.

        Where none did, those that go on count with what they have earned: one that is too good, or too bad, to end.
        """
        return fmean([value for step, value in self.episodes if step > taken / 2] or self.open or [0.0])

    def earned_first(self, until: float) -> float:
        """The mean return of the episodes that ended until this step, or of the first that ended; nan if none did."""
        if not self.episodes:
            return math.nan
        return fmean([value for step, value in self.episodes if step <= until] or [self.episodes[0][1]])

    def stop(self) -> None:
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    def end(self) -> None:
        with self._turn:
            self._ended = True
            self._turn.notify_all()

    def step(self, taken: int) -> bool:
        """Called by the agent after a step; False where it is to stop."""
        with self._turn:
            if taken >= self._allowed:
                self._taken = taken
                self._turn.notify_all()
                self._turn.wait_for(lambda: taken < self._allowed or self._stopped)
            return not self._stopped


class _PaceCallback(_callbacks.BaseCallback):  # type: ignore[misc]
    """Keeps the pace, and notes the episodes that ended."""

    def __init__(self, pace: _Pace) -> None:
        super().__init__()
        self._pace, self._begun = pace, 0
        self._sums: Any = None

    def _on_training_start(self) -> None:
        self._begun, env = self.num_timesteps, self.training_env
        self._sums, self._monitored = np.zeros(env.num_envs), all(env.env_is_wrapped(_monitor.Monitor))

    def _on_step(self) -> bool:
        taken = self.num_timesteps - self._begun
        normalized = self.model.get_vec_normalize_env()
        self._sums += self.locals["rewards"] if normalized is None else normalized.get_original_reward()
        for place, (done, info) in enumerate(zip(self.locals["dones"], self.locals["infos"], strict=True)):
            # SB3's Monitor knows when a game is over, where a wrapper outside it ends an episode with each life.
            if "episode" in info if self._monitored else done:
                value = info["episode"]["r"] if self._monitored else self._sums[place]
                self._pace.episodes.append((taken, float(value)))
                self._sums[place] = 0.0
        self._pace.open = self._sums.tolist()
        return self._pace.step(taken)


def _event(method: object) -> object:
    """What a method does at once, before the agent goes on; None where it only acts while the agent learns."""
    act = moments(method).get("event")
    return None if getattr(act, "watches", False) and getattr(act, "period", None) else act


def _while_learning(method: object) -> dict[str, Any] | None:
    """The arguments of the callback of a method that acts while an agent learns; None for one that does not."""
    act = moments(method).get("event")
    if act is not None and _event(method) is None:
        return {"every": act.period}
    return {} if moments(method).keys() - {"event"} else None


def _silent(agent: Any) -> object:
    """A copy writes no tables and no TensorBoard files, and is not served by the callbacks of the agent."""
    agent.tensorboard_log, agent.verbose = None, 0
    if hasattr(agent, "rekindle_state"):
        agent.rekindle_state = {}
    return agent


def _inner(env: object) -> object:
    return getattr(env, "unwrapped", env)


def _wrapped(env: object) -> Iterator[Any]:
    """An environment for several, and those inside it."""
    while env is not None:
        yield env
        env = getattr(env, "venv", None)


def _seeded(seed: int) -> tuple[Any, Any, Any]:
    with random_states_kept():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        return _states()


def _states() -> tuple[Any, Any, Any]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), np.random.get_state(), [torch.get_rng_state(), *devices]


def _restore(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2][0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states[2][1:])
