"""`attach(…, "revive", when=DeadAbove(0.1))` in every trainer: a router that collapsed gets its experts back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import callbacks
import rekindle
from rekindle.triggers import DeadAbove
from stacked_models import CASES, Switch


def options() -> dict[str, Any]:
    return {"method": "revive", "when": DeadAbove(0.1, most=1), "monitor": 2}


class Routed(callbacks.Net):
    """A network whose experts are all dead but one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = collapsed(6)
        self.head = nn.Linear(16, 3)


def collapsed(inputs: int) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), Switch())
    CASES["switch"]().kill(made)
    return made


def acted(callback: Any) -> None:
    (receipt,), (firing,) = callback.receipts, callback.firings
    assert receipt.method == "revive" and receipt.totals()["counts"]["experts"] >= 6
    assert firing.reason.startswith("dead_worst 0.87") or firing.reason.startswith("dead_worst 0.75")


@pytest.mark.parametrize("trainer", ["transformers", "lightning", "ignite"])
def test_a_callback(trainer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip(trainer)
    monkeypatch.setattr(callbacks, "Net", Routed)
    callback, _, run = callbacks.TRAINERS[trainer](options(), tmp_path)
    run()
    acted(callback)


def test_a_plain_loop() -> None:
    model = Routed()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    remedy = rekindle.attach(model, adam, "revive", when=DeadAbove(0.1, most=1), monitor=2)
    for batch in callbacks.DATA:
        adam.zero_grad()
        callbacks.loss(model, batch).backward()
        adam.step()
        remedy.step()
    acted(remedy)


def test_an_agent() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    from rekindle.integrations.sb3 import RekindleCallback

    class Extractor(BaseFeaturesExtractor):
        def __init__(self, space: Any) -> None:
            super().__init__(space, features_dim=16)
            self.inside = collapsed(4)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.inside(x)
            return made

    agent = sb3.DQN(
        "MlpPolicy", "CartPole-v1", seed=0, learning_starts=4, batch_size=16, buffer_size=50, train_freq=4,
        policy_kwargs={"features_extractor_class": Extractor, "net_arch": [8]},
    )  # fmt: skip
    callback = RekindleCallback(**options())
    agent.learn(60, callback)
    acted(callback)
