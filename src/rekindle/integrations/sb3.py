"""Remedies in stable-baselines3 agents: `agent.learn(100_000, callback=RekindleCallback("fire", every=20_000))`.

Steps are environment steps, as everywhere in SB3. Off-policy agents (DQN, SAC, TD3) are changed after a rollout, before
the gradient steps on it; on-policy agents (PPO, A2C) before a rollout, else old log-probabilities would meet new
weights. All trained networks are one model with all their optimizers; target networks are updated afterwards.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from statistics import fmean
from typing import Any, Literal

import torch
from torch.utils.hooks import RemovableHandle

from rekindle.diagnosis.examination import Health, health
from rekindle.extras import require
from rekindle.integrations.agent_networks import (
    Networks,
    apply_to_agent,
    empty_replay,
    follow_targets,
    fresh_networks,
    members,
    observations,
    refuse_what_breaks,
    reset_temperature,
    targets,
    trained,
    value_loss,
    value_regression,
)
from rekindle.integrations.application import Application
from rekindle.integrations.mirroring import Mirrors
from rekindle.monitoring.schedules import Schedule
from rekindle.monitoring.triggers import Trigger
from rekindle.projection.method import Method
from rekindle.projection.receipt import Receipt

__all__ = [
    "Networks",
    "RekindleCallback",
    "apply_to_agent",
    "empty_replay",
    "follow_targets",
    "fresh_networks",
    "observations",
    "refuse_what_breaks",
    "reset_temperature",
    "targets",
    "trained",
    "value_loss",
    "value_regression",
]

_callbacks: Any = require("stable_baselines3.common.callbacks", "rl", "RekindleCallback for stable-baselines3")
_off_policy = require("stable_baselines3.common.off_policy_algorithm", "rl", "RekindleCallback")

_KEPT = "rekindle_state"  # an attribute of the agent, which SB3 saves with it
_NEVER = 2**62
_WIDTH = 33  # of a name in SB3's table; names that are equal up to there stop the training with an error


class RekindleCallback(Application, _callbacks.BaseCallback):  # type: ignore[misc]
    """A method in an SB3 agent. Further arguments are those of `rekindle.integrations.Application`.

    at: environment steps, or fractions of what one `learn` trains (0.5: at half of it).
    every: a number of environment steps.
    when: a trigger; its metrics are what SB3 logs ("rollout/ep_rew_mean", "train/loss"), and what `monitor` measures.
    monitor: health is measured every so many environment steps on observations of the replay or rollout buffer and
        logged as `rekindle/<network>/…`. For the trigger its numbers are called "<network>/dormant" and so on, and
        without the network's name they are those of the network whose verdict is worst.
    temperature: "reset" also gives SAC's entropy coefficient its first value and a fresh optimizer.
    replay: "empty" also empties the replay buffer.

    A method that needs batches and a loss (DASH) gets `value_regression` of what the agent has stored, unless `batches`
    and `loss` are given. On another agent, which has no state of this callback, it starts as it was made.

    >>> RekindleCallback("fire", at=0.5).name
    'fire'
    """

    def __init__(
        self,
        method: Method | Schedule | str,
        *,
        at: float | Iterable[float] | None = None,
        every: int | None = None,
        when: Trigger | None = None,
        monitor: int | None = None,
        temperature: Literal["keep", "reset"] = "keep",
        replay: Literal["keep", "empty"] = "keep",
        verbose: int = 0,
        **options: Any,
    ) -> None:
        steps, self._fractions = _times(at)
        for name, count in (("every", every), ("monitor", monitor)):
            if count is not None and (not isinstance(count, Integral) or isinstance(count, bool) or count < 1):
                raise ValueError(f"{name} is a positive number of environment steps, got {count!r}")
        for value, known in ((temperature, ("keep", "reset")), (replay, ("keep", "empty"))):
            if value not in known:
                raise ValueError(f"{value!r} is neither {known[0]!r} nor {known[1]!r}")
        timed = self._fractions and not steps and every is None and when is None
        _callbacks.BaseCallback.__init__(self, verbose)
        Application.__init__(
            self, method, at=[*steps, _NEVER] if timed else steps or None, every=every, when=when, **options
        )
        self._asked = [step for step in self.when.at if step != _NEVER]
        self._temperature, self._replay, self._period = temperature, replay, monitor
        self._measured: int | None = None
        self._updated = 0  # gradient steps when it last acted, or when training began
        self._averaging: RemovableHandle | None = None
        self._stored: _StoredValues | None = None
        self._episode: object = None  # the last one that the trigger knows of
        self._shares: dict[int, float] = {}  # of this `learn`: step → fraction
        self._policy: Any = lambda: None  # a weak reference to the policy of the agent that it served last
        self._made = copy.deepcopy(self.state_dict())
        self.health: dict[str, Health] = {}

    # SB3's hooks

    def _init_callback(self) -> None:
        if self.parent is not None:
            raise ValueError(
                f"{type(self.parent).__name__} tells its callbacks of steps only, and agents are changed between "
                "rollouts: give RekindleCallback to learn() itself, with every=, when= or boundary()"
            )
        kept = getattr(self.model, _KEPT, {})
        for each in kept.values():
            if isinstance(each, _Kept) and each.callback.clock is not None:
                each.callback._on_training_end()  # of a learn() that ended with an error
        own = kept.get(self.name)
        if own is None and self._policy() not in (None, self.model.policy):
            self._start_again()
        if own is not None and self.when.considered is None:
            try:
                self.load_state_dict(own.state() if isinstance(own, _Kept) else own)
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"what the agent holds under the name {self.name!r} is not the state of {self.method!r} "
                    f"({type(error).__name__}: {error}): give an equal callback, or another name="
                ) from error

    def _on_training_start(self) -> None:
        kept = getattr(self.model, _KEPT, {})
        other = kept.get(self.name)
        if isinstance(other, _Kept) and other.callback is not self and other.callback.clock is not None:
            raise ValueError(f"two callbacks are called {self.name!r}: give each a name of its own with name=")
        total, begun = self.model._total_timesteps, self.model._num_timesteps_at_start
        self._shares = {round(begun + share * (total - begun)): share for share in self._fractions}
        self.when.at = tuple(sorted({*self._asked, *self._shares}))
        refuse_what_breaks(self.model, self.method)
        module, opened = trained(self.model)
        self._provide()
        self.what.also = tuple(targets(self.model).values())
        if "step" in self.what.parts and not self.what.mirrors:
            self.what.mirrors = Mirrors(targets(self.model))
        self._updated = self.model._n_updates
        considered = self.when.considered
        if considered is not None and considered > self.num_timesteps:
            considered = self.when.considered = None  # another training, whose steps are counted from 0 again
        resumed = considered is not None
        self.bind(
            module,
            opened,
            step=self.num_timesteps if resumed else 0,
            log=self._record,
            alternating=True,
            counting=False,
        )
        self._gathers = self.what.observing is not None
        if hasattr(self.method, "update"):
            self._average(opened)
        if not resumed:
            due = self.when.boundary is not None or 0 in self._asked
            self.when.considered = self.num_timesteps - due
        self._policy = weakref.ref(self.model.policy)
        setattr(self.model, _KEPT, {**kept, self.name: _Kept(self)})

    def _on_rollout_start(self) -> None:
        # An emptied buffer must be filled by a rollout before the next gradient step.
        if self._replay == "empty" or not self._off_policy:
            self._look()

    def _on_rollout_end(self) -> None:
        self._watch_health()  # an on-policy rollout begins with an empty buffer
        if self._stored is not None and not self._off_policy:
            self._stored.read(self.model)
        if self._replay == "keep" and self._off_policy:
            self._look()

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        later, self.when.at = self.when.at, ()  # another learn() may still reach them
        self.finish()
        if self._averaging is not None:
            self._averaging.remove()
        self.when.at = later
        for step, share in self._shares.items():
            if self.when.considered is not None and step > self.when.considered:
                warnings.warn(
                    f"{self.name} at {share:g} of the training (step {step}) was not applied: no rollout began after",
                    stacklevel=2,
                )

    # Inside

    @property
    def monitored(self) -> bool:
        """Whether health is measured while training."""
        return self._period is not None

    @property
    def _off_policy(self) -> bool:
        return isinstance(self.model, _off_policy.OffPolicyAlgorithm)

    def _start_again(self) -> None:
        """As it was made: a start, statistics and draws of one agent are not those of another."""
        marked = self.when.boundary
        self.rewind(self._made)
        self.when.boundary, self._measured, self.health = marked, None, {}

    def _provide(self) -> None:
        """Batches and a loss for a method that needs them and does not gather in training what it wants to know."""
        needed = [each for each in members(self.method) if getattr(each, "batches", "none") != "none"]
        alone = any(not hasattr(each, "observe") for each in needed)
        if (
            self.what.batches is None
            and self.what.loss is None
            and alone
            and not hasattr(self.model, "_last_lstm_states")
        ):
            self._stored = _StoredValues()
            self.what.batches, self.what.loss = self._stored, value_loss

    def _average(self, opened: Sequence[torch.optim.Optimizer]) -> None:
        """Update a running average after the steps: SB3 calls each network separately, never all of them as one."""
        self.what.release()
        self._averaging = opened[-1].register_step_post_hook(lambda *_: self.method.update(self.what.model))

    def _look(self) -> None:
        if self._off_policy and self.num_timesteps >= self.model._total_timesteps:
            return  # the last rollout: nothing would be learned after it
        # TD3 trains its actor only in every second step.
        if self._gathers and self.model._n_updates < self._updated + getattr(self.model, "policy_delay", 1):
            return  # it judges by what it saw in training, and there was none yet (`learning_starts`)
        if self._stored is not None and not self._stored.ready(self.model):
            return
        if self.when.trigger is not None:
            self.note(self.logger.name_to_value)
            self._note_episodes()
        self.begin(self.num_timesteps)

    def _note_episodes(self) -> None:
        """What SB3 logs of the last episodes, when one has ended: it computes that only to write it at once."""
        last = self.model.ep_info_buffer
        if not last or last[-1] is self._episode:
            return
        self._episode = last[-1]
        self.note({f"rollout/ep_{name}_mean": fmean(each[name[0]] for each in last) for name in ("rew", "len")})
        if self.model.ep_success_buffer:
            self.note({"rollout/success_rate": fmean(self.model.ep_success_buffer)})

    def _watch_health(self) -> None:
        if self._period is None:
            return
        if self._measured is not None and 0 <= self.num_timesteps - self._measured < self._period:
            return
        if self._off_policy and self.num_timesteps <= self.model.learning_starts:
            return  # a few observations, and nothing learned yet
        batches = observations(self.model)
        if batches is None:
            return
        self._measured = self.num_timesteps
        for name, network in trained(self.model)[0].named_children():
            self.health[name] = health(network, [batches[name]], mode="cheap")
            numbers = self.health[name].flat(f"{name}/")
            self.note(numbers)
            self._record(self.num_timesteps, {f"rekindle/{key}": value for key, value in numbers.items()})
        worst = max(self.health.values(), key=lambda each: (each.verdict.level, each.whole.get("dormant_worst", 0.0)))
        self.note(worst.flat())

    def trainer_step(self, step: int) -> int:
        """Environment steps, in which everything is counted here."""
        return int(self.num_timesteps)

    def change(self) -> Receipt:
        """Apply the method; targets, temperature and replay follow."""
        if self._stored is not None and self._off_policy:
            self._stored.read(self.model)
        self._updated = self.model._n_updates
        receipt = super().change()
        if receipt.rolled_back:
            return receipt
        follow_targets(self.model, receipt.changed)
        if self._temperature == "reset":
            reset_temperature(self.model)
        if self._replay == "empty":
            empty_replay(self.model)
        return receipt

    def _record(self, step: int, numbers: Mapping[str, Any]) -> None:
        """To SB3's logger; what is of one layer does not go to its table, which has a line for every number."""
        for key, value in numbers.items():
            shown = key.removeprefix("rekindle/")
            hidden = shown.count("/") > 1 or len(shown) > _WIDTH
            self.logger.record(key, value, exclude=("stdout", "log") if hidden else None)


