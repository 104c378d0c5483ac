"""An SB3 agent as other code sees it: its trained networks as one model, what follows them, and what it has stored.

Target networks, heads, temperature, replay and optimizers are treated by these functions alone, so that the callback
and the laboratory do the same. `value_regression` is what an agent has stored, as a task for `rekindle.probe`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.extras import require
from rekindle.isolation import Recorded, random_states_kept
from rekindle.methods.compose import Compose
from rekindle.methods.plasticity_injection import PlasticityInjection
from rekindle.methods.remedy import moments
from rekindle.projection.receipt import Receipt
from rekindle.projection.snapshots import snapshot_of
from rekindle.projection.transaction import Transaction

_off_policy = require("stable_baselines3.common.off_policy_algorithm", "rl", "RekindleCallback")

# The attribute of a policy that is trained → its target network's.
_TARGETS = {
    "q_net": "q_net_target",
    "quantile_net": "quantile_net_target",
    "actor": "actor_target",
    "critic": "critic_target",
}
_LOOKED_AT = 8  # batches that tell how large values are
_BEGINNING = 0.1  # the standard deviation of values at the beginning; that of the returns is 1
_CONSTANT = 1e-6  # relative: values that differ less than rounding are those of a critic that is dead
_EPISODES = ("ep_start", "ep_length", "_current_ep_start")  # hindsight replay finds its rows by episode


class Networks(nn.Module):
    """The trained networks of an agent as one module; a forward pass runs each on the same observations.

    fresh: a factory of new ones, by which fresh draws of a method go (`rekindle.initial.draw`).
    """

    def __init__(self, parts: Mapping[str, nn.Module], fresh: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.fresh = fresh
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, observations: object, actions: Tensor | None = None, **others: object) -> dict[str, Any]:
        """The output of each network; a critic only where there are actions. A batch may hold more than both."""
        parts = dict(self.named_children())
        critic = parts.pop("critic", None)
        found = {name: part(observations) for name, part in parts.items()}
        if critic is not None and actions is not None:
            found["critic"] = critic(observations, actions)
        return found


def trained(agent: Any) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """All networks of an agent that are trained, as one module, and their optimizers."""
    return _networks(agent.policy, fresh_networks(agent))


def _networks(
    policy: nn.Module, fresh: Callable[[], nn.Module] | None = None
) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    parts = {name: getattr(policy, name) for name in _TARGETS if isinstance(getattr(policy, name, None), nn.Module)}
    if not parts:  # on-policy: one policy, one optimizer
        optimizer = getattr(policy, "optimizer", None)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{type(policy).__name__} has no optimizer and no network of a known name ({', '.join(_TARGETS)}): "
                "rekindle changes agents that learn by gradients, such as DQN, SAC, TD3, PPO and A2C"
            )
        return Networks({"policy": policy}, fresh), [optimizer]
    own = [part.optimizer for part in parts.values() if hasattr(part, "optimizer")]
    return Networks(parts, fresh), own or [policy.optimizer]


def fresh_networks(agent: Any) -> Callable[[], nn.Module]:
    """A factory of networks as SB3 would build them for this agent."""

    def build() -> nn.Module:
        options = dict(agent.policy_kwargs)
        if getattr(agent, "use_sde", False):
            options["use_sde"] = True  # on-policy agents pass it beside the options
        policy = agent.policy_class(agent.observation_space, agent.action_space, agent.lr_schedule, **options)
        return _networks(policy.to(agent.device))[0]

    return build


def refuse_what_breaks(agent: object, method: object) -> None:
    """Raise for a method that does not work with this agent."""
    for each in members(method):
        if not isinstance(each, PlasticityInjection):
            continue
        path = each.path(trained(agent)[0])
        if path.rpartition(".")[0] in ("", "critic"):
            raise ValueError(
                f"head={path!r}: SB3 holds its networks and critics outside the modules too, where an injected one "
                "would not be seen; name a layer inside, such as 'q_net.q_net' or 'critic.qf0.4'"
            )


def apply_to_agent(
    agent: object, method: object, *, generator: torch.Generator | None = None, seed: int = 0
) -> Receipt:
    """Apply a method to all trained networks at once, between two calls of `learn`; targets of what changed follow.

    Fresh draws follow the policy's own scheme. A method that needs batches gets what the agent has stored. Of one that
    also acts while learning only the part for an event is applied. None does nothing, as an advice may say.
    """
    if method is None:
        return Receipt("nothing")
    act = moments(method).get("event")
    if act is None:
        raise ValueError(f"{method!r} acts while an agent learns: give agent.learn a RekindleCallback of it")
    refuse_what_breaks(agent, act)
    module, optimizers = trained(agent)
    batches: list[Any] | None = None
    loss = None
    if getattr(act, "batches", "none") != "none":
        if (seen := observations(agent)) is not None:
            batches = [seen["critic"]]
        recurrent = hasattr(agent, "_last_lstm_states")
        if not recurrent and (found := value_regression(agent, seed=seed)) is not None:
            batches, loss = found
    with Transaction(getattr(act, "name", "method"), (module, *targets(agent).values()), optimizers):
        receipt: Receipt = act(module, optimizers, batches=batches, loss=loss, generator=generator)
        follow_targets(agent, receipt.changed)
        return receipt


def members(method: object) -> list[Any]:
    """A method, or those that a `Compose` joins."""
    return [each for part in method.methods for each in members(part)] if isinstance(method, Compose) else [method]


def targets(agent: Any) -> dict[str, nn.Module]:
    """The target network of each trained network that has one, by the name of the trained one."""
    named = {name: getattr(agent.policy, target, None) for name, target in _TARGETS.items()}
    return {name: target for name, target in named.items() if isinstance(target, nn.Module)}


def follow_targets(agent: Any, changed: Collection[str] | None = None) -> None:
    """Target networks copy everything from their networks: matrices alone would leave out biases and heads.

    changed: names of parameters; the targets of networks that have none of them keep their lag. All by default.
    """
    for name, target in _TARGETS.items():
        network, other = getattr(agent.policy, name, None), getattr(agent.policy, target, None)
        if changed is not None and not any(each.startswith(f"{name}.") for each in changed):
            continue
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
    with Transaction("temperature", (), optimizer, restore=snapshot_of([coefficient], optimizer)), torch.no_grad():
        coefficient.fill_(math.log(float(first or 1.0)))
        optimizer.state.clear()


def empty_replay(agent: object) -> None:
    """Empty the replay buffer; no effect for agents without one."""
    buffer = getattr(agent, "replay_buffer", None)
    if buffer is None:
        return
    rows = [getattr(buffer, name) for name in _EPISODES if hasattr(buffer, name)]
    before = {"pos": buffer.pos, "full": buffer.full}, [row.copy() for row in rows]

    def restore() -> None:
        vars(buffer).update(before[0])
        for row, content in zip(rows, before[1], strict=True):
            row[...] = content

    with Transaction("replay", (), restore=restore):
        buffer.reset()
        for row in rows:
            row.fill(0)


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
        return _map(lambda each: _rows(buffer, each, count), stored)
    rows = stored.reshape(-1, *stored.shape[2:]) if not buffer.generator_ready else stored
    return buffer.to_torch(rows[:: max(len(rows) // count, 1)][:count])


def value_regression(
    agent: object, *, count: int = 4096, batch: int = 256, seed: int = 0
) -> tuple[list[dict[str, Any]], ValueLoss] | None:
    """A task for `rekindle.probe` out of what the agent has stored: from observations to discounted returns.

    Off-policy the returns are those of the stored trajectories that have ended; on-policy those that the rollout
    buffer holds. They are standardized, so that a loss of 1 is that of a constant, and so are the values that a probe
    or a trial begins with (`ValueLoss.refit`). None where nothing is stored yet.

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
            "observations": _rows_of(observed, order[start : start + batch]),
            "actions": actions[order[start : start + batch]],
            "returns": values[start : start + batch],
        }
        for start in range(0, len(order), batch)
    ]
    return batches, value_loss


