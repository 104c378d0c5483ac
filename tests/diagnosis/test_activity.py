"""Units on hand-made networks whose dead, linear and saturated neurons are known; and nothing is left behind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from known_units import DEAD, draw, kill
from rekindle.diagnosis.activity import activity
from rekindle.diagnosis.hooks import entropy, entropy_share
from rekindle.diagnosis.units import gini

# What a unit needs as input so that its output is 0 whatever the data: "off" is far negative, "zero" is 0 itself.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], type[nn.Module] | None, float]] = {
    "relu": (F.relu, nn.ReLU, -200.0),
    "relu6": (F.relu6, nn.ReLU6, -200.0),
    "gelu": (F.gelu, nn.GELU, -200.0),
    "silu": (F.silu, nn.SiLU, -200.0),
    "mish": (F.mish, nn.Mish, -200.0),
    "softplus": (F.softplus, nn.Softplus, -200.0),
    "sigmoid": (torch.sigmoid, nn.Sigmoid, -200.0),
    "hardsigmoid": (F.hardsigmoid, nn.Hardsigmoid, -200.0),
    "hardswish": (F.hardswish, nn.Hardswish, -200.0),
    "tanh": (torch.tanh, nn.Tanh, 0.0),
    "softsign": (F.softsign, nn.Softsign, 0.0),
    "leaky_relu": (F.leaky_relu, nn.LeakyReLU, 0.0),
    "elu": (F.elu, nn.ELU, 0.0),
    "selu": (F.selu, nn.SELU, 0.0),
    "hardtanh": (F.hardtanh, nn.Hardtanh, 0.0),
    "tanhshrink": (F.tanhshrink, nn.Tanhshrink, 0.0),
    "squared relu": (lambda x: torch.relu(x).square(), None, -200.0),
    "squared relu, as a power": (lambda x: F.relu(x) ** 2, None, -200.0),
    "squared relu, as a product": (lambda x: (r := torch.relu(x)) * r, None, -200.0),
    "relu, as a method": (lambda x: x.relu(), None, -200.0),
    "relu, as a clamp": (lambda x: x.clamp(min=0), None, -200.0),
    "relu, in place": (lambda x: F.relu(x, inplace=True), None, -200.0),
}
UNITS = 6


@pytest.fixture(autouse=True)
def _same_networks_every_time() -> None:
    torch.manual_seed(0)


class Functional(nn.Module):
    """A layer whose activation is a plain function call."""

    def __init__(self, layer: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def layers() -> dict[str, tuple[nn.Module, Tensor]]:
    return {
        "2-D": (nn.Linear(5, UNITS), draw(20, 5)),
        "3-D": (nn.Linear(5, UNITS), draw(4, 7, 5)),
        "3-D channels": (nn.Conv1d(3, UNITS, 3), draw(4, 3, 9)),
        "4-D": (nn.Conv2d(3, UNITS, 3), draw(2, 3, 8, 8)),
        "4-D channels last": (nn.Linear(5, UNITS), draw(2, 3, 4, 5)),
    }


@pytest.mark.parametrize("rank", list(layers()))
@pytest.mark.parametrize("kind", list(ACTIVATIONS))
def test_known_dead_units_are_found(kind: str, rank: str) -> None:
    function, module, off = ACTIVATIONS[kind]
    for made in [Functional] + ([] if module is None else [None]):
        layer, x = layers()[rank]
        kill(layer, off)
        net = Functional(layer, function) if made else nn.Sequential(layer, module())
        found = activity(net, [x]).layers
        assert len(found) == 1
        unit = found[0]
        assert unit.units == UNITS
        assert unit.dead == len(DEAD)
        assert unit.dormant(0.0) == pytest.approx(len(DEAD) / UNITS)
        assert [at for at, score in enumerate(unit.scores.tolist()) if score <= 0] == DEAD
        assert unit.after == ("layer" if made else "0")


def test_scores_follow_the_definition() -> None:
    layer = nn.Linear(5, UNITS)
    x = draw(3, 10, 5)
    out = layer(x).gelu() if hasattr(Tensor, "gelu") else F.gelu(layer(x))
    mean = out.detach().double().abs().reshape(-1, UNITS).mean(0)
    found = activity(nn.Sequential(layer, nn.GELU()), list(x)).layers[0]
    torch.testing.assert_close(found.scores.double(), mean / mean.mean(), rtol=1e-5, atol=1e-7)
    assert found.rows == 30
    tau = float(found.scores.sort().values[2])
    assert found.dormant(tau) == pytest.approx(0.5)


class Gated(nn.Module):
    """act(gate) × up → down, in several spellings."""

    def __init__(self, function: Callable[[Tensor], Tensor] | nn.Module, swapped: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(5, UNITS), nn.Linear(5, UNITS), nn.Linear(UNITS, 2)
        self.function, self.swapped = function, swapped

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up(x), self.function(self.gate(x))
        return self.down(up * gate if self.swapped else gate * up)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("function", [F.silu, F.gelu, F.relu, torch.sigmoid, nn.SiLU(), nn.GELU()])
def test_gated_units_are_the_product(function: Any, swapped: bool) -> None:
    net = Gated(function, swapped)
    # One unit dies by its gate, another by its value: only the product sees both.
    kill(net.gate, -200.0, [1])
    kill(net.up, 0.0, [4])
    found = activity(net, [draw(20, 5)]).layers
    assert len(found) == 1
    assert found[0].kind.endswith("gated")
    assert [at for at, score in enumerate(found[0].scores.tolist()) if score <= 0] == [1, 4]
    assert found[0].linearized is None


def test_glu_halves() -> None:
    net = nn.Sequential(nn.Linear(5, 2 * UNITS), nn.GLU())
    kill(net[0], 0.0, [2])
    found = activity(net, [draw(20, 5)]).layers[0]
    assert (found.units, found.dead, found.kind) == (UNITS, 1, "glu")


class SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b


class TanhGELU(nn.Module):
    """An activation built of simpler functions: the tanh inside is not its output."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3)))


