"""Remedies in stable-baselines3 agents: `agent.learn(100_000, callback=RekindleCallback("fire", every=20_000))`.

Steps are environment steps, as everywhere in SB3. Off-policy agents (DQN, SAC, TD3) are changed after a rollout, before
the gradient steps on it; on-policy agents (PPO, A2C) before a rollout, else old log-probabilities would meet new
weights. All trained networks are treated as one model with all their optimizers; then target networks follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rekindle.diagnosis.examination import Health, health
from rekindle.extras import require
from rekindle.integrations.application import Application
from rekindle.isolation import Recorded, random_states_kept
from rekindle.monitoring.schedules import Schedule
from rekindle.monitoring.triggers import Trigger
from rekindle.projection.receipt import Method, Receipt

_callbacks: Any = require("stable_baselines3.common.callbacks", "rl", "RekindleCallback for stable-baselines3")
_off_policy: Any = require("stable_baselines3.common.off_policy_algorithm", "rl", "RekindleCallback")

# The attribute of a policy that is trained → its target network's.
_TARGETS = {
    "q_net": "q_net_target",
    "quantile_net": "quantile_net_target",
    "actor": "actor_target",
    "critic": "critic_target",
}
_KEPT = "rekindle_state"  # an attribute of the agent, which SB3 saves with it


class RekindleCallback(Application, _callbacks.BaseCallback):  # type: ignore[misc]
    """A method in an SB3 agent. Further arguments are those of `rekindle.integrations.Application`.

    at: environment steps, or fractions of the training (0.5: at half of it).
    monitor: health is measured every so many environment steps on observations of the replay or rollout buffer, logged
        as `rekindle/<network>/…`, and its numbers are metrics for the trigger, as are all that SB3 logs.
    temperature: "reset" also gives SAC's entropy coefficient its first value and a fresh optimizer.
    replay: "empty" also empties the replay buffer.

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
        given = [at] if isinstance(at, int | float) else list(at or ())
        self._fractions = [step for step in given if isinstance(step, float)]
        if any(not 0 < share < 1 for share in self._fractions):
            raise ValueError(f"at={at!r}: a float is a fraction of the training, between 0 and 1")
        for value, known in ((temperature, ("keep", "reset")), (replay, ("keep", "empty"))):
            if value not in known:
                raise ValueError(f"{value!r} is neither {known[0]!r} nor {known[1]!r}")
        steps = [step for step in given if isinstance(step, int)]
        timed = self._fractions and not steps and every is None and when is None
        _callbacks.BaseCallback.__init__(self, verbose)
        wanted = [*steps, _NEVER] if timed else steps
        Application.__init__(self, method, at=wanted, every=every, when=when, **options)
        self._asked = [step for step in self._at if step != _NEVER]
        self._temperature, self._replay, self._period = temperature, replay, monitor
        self._measured: int | None = None
        self.health: dict[str, Health] = {}

    # SB3's hooks

    def _init_callback(self) -> None:
        kept = getattr(self.model, _KEPT, {})
        if self.name in kept and self._rounds is None and self._considered is None:
            self.load_state_dict(kept[self.name])

    def _on_training_start(self) -> None:
        total = self.model._total_timesteps
        begun = self.model._num_timesteps_at_start
        shares = [round(begun + share * (total - begun)) for share in self._fractions]
        self._at = tuple(sorted({*self._asked, *shares}))
        self._refuse_what_breaks()
        module, opened = trained(self.model)
        self._fresh_by_the_policy()
        resumed = self._considered is not None
        self.bind(module, opened, step=self.num_timesteps if resumed else 0, log=self._record)
        if not resumed:
            self._considered = self.num_timesteps

    def _on_rollout_start(self) -> None:
        # An emptied buffer must be filled by a rollout before the next gradient step.
        if self._replay == "empty" or not isinstance(self.model, _off_policy.OffPolicyAlgorithm):
            self._look()

    def _on_rollout_end(self) -> None:
        self._watch_health()  # an on-policy rollout begins with an empty buffer
        if self._replay == "keep" and isinstance(self.model, _off_policy.OffPolicyAlgorithm):
            self._look()

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self._keep()
        later, self._at = self._at, ()  # another learn() may still reach them
        self.finish()
        self._at = later

    # Inside

    def _look(self) -> None:
        self.note(self.logger.name_to_value)
        self.begin(self.num_timesteps)
        self._keep()

    def _watch_health(self) -> None:
        waited = math.inf if self._measured is None else self.num_timesteps - self._measured
        if self._period is None or waited < self._period:
            return
        batches = observations(self.model)
        if batches is None:
            return
        self._measured = self.num_timesteps
        for name, network in trained(self.model)[0].named_children():
            self.health[name] = health(network, [batches[name]], mode="cheap")
            numbers = self.health[name].flat()
            self.note(numbers)
            self._record(self.num_timesteps, {f"rekindle/{name}/{key}": value for key, value in numbers.items()})

    def _change(self, copies: Sequence[nn.Module]) -> Receipt:
        receipt = super()._change(copies)
        if receipt.rolled_back:
            return receipt
        follow_targets(self.model)
        if self._temperature == "reset":
            reset_temperature(self.model)
        if self._replay == "empty" and getattr(self.model, "replay_buffer", None) is not None:
            self.model.replay_buffer.reset()
        return receipt

    def _record(self, step: int, numbers: Mapping[str, Any]) -> None:
        for key, value in numbers.items():
            if isinstance(value, int | float):
                self.logger.record(key, value)
            elif isinstance(value, str):
                self.logger.record(key, value, exclude="tensorboard")

    def _keep(self) -> None:
        """SB3 saves the agent's attributes and not its callbacks."""
        if not hasattr(self.model, _KEPT):
            setattr(self.model, _KEPT, {})
        getattr(self.model, _KEPT)[self.name] = self.state_dict()

    def _refuse_what_breaks(self) -> None:
        if type(self.method).__name__ == "PlasticityInjection" and any(
            hasattr(self.model.policy, target) for target in _TARGETS.values()
        ):
            raise ValueError(
                "plasticity injection replaces modules, which SB3's averaging of target networks cannot follow: "
                "use another method, or an agent without target networks (PPO, A2C)"
            )

    def _fresh_by_the_policy(self) -> None:
        """A fresh draw is one by SB3's own scheme (orthogonal, gains per layer), not torch's default."""
        if hasattr(self.method, "_fresh") and self.method._fresh is None:
            self.method._fresh = fresh_networks(self.model)


