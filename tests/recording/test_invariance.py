"""Layers with a normalization behind them: found by tracing, and checked by scaling their weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rekindle.lab.networks import network
from rekindle.recording.invariance import _chain, _traced, norms_behind


class Residual(nn.Module):
    """conv1 → BatchNorm → ReLU → conv2 → BatchNorm, plus a shortcut; `norm` stands after a rectifier."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=bias), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=bias), nn.BatchNorm2d(4)
        self.short = nn.Conv2d(3, 4, 1)
        self.last, self.norm, self.out = nn.Linear(4, 6, bias=bias), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.short(x)
        x = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + kept
        return self.out(self.norm(torch.relu(self.last(x.mean((2, 3))))))


@pytest.mark.parametrize("bias", [False, True])
def test_a_scale_that_is_said_not_to_matter_does_not(bias: bool) -> None:
    model = Residual(bias).double()
    for each in model.modules():
        if hasattr(each, "eps"):
            each.eps = 1e-12  # which a weight's scale does not reach
    found = norms_behind(model)
    expected = {"conv1": "bn1", "conv2": "bn2"} | ({} if bias else {"last": "norm"})
    assert found == expected
    x = torch.randn(8, 3, 5, 5, dtype=torch.float64)
    before = model(x)
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Conv2d | nn.Linear):
            continue
        with torch.no_grad():
            layer.weight *= 3
            moved = float((model(x) - before).abs().max())
            layer.weight /= 3
        assert (moved < 1e-6) == (name in found), (name, moved)


def test_all_convolutions_of_a_resnet_and_no_layer_of_a_gpt() -> None:
    resnet = network("resnet18", shape=(3, 16, 16), classes=10, seed=0, width=8)
    convs = {name for name, module in resnet.named_modules() if isinstance(module, nn.Conv2d)}
    assert set(norms_behind(resnet)) == convs
    gpt = network("gpt", shape=(16,), classes=20, seed=0)
    assert norms_behind(gpt) == {}


def test_the_model_is_left_as_it_was_and_what_cannot_be_traced_is_not_named() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.norm(self.fc(x)) if x.sum() > 0 else self.fc(x)

    model = Branches()
    assert norms_behind(model) == {} and model.calls == 0


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert norms_behind(model) == {"0": "1", "2": "3"}


def test_a_sequential_is_the_chain_that_a_trace_of_it_shows() -> None:
    norm, relu = nn.BatchNorm1d(4), nn.ReLU()
    net = nn.Sequential(nn.Linear(4, 4, bias=False), relu, norm, nn.Linear(4, 4), relu, nn.Linear(4, 4), norm)
    chain, traced = ([(n.op, n.target) for n in graph.nodes][1:] for graph in (_chain(net), _traced(net, top=True)))
    assert chain == traced
    assert norms_behind(net) == {"0": "2", "5": "2"}
