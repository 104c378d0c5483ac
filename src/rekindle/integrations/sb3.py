"""Remedies in stable-baselines3 agents: `agent.learn(100_000, callback=RekindleCallback("fire", every=20_000))`.

Steps are environment steps, as everywhere in SB3. Off-policy agents (DQN, SAC, TD3) are changed after a rollout, before
the gradient steps on it; on-policy agents (PPO, A2C) before a rollout, else old log-probabilities would meet new
weights. All trained networks are one model with all their optimizers; target networks are updated afterwards.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rekindle.diagnosis.examination import Health, health
from rekindle.extras import require
from rekindle.integrations.application import Application
from rekindle.isolation import Recorded, random_states_kept
from rekindle.methods.compose import Compose
from rekindle.methods.plasticity_injection import PlasticityInjection
from rekindle.methods.remedy import FromStart
from rekindle.monitoring.schedules import Schedule
from rekindle.monitoring.triggers import Trigger
from rekindle.projection.method import Method
from rekindle.projection.receipt import Receipt

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

    at: environment steps, or fractions of what one `learn` trains (0.5: at half of it).
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
        self._updated = 0  # gradient steps when it last acted, or when training began
        self._averaging: RemovableHandle | None = None
        self.health: dict[str, Health] = {}

    # SB3's hooks

    def _init_callback(self) -> None:
        kept = getattr(self.model, _KEPT, {}).get(self.name)
        if kept is not None and self._rounds is None and self._considered is None:
            self.load_state_dict(kept.state() if isinstance(kept, _Kept) else kept)

    def _on_training_start(self) -> None:
        total = self.model._total_timesteps
        begun = self.model._num_timesteps_at_start
        shares = [round(begun + share * (total - begun)) for share in self._fractions]
        self._at = tuple(sorted({*self._asked, *shares}))
        refuse_what_breaks(self.model, self.method)
        module, opened = trained(self.model)
        draw_as_the_policy(self.model, self.method)
        self._updated = self.model._n_updates
        if self._considered is not None and self._considered > self.num_timesteps:
            self._considered = None  # another training, whose steps are counted from 0 again
        resumed = self._considered is not None
        self.bind(
            module,
            opened,
            step=self.num_timesteps if resumed else 0,
            log=self._record,
            alternating=True,
            counting=False,
        )
        if hasattr(self.method, "update"):
            self._average(opened)
        if not resumed:
            due = self._boundary is not None or 0 in self._asked
            self._considered = self.num_timesteps - due
        if not hasattr(self.model, _KEPT):
            setattr(self.model, _KEPT, {})
        getattr(self.model, _KEPT)[self.name] = _Kept(self)

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
        later, self._at = self._at, ()  # another learn() may still reach them
        self.finish()
        if self._averaging is not None:
            self._averaging.remove()
        self._at = later

    # Inside

    def _average(self, opened: Sequence[torch.optim.Optimizer]) -> None:
        """Update a running average after the steps: SB3 calls each network separately, never all of them as one."""
        assert self._rounds is not None and self._observing is not None
        self._observing.remove()
        self._averaging = opened[-1].register_step_post_hook(lambda *_: self.method.update(self._model))

    def _look(self) -> None:
        if self._observing is not None and self.model._n_updates == self._updated:
            return  # it judges by what it saw in training, and there was none yet (`learning_starts`)
        if self._trigger is None and self._reason(self.num_timesteps, None) is None:
            self._considered = self.num_timesteps  # some agents call this at every step: nothing more to do
            return
        self.note(self.logger.name_to_value)
        if self.begin(self.num_timesteps) is not None:
            self._updated = self.model._n_updates

    def _watch_health(self) -> None:
        if self._period is None:
            return
        if self._measured is not None and 0 <= self.num_timesteps - self._measured < self._period:
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

    def _change(self) -> Receipt:
        receipt = super()._change()
        if receipt.rolled_back:
            return receipt
        follow_targets(self.model)
        if self._temperature == "reset":
            reset_temperature(self.model)
        if self._replay == "empty":
            empty_replay(self.model)
        return receipt

    def _record(self, step: int, numbers: Mapping[str, Any]) -> None:
        for key, value in numbers.items():
            if isinstance(value, int | float):
                self.logger.record(key, value)
            elif isinstance(value, str):
                self.logger.record(key, value, exclude="tensorboard")


_NEVER = 2**62


class _Kept:
    """A callback's state among the attributes of its agent, which SB3 saves while it does not save callbacks.

    It is taken when the agent is saved, and is a plain dict in the file.
    """

    def __init__(self, callback: RekindleCallback) -> None:
        self._callback = callback

    def state(self) -> dict[str, Any]:
        return self._callback.state_dict()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.state(),)


class Networks(nn.Module):
    """The trained networks of an agent as one module; a forward pass runs each on the same observations."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, observations: Any, actions: Tensor | None = None, **others: Any) -> dict[str, Any]:
        """The output of each network; a critic only where there are actions. A batch may hold more than both."""
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
        options = dict(agent.policy_kwargs)
        if getattr(agent, "use_sde", False):
            options["use_sde"] = True  # on-policy agents pass it beside the options
        policy = agent.policy_class(agent.observation_space, agent.action_space, agent.lr_schedule, **options)
        return _networks(policy.to(agent.device))[0]

    return build


