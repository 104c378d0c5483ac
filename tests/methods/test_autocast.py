"""Inside `torch.autocast` a method computes in full precision, and its changes are seen at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rekindle import methods


@pytest.mark.parametrize("method", [methods.FIRE(), methods.FullReset(), methods.ShrinkPerturb(0.5, "fresh")])
def test_a_method_inside_autocast_is_the_same_and_is_seen(method: methods.FIRE) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    plain, inside = copy.deepcopy(model), copy.deepcopy(model)
    x = torch.randn(4, 8)
    copy.deepcopy(method)(plain)
    with torch.autocast("cpu", torch.bfloat16):
        inside(x)  # autocast keeps casts of the weights
        copy.deepcopy(method)(inside)
        seen = inside(x).float()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), inside.parameters(), strict=True))
    assert torch.allclose(seen, plain(x), atol=0.05, rtol=0.05)
