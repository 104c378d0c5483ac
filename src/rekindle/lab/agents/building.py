"""The agent of a setting: a stable-baselines3 class with the setting's options, its weights drawn from the run's seed.

`network_options` are SB3's own, but for three: `width` and `activation` of the hidden layers, and `extractor`
("minatar": a small convolutional network for 10×10 observations, "nature": SB3's for Atari).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rekindle.extras import require
from rekindle.lab.agents.environments import CHANNELS
from rekindle.lab.arms import Arm
from rekindle.lab.settings import Setting
from rekindle.lab.sources import derive
from rekindle.lab.train import Refused

_sb3: Any = require("stable_baselines3", "rl", "an agent in the laboratory")
_extractors: Any = require("stable_baselines3.common.torch_layers", "rl", "an agent in the laboratory")

AGENTS = {"dqn": "DQN", "sac": "SAC", "td3": "TD3", "ppo": "PPO", "a2c": "A2C"}
_ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "elu": nn.ELU, "silu": nn.SiLU}
_OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


class SmallCNN(_extractors.BaseFeaturesExtractor):  # type: ignore[misc]
    """One convolution of 3×3 and one hidden layer, for 10×10 observations, as the MinAtar paper has them."""

    def __init__(self, observation_space: Any, features_dim: int = 128, filters: int = 16) -> None:
        super().__init__(observation_space, features_dim)
        self.convolution = nn.Conv2d(CHANNELS, filters, 3)
        self.hidden = nn.Linear(filters * 8 * 8, features_dim)

    def forward(self, observations: Tensor) -> Tensor:
        """Features (batch, features_dim) of observations (batch, 10, 10, 10)."""
        found: Tensor = self.hidden(self.convolution(observations).relu().flatten(1)).relu()
        return found


def build(setting: Setting, arm: Arm, env: Any, seed: int) -> Any:
    """The agent as it starts; `seed` is the run's. torch's global random state must be the caller's to spend."""
    if setting.network not in AGENTS:
        raise ValueError(f"setting {setting.name!r}: network {setting.network!r} is none of {', '.join(AGENTS)}")
    options = dict(setting.network_options)
    policy: dict[str, Any] = dict(options.pop("policy_kwargs", {}))
    extractor, width = options.pop("extractor", None), options.pop("width", [64, 64])
    policy["net_arch"] = {key: list(each) for key, each in width.items()} if isinstance(width, dict) else list(width)
    activation = options.pop("activation", "relu")
    if activation not in _ACTIVATIONS or extractor not in (None, "minatar", "nature"):
        raise ValueError(
            f"setting {setting.name!r}: activation={activation!r} is one of {', '.join(_ACTIVATIONS)}; "
            f'extractor={extractor!r} is "minatar", "nature" or none'
        )
    policy["activation_fn"] = _ACTIVATIONS[activation]
    if extractor == "minatar":
        policy["features_extractor_class"] = SmallCNN
    policy |= _optimizer(setting, arm)
    if setting.network != "a2c":
        options["batch_size"] = setting.batch
    if "train_freq" in options and isinstance(options["train_freq"], list):
        options["train_freq"] = tuple(options["train_freq"])  # JSON has lists only
    rate = setting.lr * (1.0 if arm.lr is None else arm.lr)
    kind = getattr(_sb3, AGENTS[setting.network])
    try:
        return kind(
            "CnnPolicy" if extractor == "nature" else "MlpPolicy",
            env,
            learning_rate=rate,
            policy_kwargs=policy,
            seed=derive(seed, "agent") % 2**31,
            device="cpu",
            **options,
        )
    except TypeError as error:
        raise ValueError(f"setting {setting.name!r}: {kind.__name__} does not take {options}: {error}") from error


def _optimizer(setting: Setting, arm: Arm) -> dict[str, Any]:
    """As `train.make_optimizers` has it: the setting's options hold for an arm's optimizer if both are Adams."""
    kind = arm.optimizer or setting.optimizer
    if kind not in _OPTIMIZERS:
        raise Refused(f"an agent's optimizer is {', '.join(_OPTIMIZERS)}; {kind} is for networks in the laboratory")
    related = kind == setting.optimizer or {kind, setting.optimizer} <= {"adam", "adamw"}
    options: dict[str, Any] = {**(setting.optimizer_options if related else {}), **arm.optimizer_options}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    if kind != "sgd":
        options = {"weight_decay": 0.0, **options}
    if options.pop("lr", None) is not None:
        raise Refused("SB3 writes the learning rate itself: give the setting's lr or the arm's factor")
    return {"optimizer_class": _OPTIMIZERS[kind], "optimizer_kwargs": options}