class ValueLoss:
    """The mean squared error of the values that an agent's networks give a batch of `value_regression`."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The error, the mean over critics and rows."""
        error: Tensor = (_values(model, batch) - batch["returns"]).square().mean()
        return error

    @torch.no_grad()
    def refit(self, model: nn.Module, batches: Sequence[Any]) -> None:
        """Let every critic begin at the same scale: its last layer is changed so that its values have mean 0.

        A critic's values are as large as the returns that it was trained on, and those here are standardized: without
        this a probe would measure how far its output is off, not how well it learns. Their standard deviation becomes
        a tenth of that of the returns, where they differ at all.
        """
        values = torch.cat([_values(model, batch) for batch in batches[:_LOOKED_AT]], 1)
        for last, own in zip(_last_layers(model), values, strict=True):
            deviation = own.std(correction=0)
            factor = _BEGINNING / deviation if deviation > _CONSTANT * own.abs().max() else torch.ones_like(deviation)
            last.weight.mul_(factor)
            if last.bias is not None:
                last.bias.sub_(own.mean()).mul_(factor)


value_loss = ValueLoss()


def _values(model: nn.Module, batch: Any) -> Tensor:
    """(critics, rows): the value of each row."""
    parts: dict[str, Any] = dict(model.named_children())
    observed, actions = batch["observations"], batch["actions"]
    if "critic" in parts:
        found = parts["critic"](observed, actions)
        # TQC: quantiles (batch, critics, quantiles); the others: one column of values per critic.
        return found.mean(-1).T if isinstance(found, Tensor) else torch.stack([each.flatten() for each in found])
    if "q_net" in parts or "quantile_net" in parts:
        scores = parts["q_net"](observed) if "q_net" in parts else parts["quantile_net"](observed).mean(1)
        return scores.gather(1, actions.long().reshape(-1, 1)).T  # type: ignore[no-any-return]
    return parts["policy"].predict_values(observed).reshape(1, -1)  # type: ignore[no-any-return]