def draw_as_the_policy(agent: Any, method: Any) -> None:
    """Fresh draws of the method follow SB3's own scheme (orthogonal, gains per layer), not torch's default."""
    for each in _members(method):
        if isinstance(each, FromStart) and each._fresh is None:
            each._fresh = fresh_networks(agent)


def refuse_what_breaks(agent: Any, method: Any) -> None:
    """Raise for a method that does not work with this agent."""
    for each in _members(method):
        if not isinstance(each, PlasticityInjection):
            continue
        path = each.path(trained(agent)[0])
        if path.rpartition(".")[0] in ("", "critic"):
            raise ValueError(
                f"head={path!r}: SB3 holds its networks and critics outside the modules too, where an injected one "
                "would not be seen; name a layer inside, such as 'q_net.q_net' or 'critic.qf0.4'"
            )


def _members(method: Any) -> list[Any]:
    """A method, or those that a `Compose` joins."""
    return [each for part in method.methods for each in _members(part)] if isinstance(method, Compose) else [method]


def follow_targets(agent: Any) -> None:
    """Target networks copy everything from their networks: matrices alone would leave out biases and heads."""
    for name, target in _TARGETS.items():
        network, other = getattr(agent.policy, name, None), getattr(agent.policy, target, None)
        if isinstance(network, nn.Module) and isinstance(other, nn.Module):
            _follow_modules(network, other)
            other.load_state_dict(network.state_dict())


def _follow_modules(network: nn.Module, target: nn.Module) -> None:
    """Modules that a method has replaced (an injected head) are copied, since SB3 averages parameter by parameter."""
    for name, module in network.named_children():
        other = target._modules.get(name)
        if isinstance(other, nn.Module) and type(other) is type(module):
            _follow_modules(module, other)
        else:
            target._modules[name] = copy.deepcopy(module).train(target.training)


def reset_temperature(agent: Any) -> None:
    """SAC's entropy coefficient at its first value, with a fresh optimizer; other agents have none."""
    coefficient, optimizer = getattr(agent, "log_ent_coef", None), getattr(agent, "ent_coef_optimizer", None)
    if not isinstance(coefficient, Tensor) or optimizer is None:
        return
    _, _, first = str(agent.ent_coef).partition("_")
    with torch.no_grad():
        coefficient.fill_(math.log(float(first or 1.0)))
    optimizer.state.clear()


def empty_replay(agent: Any) -> None:
    """Empty the replay buffer; no effect for agents without one."""
    buffer = getattr(agent, "replay_buffer", None)
    if buffer is None:
        return
    buffer.reset()
    for name in ("ep_start", "ep_length", "_current_ep_start"):  # hindsight replay finds its rows by episode
        if hasattr(buffer, name):
            getattr(buffer, name).fill(0)


def observations(agent: Any, count: int = 256) -> dict[str, Recorded] | None:
    """For each network a batch of what it gets: observations (and a critic's actions) of the agent's buffer."""
    actions = None
    if isinstance(agent, _off_policy.OffPolicyAlgorithm):
        buffer = agent.replay_buffer
        if buffer is None or buffer.size() == 0:
            return None
        with random_states_kept():  # later random draws of an agent must not depend on monitoring
            sample = buffer.sample(min(count, buffer.size()), env=agent._vec_normalize_env)
        seen, actions = sample.observations, sample.actions
    else:
        buffer = agent.rollout_buffer
        if not buffer.full:
            return None
        seen = _rows(buffer, buffer.observations, count)
    alone = Recorded((seen, *_memory(agent, seen)), {})
    return {name: Recorded((seen, actions), {}) if name == "critic" else alone for name in (*_TARGETS, "policy")}


