"""The programs of examples/ that train with other libraries run at a small size, and the remedy acts when it should."""

from __future__ import annotations

import importlib.util
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle

FOLDER = Path(__file__).parents[2] / "examples"


def example(name: str, *packages: str) -> Any:
    """The program as a module, or a skip that names what is missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"examples/{name}.py needs {', '.join(missing)}")
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    return module


def steps(remedy: Any) -> list[int]:
    return [firing.step for firing in remedy.firings]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_dqn_in_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    made = example("cleanrl_dqn", "gymnasium")
    small = {"tasks": 2, "steps": 200, "starts": 60, "width": 16, "batch": 16}
    found = {remedy: made.learn(made.Options(remedy=remedy, **small)) for remedy in ("nothing", "fire")}
    assert found["nothing"][0] == found["fire"][0]
    assert all(math.isfinite(value) and value > 0 for values in found.values() for value in values)
    assert capsys.readouterr().out.count("task 1: 3 matrices projected") == 1


def test_sac_counts_updates_of_its_critics() -> None:
    """q, q, a, a: 200 updates of each are 200 steps, and nothing acts after the last one."""
    made = example("cleanrl_sac", "gymnasium")
    small = "--total-timesteps 240 --learning-starts 40 --batch-size 16 --width 16 --every 50"
    remedy, count, networks = made.train(made.options(small.split()))
    assert count == 200 and steps(remedy) == [50, 100, 150]
    assert remedy.receipts[0].mirrors == 2 and "actor.fc_mean.weight" not in remedy.receipts[0].changed
    assert all(not torch.equal(net.fc2.weight, target.fc2.weight) for net, target in networks.values())


def test_ppo_acts_before_a_rollout() -> None:
    made = example("cleanrl_ppo", "gymnasium")
    small = "--num-iterations 4 --num-steps 16 --period 2 --width 16"
    remedy, ratios = made.train(made.options(small.split()))
    assert steps(remedy) == [32]  # not at 64, the last one
    assert max(ratios) < 1e-4  # the stored log-probabilities are those of the weights that learn from them


def test_skrl() -> None:
    remedy = example("skrl_ppo", "skrl", "gymnasium").train(32, rollouts=8, iterations=2)
    assert steps(remedy) == [32]
    assert {name.partition(".")[0] for name in remedy.receipts[0].changed} == {"policy", "value"}


def test_rsl_rl() -> None:
    made = example("rsl_rl_ppo", "rsl_rl", "tensordict", "git", "gymnasium")
    remedy = made.train(4, period=2, envs=4, steps=8)
    assert steps(remedy) == [16] and len(remedy.receipts[0].changed) == 4


def test_torchrl() -> None:
    made = example("torchrl_dqn", "torchrl", "tensordict", "gymnasium")
    remedy, actor, target = made.train(64, every=8, batch=16, width=16)
    assert steps(remedy) == [8]
    assert remedy.receipts[0].changed == ("module.0.module.0.weight", "module.0.module.2.weight")
    assert remedy.receipts[0].mirrors == 1
    own, followed = dict(actor.named_parameters()), dict(target.flatten_keys(".").items())
    first = "module.0.module.0.weight"
    assert own.keys() == followed.keys() and not torch.equal(own[first].data, followed[first])


def test_torchrl_losses_and_batches_are_understood() -> None:
    example("torchrl_dqn", "torchrl", "tensordict", "gymnasium")
    from tensordict import TensorDict
    from torchrl.modules import MLP, QValueActor
    from torchrl.objectives import DQNLoss

    actor = QValueActor(MLP(in_features=3, out_features=2, num_cells=[8, 8]), action_space="one-hot")
    batch = TensorDict({"observation": torch.randn(16, 3), "reward": torch.zeros(16, 1)}, [16])
    assert rekindle.health(actor, [batch]).units and set(batch.keys()) == {"observation", "reward"}
    assert len(rekindle.plan(actor, example=batch, targets="auto").selected) == 2
    loss = DQNLoss(actor, action_space="one-hot")
    for verb in (rekindle.plan, rekindle.fire, rekindle.health):
        with pytest.raises(TypeError, match="DQNLoss holds parameters without their layers"):
            verb(loss)


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_trl(kind: str) -> None:
    callback = example("trl_finetune", "trl", "datasets", "transformers").train(kind, steps=4, every=2)
    assert steps(callback) == [2] and all(".mlp." in name for name in callback.receipts[0].changed)


@pytest.mark.parametrize("kind", ["gan", "ddpg"])
def test_lightning_with_manual_optimization(kind: str) -> None:
    callback, _ = example("lightning_manual", "lightning", "gymnasium").train(kind, 2, every=6, width=16, batches=6)
    assert steps(callback) == [6]  # 12 updates of each optimizer, and nothing after the last
    heads = {"gan": "generator.4.weight", "ddpg": "actor.4.weight"}
    assert heads[kind] not in callback.receipts[0].changed and callback.receipts[0].mirrors == 2 * (kind == "ddpg")