_NEVER = 2**62


class Networks(nn.Module):
    """The trained networks of an agent as one module; a forward pass runs each on the same observations."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, observations: Any, actions: Tensor | None = None) -> dict[str, Any]:
        """What each network says; a critic only where there are actions."""
        parts = dict(self.named_children())
        critic = parts.pop("critic", None)
        found = {name: part(observations) for name, part in parts.items()}
        if critic is not None and actions is not None:
            found["critic"] = critic(observations, actions)
        return found


def trained(agent: Any) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """All networks of an agent that are trained, as one module, and their optimizers."""
    return _networks(agent.policy)


def _networks(policy: nn.Module) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    parts = {name: getattr(policy, name) for name in _TARGETS if isinstance(getattr(policy, name, None), nn.Module)}
    if not parts:  # on-policy: one policy, one optimizer
        return Networks({"policy": policy}), [policy.optimizer]  # type: ignore[list-item]
    own = [part.optimizer for part in parts.values() if hasattr(part, "optimizer")]
    return Networks(parts), own or [policy.optimizer]


def fresh_networks(agent: Any) -> Callable[[], nn.Module]:
    """A factory of networks as SB3 would build them for this agent."""

    def build() -> nn.Module:
        policy = agent.policy_class(
            agent.observation_space, agent.action_space, agent.lr_schedule, **agent.policy_kwargs
        )
        return _networks(policy.to(agent.device))[0]

    return build


def follow_targets(agent: Any) -> None:
    """Target networks take over everything of their networks: matrices alone would leave biases and heads behind."""
    for name, target in _TARGETS.items():
        network, other = getattr(agent.policy, name, None), getattr(agent.policy, target, None)
        if isinstance(network, nn.Module) and isinstance(other, nn.Module):
            other.load_state_dict(network.state_dict())


def reset_temperature(agent: Any) -> None:
    """SAC's entropy coefficient at its first value, with a fresh optimizer; other agents have none."""
    coefficient, optimizer = getattr(agent, "log_ent_coef", None), getattr(agent, "ent_coef_optimizer", None)
    if not isinstance(coefficient, Tensor) or optimizer is None:
        return
    _, _, first = str(agent.ent_coef).partition("_")
    with torch.no_grad():
        coefficient.fill_(math.log(float(first or 1.0)))
    optimizer.state.clear()


def observations(agent: Any, count: int = 256) -> dict[str, Recorded] | None:
    """For each network a batch of what it gets: observations (and a critic's actions) of the agent's buffer."""
    actions = None
    if isinstance(agent, _off_policy.OffPolicyAlgorithm):
        buffer = agent.replay_buffer
        if buffer is None or buffer.size() == 0:
            return None
        with random_states_kept():  # what an agent draws later must not depend on whether somebody looked
            sample = buffer.sample(min(count, buffer.size()), env=agent._vec_normalize_env)
        seen, actions = sample.observations, sample.actions
    else:
        buffer = agent.rollout_buffer
        if not buffer.full:
            return None
        seen = _rows(buffer, buffer.observations, count)
    alone = Recorded((seen,), {})
    return {name: Recorded((seen, actions), {}) if name == "critic" else alone for name in (*_TARGETS, "policy")}


def _rows(buffer: Any, stored: Any, count: int) -> Any:
    """Observations of a rollout, evenly spread, as tensors."""
    if isinstance(stored, Mapping):
        return {key: _rows(buffer, value, count) for key, value in stored.items()}
    rows = stored.reshape(-1, *stored.shape[2:]) if not buffer.generator_ready else stored
    return buffer.to_torch(rows[:: max(len(rows) // count, 1)][:count])
