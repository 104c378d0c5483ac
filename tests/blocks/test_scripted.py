"""Modules that hide their code: each works, or is refused with a sentence."""

import pytest
import torch
from torch import nn

import rekindle


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.relu(self.a(x)))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
WAYS = {"no example": {}, "example": {"example": X}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, X)], ids=["scripted", "traced"])
@pytest.mark.parametrize("way", WAYS)
def test_scripted_and_traced_modules_are_skipped_with_the_reason(make, way):
    with pytest.raises(ValueError, match=r"scripted or traced module \(torch.jit\)"):
        rekindle.plan(make(Net()), **WAYS[way])
    inside = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), make(Net()))
    reasons = {entry.name: entry.refusal for entry in rekindle.plan(inside, **WAYS[way]).entries}
    assert reasons["0.weight"] is None
    assert "scripted or traced" in reasons["2.a.weight"] and "scripted or traced" in reasons["2.head.weight"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrap", [lambda net: torch.compile(net, backend="eager"), nn.DataParallel])
def test_wrapped_modules_are_planned_as_what_they_hold(wrap, way):
    plan = rekindle.plan(wrap(Net()), targets="auto", **WAYS[way])
    assert [entry.name for entry in plan.selected] == ["a.weight"]
    assert plan.reasons()["head.weight"] == "output head"


def test_lazy_modules_say_what_to_do():
    net = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    assert "lazy" in rekindle.plan(net).reasons()["0.weight"]
    with pytest.raises(ValueError, match="run the model on the batch once"):
        rekindle.plan(net, example=X)
