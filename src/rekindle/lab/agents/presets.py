"""The named settings of agents: sizes that finish on a laptop, and the paper's own.

The first three are those at which agents were seen to lose their plasticity within minutes; MinAtar games in turn are
a negative control at this size. Durations of the first three are CPU time of `nothing` on one core of a busy AMD EPYC
(family 25, model 17), from two tasks; those of the others are from the speeds of SB3 on one core of a quiet machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = dict[str, Any]

_SAC = {"width": [64, 64], "buffer_size": 20_000, "learning_starts": 200}
_PPO = {"width": [64, 64], "n_steps": 1024, "n_epochs": 10}
_DQN = {
    "width": [64, 64],
    "buffer_size": 10_000,
    "learning_starts": 200,
    "train_freq": 1,
    "target_update_interval": 250,
    "exploration_fraction": 0.2,
    "exploration_final_eps": 0.05,
}
_MINATAR = {
    "width": [128],
    "extractor": "minatar",
    "buffer_size": 50_000,
    "learning_starts": 1_000,
    "train_freq": 4,
    "target_update_interval": 1_000,
    "exploration_fraction": 0.1,
    "exploration_final_eps": 0.05,
}


def _setting(
    name: str,
    stream: str,
    agent: str,
    stream_options: Mapping[str, Any],
    network_options: Mapping[str, Any],
    **others: Any,
) -> Fields:
    return {
        "name": name,
        "stream": stream,
        "network": agent,
        "stream_options": dict(stream_options),
        "network_options": dict(network_options),
        # The optimizer is kept, so that resetting it alone is a remedy like others.
        **{"batch": 64, "lr": 1e-3, "new_optimizer": False, "headline": "return", "last": 3, **others},
    }


def _shuffled() -> list[Fields]:
    sizes = (
        ("sac-pendulum", "sac", "Pendulum-v1", 6, 5_000, 2_800, _SAC, "3 min per run", "1 min"),
        ("ppo-cartpole", "ppo", "CartPole-v1", 20, 16_384, 16_384, _PPO, "7 min per run", "1 min"),
        ("dqn-cartpole", "dqn", "CartPole-v1", 12, 8_000, 8_000, _DQN, "4 min per run", "1 min"),
    )
    found = []
    for name, agent, env, tasks, steps, short, options, long, quick in sizes:
        about = "observations in a new order and with new signs"
        whole = {"env": env, "tasks": tasks, "steps": steps}
        small = {"env": env, "tasks": 4, "steps": short}
        found += [
            _setting(name, "observations", agent, whole, options, about=f"{env}: {about}, {tasks} times; about {long}"),
            _setting(
                f"{name}-quick",
                "observations",
                agent,
                small,
                options,
                last=2,
                about=f"the same, 4 times; about {quick} per run",
            ),
        ]
    return found


def laptop() -> list[Fields]:
    """The settings that finish here.

    >>> [each["name"] for each in laptop()][:2]
    ['sac-pendulum', 'sac-pendulum-quick']
    """
    return [
        *_shuffled(),
        *(
            _setting(
                f"ppo-offsets-{env.partition('-')[0].lower()}",
                "offsets",
                "ppo",
                {"env": env, "tasks": 10, "steps": 16_384},
                _PPO,
                about=f"{env}: a constant added to all observations, new in each of 10 tasks; about 3 min per run",
            )
            for env in ("CartPole-v1", "Acrobot-v1", "LunarLander-v3")
        ),
        _setting(
            "dqn-games",
            "games",
            "dqn",
            {"games": ["Breakout", "SpaceInvaders", "Freeway"], "rounds": 2, "steps": 20_000},
            _MINATAR,
            batch=32,
            lr=2.5e-4,
            about="three MinAtar games in turn, twice; a control: no return was lost here; about 3 min per run",
        ),
        *(
            _setting(
                f"dqn-midpoint-{game.lower()}",
                "midpoint",
                "dqn",
                {"env": f"MinAtar/{game}", "steps": 60_000},
                _MINATAR,
                batch=32,
                lr=2.5e-4,
                last=1,
                coefficients={"injection": {"head": "q_net.q_net"}},  # all layers behind the extractor, as its paper
                about=f"MinAtar {game}: the remedy once, at half of the training; about 2 min per run",
            )
            for game in ("Breakout", "Asterix")
        ),
        _setting(
            "dqn-atari-asterix",
            "midpoint",
            "dqn",
            {"env": "ALE/Asterix-v5", "steps": 8_000},
            _MINATAR | {"width": [], "extractor": "nature", "buffer_size": 8_000},
            batch=32,
            lr=2.5e-4,
            last=1,
            coefficients={"injection": {"head": "q_net.q_net"}},
            about="Atari Asterix, the remedy once, at half; too short to learn much; about 3 min per run",
        ),
        _setting(
            "dqn-replay-ratio",
            "replay-ratio",
            "dqn",
            {"env": "MinAtar/Breakout", "steps": 16_000, "tasks": 4},
            _MINATAR | {"train_freq": 1, "gradient_steps": 4, "buffer_size": 20_000},
            batch=32,
            lr=2.5e-4,
            last=2,
            about="MinAtar Breakout with four updates per step (the primacy bias), a remedy at each quarter; "
            "about 4 min per run",
        ),
        _setting(
            "ppo-gravity",
            "dynamics",
            "ppo",
            {"env": "InvertedDoublePendulum-v5", "tasks": 8, "steps": 16_384, "gravity": [0.5, 3.0]},
            _PPO,
            about="MuJoCo's double pendulum under changing gravity, 8 times; about 3 min per run",
        ),
        _setting(
            "ppo-slippery-ant",
            "dynamics",
            "ppo",
            {"env": "Ant-v5", "tasks": 5, "steps": 40_960, "friction": [1e-4, 1e4]},
            _PPO | {"n_steps": 2048},
            lr=3e-4,
            about="Slippery Ant (Dohare et al.), five frictions, far shorter than theirs; about 8 min per run",
        ),
        _setting(
            "sac-midpoint-hopper",
            "midpoint",
            "sac",
            {"env": "Hopper-v5", "steps": 20_000},
            _SAC | {"learning_starts": 1_000},
            last=1,
            about="MuJoCo Hopper: the remedy once, at half of the training; about 3 min per run",
        ),
        _setting(
            "sac-midpoint-walker",
            "midpoint",
            "sac",
            {"env": "dm_control/walker-walk", "steps": 20_000},
            _SAC | {"learning_starts": 1_000},
            last=1,
            about="dm_control's walker: the remedy once, at half of the training; about 3 min per run",
        ),
    ]


def paper() -> list[Fields]:
    """The paper's own sizes, for a cluster: one environment instead of four, and MuJoCo's Humanoid for HumanoidBench.

    >>> [each["name"] for each in paper()][-1]
    'paper/sac-humanoid'
    """
    games = [
        _setting(
            f"paper/dqn-atari-{game.lower()}",
            "midpoint",
            "dqn",
            {"env": f"ALE/{game}-v5", "steps": 2_500_000},
            {
                "width": [],
                "extractor": "nature",
                "buffer_size": 1_000_000,
                "learning_starts": 20_000,
                "train_freq": 1,
                "target_update_interval": 2_000,
                "exploration_fraction": 0.2,  # a tenth of the whole training: SB3 counts within the first half
                "exploration_final_eps": 0.01,
            },
            batch=32,
            lr=6.25e-5,
            optimizer_options={"eps": 1.5e-4},
            last=1,
            about=f"the paper's DQN on {game}: the remedy once, at half of 2.5 million steps; days",
        )
        for game in ("Asterix", "DemonAttack")
    ]
    humanoid = _setting(
        "paper/sac-humanoid",
        "midpoint",
        "sac",
        {"env": "Humanoid-v5", "steps": 1_000_000},
        {
            "width": {"pi": [128], "qf": [512, 512]},
            "buffer_size": 1_000_000,
            "learning_starts": 5_000,
            "gradient_steps": 2,
        },
        batch=256,
        lr=1e-4,
        optimizer="adamw",
        optimizer_options={"weight_decay": 1e-2},
        last=1,
        about="the paper's SAC, on MuJoCo's Humanoid because HumanoidBench is not to be had; the steps are ours; days",
    )
    return [*games, humanoid]