def _memory(agent: Any, seen: Any) -> tuple[Any, ...]:
    """What a recurrent policy takes beside observations: here each is the first of an episode."""
    states = getattr(agent, "_last_lstm_states", None)
    if states is None:
        return ()
    rows = len(next(iter(seen.values())) if isinstance(seen, Mapping) else seen)
    empty = [tuple(part.new_zeros(part.shape[0], rows, part.shape[2]) for part in pair) for pair in states]
    return type(states)(*empty), torch.ones(rows, device=agent.device)


def _rows(buffer: Any, stored: Any, count: int) -> Any:
    """Observations of a rollout, evenly spread, as tensors."""
    if isinstance(stored, Mapping):
        return {key: _rows(buffer, value, count) for key, value in stored.items()}
    rows = stored.reshape(-1, *stored.shape[2:]) if not buffer.generator_ready else stored
    return buffer.to_torch(rows[:: max(len(rows) // count, 1)][:count])


def value_regression(
    agent: Any, *, count: int = 4096, batch: int = 256, seed: int = 0
) -> tuple[list[dict[str, Any]], Callable[[nn.Module, Any], Tensor]] | None:
    """A task for `rekindle.probe` out of what the agent has stored: from observations to discounted returns.

    Off-policy the returns are those of the stored trajectories that have ended; on-policy those that the rollout
    buffer holds. They are standardised, so that a loss of 1 is that of a constant. None where nothing is stored yet.

        batches, loss = value_regression(agent)
        probe(trained(agent)[0], batches, loss=loss, fresh=fresh_networks(agent))
    """
    found = _stored_returns(agent)
    if found is None:
        return None
    observed, actions, returns = found
    order = torch.randperm(len(returns), generator=torch.Generator().manual_seed(seed))[:count]
    values = returns[order]
    values = (values - values.mean()) / values.std(correction=0).clamp_min(1e-8)
    batches = [
        {
            "observations": _picked(observed, order[start : start + batch]),
            "actions": actions[order[start : start + batch]],
            "returns": values[start : start + batch],
        }
        for start in range(0, len(order), batch)
    ]
    return batches, value_loss


def value_loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean squared error of the values that an agent's networks give a batch of `value_regression`."""
    parts: dict[str, Any] = dict(model.named_children())
    observed, actions, returns = batch["observations"], batch["actions"], batch["returns"]
    if "critic" in parts:
        values = torch.stack([each.flatten() for each in parts["critic"](observed, actions)])
    elif "q_net" in parts:
        values = parts["q_net"](observed).gather(1, actions.long().reshape(-1, 1)).flatten()
    elif "quantile_net" in parts:
        chosen = actions.long().reshape(-1, 1)
        values = parts["quantile_net"](observed).mean(1).gather(1, chosen).flatten()
    else:
        values = parts["policy"].predict_values(observed).flatten()
    error: Tensor = (values - returns).square().mean()
    return error


def _stored_returns(agent: Any) -> tuple[Any, Tensor, Tensor] | None:
    if not isinstance(agent, _off_policy.OffPolicyAlgorithm):
        buffer = agent.rollout_buffer
        if not buffer.full:
            return None
        flat = [_rows(buffer, each, each.shape[0] * each.shape[1]) for each in (buffer.actions, buffer.returns)]
        size = buffer.buffer_size * buffer.n_envs
        return _rows(buffer, buffer.observations, size), flat[0], flat[1].flatten()
    buffer = agent.replay_buffer
    if buffer is None or buffer.size() == 0 or isinstance(buffer.observations, Mapping):
        return None
    # In the order of time: a full buffer begins where the next row will be written.
    order = (torch.arange(buffer.size()) + (buffer.pos if buffer.full else 0)) % buffer.buffer_size
    rewards, ended = (torch.from_numpy(each)[order].double() for each in (buffer.rewards, buffer.dones))
    returns, known = torch.zeros_like(rewards), torch.zeros(rewards.shape, dtype=torch.bool)
    following = torch.zeros_like(rewards[0])
    complete = torch.zeros_like(known[0])
    for row in range(len(rewards) - 1, -1, -1):
        complete = complete | (ended[row] > 0)
        following = rewards[row] + agent.gamma * following * (1 - ended[row])
        returns[row], known[row] = following, complete
    if not known.any():
        return None
    seen, acted = (torch.from_numpy(each)[order][known] for each in (buffer.observations, buffer.actions))
    device = agent.device
    return seen.to(device), acted.to(device), returns[known].float().to(device)


def _picked(stored: Any, rows: Tensor) -> Any:
    return {key: _picked(each, rows) for key, each in stored.items()} if isinstance(stored, Mapping) else stored[rows]