class _Kept:
    """A callback's state among the attributes of its agent, which SB3 saves while it does not save callbacks.

    It is taken when the agent is saved, and is a plain dict in the file.
    """

    def __init__(self, callback: RekindleCallback) -> None:
        self.callback = callback

    def state(self) -> dict[str, Any]:
        return self.callback.state_dict()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.state(),)


class _StoredValues:
    """Batches of `value_regression`, from what the agent has stored when the method acts."""

    def __init__(self) -> None:
        self._batches: list[dict[str, Any]] = []

    def __call__(self) -> list[dict[str, Any]]:
        return self._batches

    def read(self, agent: object) -> None:
        found = value_regression(agent)
        self._batches = [] if found is None else found[0]

    def ready(self, agent: object) -> bool:
        """Whether there are returns: on-policy a rollout, off-policy an episode that has ended."""
        if isinstance(agent, _off_policy.OffPolicyAlgorithm):
            return agent.replay_buffer is not None and agent.replay_buffer.size() > 0 and agent._episode_num > 0
        return bool(self._batches)


def _times(at: Any) -> tuple[list[int], list[float]]:
    """Steps, and fractions of the training.

    >>> _times([0.5, 20_000])
    ([20000], [0.5])
    """
    several = isinstance(at, Iterable) and not isinstance(at, str)
    given = [] if at is None else list(at) if several else [at]
    if any(isinstance(each, bool) or not isinstance(each, Real) for each in given):
        raise ValueError(f"at={at!r}: give environment steps or fractions of the training, one or several")
    fractions = [float(each) for each in given if not isinstance(each, Integral)]
    if any(not 0 < share < 1 for share in fractions):
        raise ValueError(f"at={at!r}: a float is a fraction of the training, between 0 and 1; steps are whole numbers")
    return [int(each) for each in given if isinstance(each, Integral)], fractions