def _last_layers(model: nn.Module) -> list[nn.Linear]:
    """The layer that gives the values of each critic."""
    parts: dict[str, Any] = dict(model.named_children())
    if "critic" in parts:
        networks = parts["critic"].q_networks
    elif "policy" in parts:
        networks = [parts["policy"].value_net]
    else:
        networks = [parts["q_net"] if "q_net" in parts else parts["quantile_net"]]
    return [[each for each in network.modules() if isinstance(each, nn.Linear)][-1] for network in networks]


def _stored_returns(agent: Any) -> tuple[Any, Tensor, Tensor] | None:
    if not isinstance(agent, _off_policy.OffPolicyAlgorithm):
        buffer = agent.rollout_buffer
        if not buffer.full:
            return None
        flat = [_rows(buffer, each, each.shape[0] * each.shape[1]) for each in (buffer.actions, buffer.returns)]
        size = buffer.buffer_size * buffer.n_envs
        return _rows(buffer, buffer.observations, size), flat[0], flat[1].flatten()
    buffer = agent.replay_buffer
    if buffer is None or buffer.size() == 0:
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
    # Rows of the buffer, and the environments they are of.
    rows, places = order[known.nonzero()[:, 0]].numpy(), known.nonzero()[:, 1].numpy()
    seen = _map(lambda each: each[rows, places], buffer.observations)
    seen = buffer._normalize_obs(seen, agent._vec_normalize_env)  # as the networks are trained on them
    seen = _map(lambda each: torch.from_numpy(each).to(agent.device), seen)
    acted = torch.from_numpy(buffer.actions[rows, places]).to(agent.device)
    return seen, acted, returns[known].float().to(agent.device)


def _rows_of(stored: object, rows: Tensor) -> object:
    return _map(lambda each: each[rows], stored)


def _map(function: Callable[[Any], Any], stored: object) -> object:
    """The function of an observation's array, or of each part where observations are dicts."""
    return {key: function(each) for key, each in stored.items()} if isinstance(stored, Mapping) else function(stored)
