"""One run of an agent: it learns the tasks of a stream one after the other, with one remedy between them.

The counterpart of `rekindle.lab.train` for agents: the same rows, arms and boundaries, SB3's own `learn` inside.
Fairness is built in: environments, exploration and the first weights depend on the seed and the task alone; replay,
temperature and optimizers are reset or kept at a boundary as the setting says, the same for every arm.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from rekindle.integrations import sb3
from rekindle.isolation import random_states_kept
from rekindle.lab.agents import AgentStream
from rekindle.lab.agents.building import build, restore, state_of
from rekindle.lab.evaluation import POINTS, HealthNumbers, finite, health_numbers
from rekindle.lab.settings import FirstTask, Run, read_source
from rekindle.lab.sources import derive, generator
from rekindle.lab.train import Refused
from rekindle.methods.remedy import Moment, moments

Row = dict[str, Any]
_CHANCE_STEPS = 2_000  # that random actions are watched for
_NEVER = 2**62


def execute(run: Run, *, starts: Path | None = None) -> Iterator[Row]:
    """Do the run; rows as those of `rekindle.lab.train.execute`: a start, one per task, an end.

    `starts` is a folder for the state after the first task, which runs that do the same until then share, and for the
    state after the last finished task, from which a killed run continues. The caller's random states are restored
    whenever a row is yielded.
    """
    begun = time.perf_counter()
    if run.setting.source is not None:
        read_source(run.setting.source)
    stream = run.setting.make_agent_stream(run.seed)
    end: Row = {"kind": "end"}
    refused = None
    with random_states_kept():
        try:
            learner: AgentLearner | None = AgentLearner(run, stream)
        except Refused as reason:
            learner, refused = None, str(reason)
    about = {"tasks": len(stream), "classes": None, "shape": [] if learner is None else learner.shape}
    parameters = 0 if learner is None else learner.parameters
    yield run.start_row(about, parameters, "stable-baselines3", "gymnasium")
    if learner is not None:
        try:
            yield from _tasks(run, learner, starts)
        except Refused as reason:
            refused = str(reason)
    if refused is not None:
        end["refused"] = refused
    yield {**end, "seconds": time.perf_counter() - begun}


def _tasks(run: Run, learner: AgentLearner, starts: Path | None) -> Iterator[Row]:
    first = run.saved_first_task(starts) if starts is not None and learner.acts_at_boundaries else None
    last = FirstTask(starts, {"identity": run.identity, "code": run.code}) if starts is not None else None
    kept = last.load() if last is not None else None
    done: list[Row] = []
    if kept is not None:
        learner.restore(kept)
        done = kept["rows"]
        yield from done
    for index in range(len(done), len(learner.stream)):
        shared = first.load() if first is not None and index == 0 else None
        if shared is not None:
            learner.restore(shared)
            row: Row = shared["rows"][0]
        else:
            with random_states_kept():
                row = learner.train_task(index)
            if first is not None and index == 0:
                first.save({**learner.state(), "rows": [row]})
        done.append(row)
        if last is not None and index + 1 < len(learner.stream) and learner.portable:
            last.save({**learner.state(), "rows": done})
        yield row
    if last is not None:
        last.path.unlink(missing_ok=True)


class AgentLearner:
    """One agent that learns a stream: the agent, its method, and when that acts."""

    def __init__(self, run: Run, stream: AgentStream) -> None:
        self.setting, self.seed, self.stream = run.setting, run.seed, stream
        self.arm = run.arm.within(run.setting)
        self.agent = build(run.setting, self.arm, stream.environment(0), run.seed)
        module, self.optimizers = sb3.trained(self.agent)
        self.parameters = sum(p.numel() for p in module.parameters())
        self.shape = list(self.agent.observation_space.shape)
        self.method = self.arm.build()
        self.acts: dict[Moment, Any] = {} if self.method is None else moments(self.method)
        self.generator = generator(run.seed, "method")
        self._names = set(self.agent.policy.state_dict())
        try:
            if self.method is not None:
                sb3.refuse_what_breaks(self.agent, self.method)
            if hasattr(self.method, "remember"):
                self.method.remember(module)
        except (ValueError, NotImplementedError) as reason:
            raise Refused(str(reason)) from reason

    @property
    def acts_at_boundaries(self) -> bool:
        """Whether the first task is the same as if there were no remedy."""
        return not self.acts or not self._acts_inside

    @property
    def portable(self) -> bool:
        """Whether the agent still has the modules it was built with, so that a state fits a new one."""
        return set(self.agent.policy.state_dict()) == self._names

    @property
    def _acts_inside(self) -> bool:
        watches = bool(getattr(self.method, "watches", False))
        return bool(self.acts) and (self.acts.keys() != {"event"} or self.arm.when != "boundary" or watches)

    def train_task(self, index: int) -> Row:
        """One task: the boundary, the learning, and what is known afterwards."""
        agent, steps = self.agent, self.stream.steps[index]
        remedy = self.boundary(index) if index else None
        if index:
            agent.set_env(self.stream.environment(index))
        seed = derive(self.seed, "task", index) % 2**31
        chance = None if index and self.stream.continuing else self._chance(index)
        agent.set_random_seed(seed)
        callback = self._callback(index, steps)
        begun, before = time.perf_counter(), getattr(agent, "num_timesteps", 0)
        diverged = False
        try:
            agent.learn(
                steps,
                callback=callback,
                log_interval=None,
                reset_num_timesteps=index == 0 or not self.stream.continuing,
            )
        except (ValueError, NotImplementedError) as reason:
            diverged = not self._finite()
            if not diverged:
                raise Refused(str(reason)) from reason
        diverged = diverged or not self._finite()
        seconds = time.perf_counter() - begun
        done = agent.num_timesteps - (before if self.stream.continuing else 0)
        episodes = _episodes(agent)
        receipts = [] if callback is None else callback.receipts
        return {
            "kind": "task",
            "task": index,
            "name": self.stream.names[index],
            "steps": done,
            "return": None if diverged else _mean_or_none(value for step, value in episodes if step > done / 2),
            "online_return": _mean_or_none(value for _, value in episodes),
            "chance_return": chance,
            "episodes": len(episodes),
            "curve": curve(episodes, done),
            "seconds": seconds,
            "remedy_seconds": (remedy or {}).get("seconds", 0.0) + sum(each.seconds for each in receipts),
            "remedy": remedy,
            "applied": len(receipts) if "event" in self.acts else 0,
            "health": None if diverged or not self.setting.health else agent_health(agent),
            "diverged": diverged,
        }

    def boundary(self, index: int) -> Row | None:
        """The boundary before a task: the remedy, then targets, replay, temperature, optimizers, equal for all arms."""
        torch.manual_seed(derive(self.seed, "boundary", index) % 2**31)
        found = self._apply_remedy(index) if "event" in self.acts and self.arm.when == "boundary" else None
        self.settle(self.agent)
        return found

    def settle(self, agent: object) -> None:
        """What happens to the rest of an agent at a boundary, after the remedy."""
        sb3.follow_targets(agent)
        if self.stream.temperature == "reset":
            sb3.reset_temperature(agent)
        if self.stream.buffer == "empty":
            sb3.empty_replay(agent)
        if self.setting.new_optimizer:
            for optimizer in sb3.trained(agent)[1]:
                optimizer.state.clear()

    def _apply_remedy(self, index: int) -> Row:
        begun, failed, receipt = time.perf_counter(), None, None
        try:
            receipt = sb3.apply_to_agent(
                self.agent,
                self.acts["event"],
                generator=self.generator,
                seed=derive(self.seed, "looking", index),
            )
        except (ValueError, NotImplementedError) as error:
            if self._finite():
                raise Refused(str(error)) from error
            failed = str(error)
        return {
            "seconds": time.perf_counter() - begun,
            "changed": 0 if receipt is None else len(receipt.changed),
            "failed": failed,
        }

    def _callback(self, index: int, steps: int) -> sb3.RekindleCallback | None:
        """What acts while the agent learns; None where nothing does."""
        if not self._acts_inside or (self.setting.spare_first and index == 0):
            return None
        # A new callback counts the steps of this task; what the method has gathered is the method's own.
        self.agent.rekindle_state = {}
        if "event" not in self.acts:
            return sb3.RekindleCallback(self.method)
        when = self.arm.when
        if when == "boundary":
            return sb3.RekindleCallback(self.method, at=_NEVER)
        every = self.acts["event"].period if when == "period" else when
        # An agent has no epochs: a tenth of the task stands for one. Nothing acts when the task is over.
        every = every if isinstance(every, int) else min(self.arm.epochs, 9) * max(1, steps // 10)
        return sb3.RekindleCallback(self.method, every=every)

    def _chance(self, index: int) -> float | None:
        """The mean return of random actions in this task's environment; the last episode counts if none ended."""
        env = self.stream.environment(index)
        seed = derive(self.seed, "chance", index) % 2**31
        env.action_space.seed(seed)
        env.reset(seed=seed)
        done: list[float] = []
        total = 0.0
        for _ in range(_CHANCE_STEPS):
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total += float(reward)
            if terminated or truncated:
                done.append(total)
                total = 0.0
                env.reset()
        env.close()
        return finite(fmean(done) if done else total)

    def _finite(self) -> bool:
        return all(bool(torch.isfinite(p).all()) for p in self.agent.policy.parameters())

    def state(self) -> Row:
        """What another run of the same beginning needs, and this one after it was killed."""
        method = self.method.state_dict() if hasattr(self.method, "state_dict") else None
        return {
            # Also where it is emptied: only at the boundary, after methods have looked at it.
            "agent": state_of(self.agent, buffer=True),
            # One that acts at boundaries only draws from the generator below, and has gathered nothing.
            "method": method if self._acts_inside else None,
            "generator": self.generator.get_state(),
        }

    def restore(self, kept: Row) -> None:
        """Continue where `state` was taken."""
        restore(self.agent, kept["agent"])
        if kept["method"] is not None and hasattr(self.method, "load_state_dict"):
            self.method.load_state_dict(kept["method"])
        self.generator.set_state(kept["generator"])


def curve(episodes: Sequence[tuple[int, float]], steps: int, points: int = POINTS) -> list[list[Any]]:
    """At most `points` times [step, mean return of the episodes that ended since the one before, None].

    The third place is where networks have their loss.
    """
    edges = sorted({round(place * steps / points) for place in range(points + 1)})
    return [
        [high, _mean_or_none(value for step, value in episodes if low < step <= high), None]
        for low, high in pairwise(edges)
    ]


def agent_health(agent: object) -> HealthNumbers | None:
    """The health of all trained networks on a batch of the agent's buffer; None where it holds nothing."""
    batches = sb3.observations(agent)  # of the critic: observations, and actions where there is one
    return None if batches is None else health_numbers(sb3.trained(agent)[0], batches["critic"])


def _episodes(agent: Any) -> list[tuple[int, float]]:
    """Step and return of every episode that ended in this environment, from SB3's own Monitor."""
    lengths = np.cumsum(agent.env.env_method("get_episode_lengths")[0])
    returns = agent.env.env_method("get_episode_rewards")[0]
    return [(int(step), float(value)) for step, value in zip(lengths, returns, strict=True)]


def _mean_or_none(values: Iterable[float]) -> float | None:
    found = list(values)
    return finite(fmean(found)) if found else None
