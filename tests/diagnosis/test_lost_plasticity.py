"""The verdict on networks that lose their plasticity step by step, made by hand, and on fresh ones.

Streams that take plasticity away by training are in `benchmarks/verdict.py`; docs/evidence/instruments.md has the
result.
"""

import pytest
import torch
from torch import nn

import rekindle


def mlp(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [(64, 64), (64, 64), (64, 64)]
    hidden = [layer for size in sizes for layer in (nn.Linear(*size), activation())]
    return nn.Sequential(*hidden, nn.Linear(64, 10))


@torch.no_grad()
def damage(model: nn.Sequential, share: float) -> None:
    """Make this share of every hidden layer's neurons dead, and the others similar to each other by as much."""
    for layer in [layer for layer in model if isinstance(layer, nn.Linear)][:-1]:
        dead = round(share * layer.out_features)
        layer.bias[:dead] = -100.0
        layer.weight[dead:].lerp_(layer.weight[dead : dead + 1].expand_as(layer.weight[dead:]).clone(), share)


def test_damage_is_reported_before_half_of_the_neurons_are_dead() -> None:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    fresh = rekindle.health(mlp(), [(x,)])
    verdicts = []
    for tenths in range(10):
        model = mlp()
        damage(model, tenths / 10)
        verdicts.append(rekindle.health(model, [(x,)], reference=fresh).verdict)
    assert verdicts[0] == "healthy"
    first = [str(verdict) for verdict in verdicts].index("act")
    assert 1 < first < 5
    assert all(verdict == "act" for verdict in verdicts[first:])
    assert verdicts[first].sure
    assert len({finding.sign for finding in verdicts[first].findings if finding.level == "act"}) >= 2


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU])
def test_a_fresh_network_raises_no_alarm(activation: type[nn.Module]) -> None:
    model = mlp(activation)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    health = rekindle.health(model, [(x,)], reference=model)
    assert health.verdict == "healthy"
    assert health.against(None).verdict == "healthy"
