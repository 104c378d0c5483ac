"""Every optimizer class at hand: after `fire` the changed weights step as with a new one, or `fire` refuses first."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import optimizer_classes
import rekindle

CHANGED = ("0.weight", "2.weight")
CASES = [".".join(case) for case in optimizer_classes.classes()]
# Where no step can be taken here: gradients that are not dense, CUDA, several processes, a bug of its own.
NOT_HERE = {
    *("torch.optim.SparseAdam", "pytorch_optimizer.CPUOffloadOptimizer", "pytorch_optimizer.DeMo"),
    *("pytorch_optimizer.DistributedMuon", "pytorch_optimizer.LOMO", "pytorch_optimizer.AdaLOMO"),
    *("bitsandbytes.optim.AdEMAMix32bit", "bitsandbytes.optim.PagedAdEMAMix32bit"),
}


class Trained:
    """A network and an optimizer of one class; the weights that `fire` changes are in a group of their own, or not."""

    def __init__(self, case: str, apart: bool, steps: int = 0) -> None:
        torch.manual_seed(0)
        biases = case not in optimizer_classes.MATRICES
        first, second, last = (nn.Linear(*shape, bias=biases) for shape in ((6, 8), (8, 8), (8, 3)))
        self.net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
        named = dict(self.net.named_parameters())
        parts = [[named[name] for name in CHANGED], [p for name, p in named.items() if name not in CHANGED]]
        groups = [{"params": part} for part in (parts if apart else [list(named.values())])]
        self.optimizer: Any = optimizer_classes.made(*case.rsplit(".", 1), groups)
        for seed in range(steps):
            self.step(seed)

    def step(self, seed: int) -> None:
        optimizer_classes.step(self.optimizer, list(self.net.parameters()), seed)

    def weights(self, changed: bool) -> list[torch.Tensor]:
        named = self.net.named_parameters()
        return [parameter.detach() for name, parameter in named if (name in CHANGED) == changed]


def close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    # Steps are of the size of 1e-2; classes with an eigenvalue problem round by where its arguments lie in memory.
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-4) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("apart", [True, False], ids=["own group", "one group"])
@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_HERE])
def test_the_next_steps_are_those_of_a_new_optimizer_or_nothing_is_written(case: str, apart: bool) -> None:
    warnings.simplefilter("ignore")
    if case == "pytorch_optimizer.SafeFP16Optimizer" and apart:
        pytest.skip("takes one group only")
    treated, untouched = Trained(case, apart, steps=3), Trained(case, apart, steps=3)
    try:
        said = str(rekindle.fire(treated.net, treated.optimizer, targets="auto"))
        new = Trained(case, apart)
        new.net.load_state_dict(treated.net.state_dict())
    except (ValueError, TypeError) as refusal:
        said = str(refusal)
        new = untouched  # nothing may have changed, and training goes on
    assert "optimizer" in said
    one_history = case.endswith(".LBFGS")  # which any change makes stale
    for seed in range(100, 105):
        for each in {treated, untouched, new}:
            each.step(seed)
        assert close(treated.weights(changed=True), new.weights(changed=True)), "the changed weights"
        others = new if one_history else untouched
        assert close(treated.weights(changed=False), others.weights(changed=False)), "the others"


def test_most_classes_can_be_reset() -> None:
    refused = set()
    for case in set(CASES) - NOT_HERE:
        try:
            trained = Trained(case, apart=True, steps=1)
            rekindle.optimizers.check(trained.optimizer, dict(zip(CHANGED, trained.weights(True), strict=True)))
        except (ValueError, TypeError, NotImplementedError):
            refused.add(case)
    assert len(refused) < len(CASES) / 4, sorted(refused)
