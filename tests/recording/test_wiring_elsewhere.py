"""Neurons of networks that other packages make, and of agents whose networks are called one by one."""

import pytest
import torch

from rekindle.methods import ContinualBackprop, ReDo
from rekindle.recording.wiring import wire


def test_a_multilayer_perceptron_of_torchrl():
    modules = pytest.importorskip("torchrl.modules")
    wiring = wire(modules.MLP(in_features=3, out_features=2, num_cells=[8, 8]), [torch.zeros(4, 3)])
    assert [group.name for group in wiring] == ["0", "2"]


@pytest.mark.parametrize(
    "make", [lambda: ReDo(tau=10.0, sample=1), lambda: ContinualBackprop(0.2, maturity_threshold=1)]
)
def test_crossq_with_its_own_batch_norm(make):
    """Its actor is never called as a whole, and its norms are written out."""
    contrib = pytest.importorskip("sb3_contrib")
    pytest.importorskip("gymnasium")
    from rekindle.integrations.sb3 import RekindleCallback

    method = make()
    options = {"every": 6} if isinstance(method, ReDo) else {}
    callback = RekindleCallback(method, **options)
    agent = contrib.CrossQ("MlpPolicy", "Pendulum-v1", learning_starts=8, seed=0, policy_kwargs={"net_arch": [8, 8]})
    agent.learn(24, callback=callback)
    changed = {name for receipt in callback.receipts for name in receipt.changed}
    assert {"actor.latent_pi.4.weight", "critic.qf0.1.weight", "critic.qf1.4.weight"} <= changed
    assert not any(name.startswith("critic_target") for name in changed)
