"""What an agent needs to go on from a task boundary bit for bit: tensors and plain values, nothing pickled.

Environments and random generators are not part of it: each task has a new environment, and all generators are seeded
by the run's seed and the task's number when it begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rekindle.integrations.sb3 import trained

_COUNTERS = ("num_timesteps", "_episode_num", "_n_updates", "_n_calls", "exploration_rate")
_SEEN = ("observations", "actions", "returns")  # of a rollout, which methods look at before the next one begins
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