def test_activation_modules_count_as_a_whole() -> None:
    net = nn.Sequential(nn.Linear(5, 2 * UNITS), SwiGLU(), nn.Linear(UNITS, UNITS), TanhGELU())
    kill(net[0], 0.0, [UNITS])
    kill(net[2], -200.0, [0, 3])
    found = {layer.name: layer for layer in activity(net, [draw(20, 5)]).layers}
    assert {name: layer.dead for name, layer in found.items()} == {"1": 1, "3": 2}


def test_a_norm_that_squares_the_units_is_not_part_of_them() -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    for activation in (nn.ReLU(), nn.GELU()):
        found = activity(nn.Sequential(nn.Linear(5, UNITS), activation, Norm()), [draw(20, 5)]).layers
        assert [layer.kind for layer in found] == [type(activation).__name__.lower()]
        assert found[0].rows == 20


def test_repeats_are_numbered_and_shared_modules_told_apart() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.act = nn.Linear(5, 4), nn.Linear(4, 3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(torch.tanh(self.act(self.second(self.act(self.first(x))))))

    found = activity(Shared(), [draw(8, 5), draw(8, 5, seed=1)]).layers
    assert [(layer.name, layer.units, layer.rows) for layer in found] == [
        ("act", 4, 16),
        ("act#2", 3, 16),
        ("tanh", 3, 16),
        ("tanh#2", 3, 16),
    ]
    assert [layer.after for layer in found[:2]] == ["first", "second"]


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_inside_a_transformer_layer_of_torch(activation: str) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=activation, batch_first=True).eval()
    kill(layer.linear1, -200.0, [0, 5, 9])
    found = activity(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), [draw(3, 5, 8)])
    assert [unit.dead for unit in found.layers] == [3, 3]
    assert [unit.name for unit in found.layers] == [f"layers.0:{activation}", f"layers.1:{activation}"]
    assert len(found.attention) == 2
    assert not any(each.reason.startswith("its forward did not run") for each in found.unmeasured)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    net = kind(5, 4, batch_first=True)
    found = activity(net, [draw(3, 6, 5)]).layers
    assert len(found) == 1
    expected = net(draw(3, 6, 5))[0].detach().double().abs().reshape(-1, 4).mean(0)
    torch.testing.assert_close(found[0].scores.double(), expected / expected.mean(), rtol=1e-5, atol=1e-7)
    assert found[0].rows == 18
    assert found[0].saturation == 0.0


def test_padded_tokens_are_left_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 2)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return F.relu(self.fc(x))

    net = Model()
    with torch.no_grad():
        net.fc.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        net.fc.bias.zero_()
    # Unit 1 speaks for negative inputs, which occur in padding only.
    x = torch.tensor([[1.0, 2.0, -5.0], [3.0, -7.0, -7.0]])[..., None]
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    found = activity(net, [{"x": x, "attention_mask": mask}]).layers[0]
    assert (found.rows, found.dead) == (3, 1)
    assert activity(net, [{"x": x, "attention_mask": torch.ones_like(mask)}]).layers[0].dead == 0
    loss = lambda model, batch: model(**batch).sum()  # noqa: E731
    with_gradient = activity(net, [{"x": x, "attention_mask": mask}], loss=loss).layers[0]
    assert with_gradient.gradient_scores is not None
    assert with_gradient.gradient_scores.tolist() == [1.0, 1.0]


def test_saturation_usage_and_linearized_units() -> None:
    x = torch.linspace(-1, 1, 101)[:, None]
    net = nn.Sequential(nn.Linear(1, 4), nn.ReLU())
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0], [1.0], [0.0], [1.0]]))
        net[0].bias.copy_(torch.tensor([5.0, -5.0, 2.0, 0.0]))
    found = activity(net, [x]).layers[0]
    # Always on: a line. Always off: dead. Constant: neither. Half and half: bends.
    assert (found.linearized, found.dead, found.constant) == (1, 1, 1)
    assert found.usage == pytest.approx((1 + 0 + 1 + 50 / 101) / 4, abs=0.01)
    expected = torch.tensor([1.0, 0.0, 1.0, 0.49])
    assert found.usage_gini == pytest.approx(gini(expected), abs=0.01)
    tanh = activity(nn.Tanh(), [torch.tensor([[0.0, 9.0, -9.0, 0.01]]).repeat(8, 1)]).layers[0]
    assert tanh.saturation == pytest.approx(0.5)
    assert activity(nn.ReLU(), [x]).layers[0].saturation is None


def test_feature_rank_is_that_of_the_kept_rows() -> None:
    values = draw(30, 3) @ draw(3, 10, seed=1)
    found = activity(nn.LeakyReLU(1.0), [values[:20], values[20:]]).layers[0]
    s = np.linalg.svd(values.double().numpy(), compute_uv=False)
    p = s / s.sum()
    p = p[p > 1e-7]
    assert found.feature_rank == pytest.approx(float(np.exp(-(p * np.log(p)).sum())), rel=1e-5)
    assert found.feature_participation == pytest.approx(float((s**2).sum() ** 2 / (s**4).sum()), rel=1e-5)
    assert found.rank_limit == 10
    assert activity(nn.ReLU(), [values], rows=4).layers[0].rank_limit == 4


def test_gradient_dormancy_and_norms_against_autograd() -> None:
    net = nn.Sequential(nn.Linear(5, UNITS), nn.GELU(), nn.Linear(UNITS, 3))
    with torch.no_grad():
        net[2].weight[:, 2] = 0.0
    batches = [(draw(6, 5), draw(6, 3, seed=1)), (draw(6, 5, seed=2), draw(6, 3, seed=3))]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    found = activity(net, batches, loss=loss)
    totals, seen = {name: torch.zeros_like(p) for name, p in net.named_parameters()}, torch.zeros(UNITS)
    for x, y in batches:
        hidden = F.gelu(net[0](x))
        hidden.retain_grad()
        value = F.mse_loss(net[2](hidden), y)
        value.backward()
        seen += hidden.grad.abs().sum(0)
    for name, p in net.named_parameters():
        totals[name] = p.grad / 2
    for name, total in totals.items():
        assert found.gradient_norms[name] == pytest.approx(float(total.norm()), rel=1e-5)
    layer = found.layers[0]
    torch.testing.assert_close(layer.gradient_scores, seen / seen.mean(), rtol=1e-5, atol=1e-7)
    assert layer.gradient_dormant(0.0) == pytest.approx(1 / UNITS)
    assert found.loss == pytest.approx(sum(loss(net, b).item() for b in batches) / 2)


def test_attention_entropy_of_every_kind_of_attention() -> None:
    q, k, v = draw(2, 4, 6, 8), draw(2, 4, 6, 8, seed=1), draw(2, 4, 6, 8, seed=2)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    weights = (q @ k.mT / 8**0.5).masked_fill(~causal, float("-inf")).softmax(-1)
    expected = -(weights * weights.clamp_min(1e-30).log()).sum(-1).mean((0, 2))

    class Fused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, k, v, is_causal=True)

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softmax((x @ k.mT / 8**0.5).masked_fill(~causal, float("-inf")), dim=-1) @ v

    class Grouped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, k[:, :2], v[:, :2], attn_mask=causal, enable_gqa=True)

    for model in (Fused(), Plain()):
        found = activity(model, [q]).attention
        assert len(found) == 1
        torch.testing.assert_close(found[0].entropy, expected, rtol=1e-5, atol=1e-6)
    grouped = (q @ k[:, :2].repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~causal, float("-inf")).softmax(-1)
    torch.testing.assert_close(activity(Grouped(), [q]).attention[0].entropy, entropy(grouped), rtol=1e-5, atol=1e-6)

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    net, x = Module(), draw(3, 5, 8)
    found = activity(net, [x]).attention
    reference = net.attention(x, x, x, average_attn_weights=False)[1].detach()
    torch.testing.assert_close(found[0].entropy, entropy(reference), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0].share, entropy_share(reference), rtol=1e-5, atol=1e-6)
