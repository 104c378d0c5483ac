"""Units on hand-made networks whose dead, linear and saturated neurons are known; and nothing is left behind."""

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rekindle.activity import activity
from rekindle.attention import entropy, entropy_share
from rekindle.curvature import hessian_eigenvalue
from rekindle.units import gini, rows_of, scores

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
DEAD = [1, 4]
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


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kill(layer: nn.Module, off: float, units: list[int] = DEAD) -> None:
    """Make these units ignore their input and receive `off`."""
    with torch.no_grad():
        layer.weight[units] = 0.0
        layer.bias[units] = off


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
    assert found[0].linearised is None


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


def test_saturation_usage_and_linearised_units() -> None:
    x = torch.linspace(-1, 1, 101)[:, None]
    net = nn.Sequential(nn.Linear(1, 4), nn.ReLU())
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0], [1.0], [0.0], [1.0]]))
        net[0].bias.copy_(torch.tensor([5.0, -5.0, 2.0, 0.0]))
    found = activity(net, [x]).layers[0]
    # Always on: a line. Always off: dead. Constant: neither. Half and half: bends.
    assert (found.linearised, found.dead, found.constant) == (1, 1, 1)
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


def test_what_was_not_seen_is_listed_and_never_zero() -> None:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clamp(-1, 1) ** 3

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Custom.apply(self.a(x))) + self.frozen

    found = activity(Net(), [draw(4, 3)], loss=lambda m, x: m(x).sum())
    assert found.layers == ()
    reasons = {(each.name, each.what): each.reason for each in found.unmeasured}
    assert reasons["a", "units"] == "no activation was seen on its output"
    assert reasons["unused", "activity"].startswith("its forward did not run")
    assert reasons["unused.weight", "gradient"] == "no gradient reaches it"
    assert reasons["frozen", "gradient"] == "it is frozen"
    assert "unused.weight" not in found.gradient_norms


def test_torchscript_is_listed_as_unmeasured() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.zeros(1, 3))
    found = activity(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), scripted), [draw(4, 3)])
    assert [layer.name for layer in found.layers] == ["1"]
    assert any(each.name == "2" and "TorchScript" in each.reason for each in found.unmeasured)


def test_a_compiled_model_is_sampled_eagerly() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    kill(net[0], -200.0, [1])
    compiled = torch.compile(net, backend="eager")
    compiled(draw(50, 3))
    found = activity(compiled, [draw(50, 3)])
    assert [(layer.name, layer.dead) for layer in found.layers] == [("1", 1)]
    net.compile(backend="eager")
    net(draw(50, 3))
    assert activity(net, [draw(50, 3)]).layers[0].dead == 1


class Fragile(nn.Module):
    """Draws random numbers, changes buffers, and may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        random.random()
        np.random.rand()
        x = self.norm(F.relu(self.fc(x))) + torch.rand(4)
        if self.fail:
            raise RuntimeError("on purpose")
        return self.drop(x)


def fingerprint(net: Fragile) -> tuple[Any, ...]:
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        [m.training for m in net.modules()],
        [(p.grad is None, None if p.grad is None else (id(p.grad), p.grad.tolist())) for p in net.parameters()],
        [(name, id(b), b.tolist()) for name, b in net.named_buffers()],
        [
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called)
            for m in net.modules()
        ],
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_grad_enabled(),
        {name: p.tolist() for name, p in net.named_parameters()},
    )


@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("fail", [False, True])
def test_everything_is_as_it_was(fail: bool, with_loss: bool) -> None:
    net = Fragile()
    net.norm.eval()
    net(draw(6, 4)).sum().backward()
    net.fc.bias.grad = None
    before = fingerprint(net)
    net.fail = fail

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = model(x).square().mean()
        value.backward(retain_graph=True)  # even this is undone
        return value

    if fail:
        with pytest.raises(RuntimeError, match="on purpose"):
            activity(net, [draw(6, 4)], loss=loss if with_loss else None)
        with pytest.raises(RuntimeError, match="on purpose"):
            hessian_eigenvalue(net, [draw(6, 4)], lambda m, x: m(x).sum())
    else:
        activity(net, [draw(6, 4)], loss=loss if with_loss else None)
    assert fingerprint(net) == before
    # No mode is left active either.
    assert torch.overrides._get_current_function_mode() is None


def test_errors_speak_of_the_argument() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="wrap a single batch in a list"):
        activity(net, torch.zeros(2, 2))
    with pytest.raises(ValueError, match="batches is empty"):
        activity(net, [])
    with pytest.raises(TypeError, match="scalar tensor, got a tensor of shape"):
        activity(net, [torch.zeros(2, 2)], loss=lambda m, x: m(x))
    with pytest.raises(TypeError, match="a batch is a tensor"):
        activity(net, ["text"])


def test_a_loss_that_calls_the_model_twice_counts_both() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    found = activity(net, [draw(5, 3)], loss=lambda m, x: m(x).mean() + m(-x).mean())
    assert [(layer.name, layer.rows) for layer in found.layers] == [("1", 10)]
    assert found.layers[0].gradient_scores is not None


def test_rows_and_scores_of_odd_shapes() -> None:
    assert rows_of(torch.zeros(5), -1).shape == (1, 5)
    assert rows_of(torch.tensor(1.0), -1) is None
    assert scores(torch.zeros(3)).tolist() == [0, 0, 0]
    assert activity(nn.ReLU(), [torch.ones(4, 3, dtype=torch.bfloat16)]).layers[0].scores.dtype == torch.float32
    silent = activity(nn.ReLU(), [-torch.ones(4, 3)]).layers[0]
    assert (silent.dead, silent.feature_rank, silent.usage_gini) == (3, 0.0, None)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_hessian_eigenvalue_against_the_whole_hessian(sign: float) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    batches = [
        (draw(12, 3).double(), draw(12, 2, seed=1).double()),
        (draw(12, 3, seed=2).double(), draw(12, 2).double()),
    ]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return sign * F.mse_loss(model(batch[0]), batch[1])

    names = [name for name, _ in net.named_parameters()]
    shapes = [p.shape for p in net.parameters()]

    def whole(flat: Tensor) -> Tensor:
        parts = flat.split([s.numel() for s in shapes])
        given = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        outputs = [F.mse_loss(torch.func.functional_call(net, given, x), y) for x, y in batches]
        return sign * sum(outputs) / 2

    start = torch.cat([p.detach().flatten() for p in net.parameters()])
    values = torch.linalg.eigvalsh(torch.autograd.functional.hessian(whole, start))
    expected = max(values.tolist(), key=abs)
    found = hessian_eigenvalue(net, batches, loss, steps=2000, tol=1e-5)
    assert found.converged
    assert found.value == pytest.approx(expected, rel=1e-6)
    assert (found.value < 0) == (sign < 0)
    short = hessian_eigenvalue(net, batches, loss, steps=1, tol=1e-9)
    assert not short.converged
    assert short.steps == 1


def test_opposite_eigenvalues_are_not_called_converged() -> None:
    saddle = nn.Linear(2, 1, bias=False)
    found = hessian_eigenvalue(saddle, [0], lambda m, _: (m.weight.square() * torch.tensor([[1.0, -1.0]])).sum())
    assert not found.converged


def test_curvature_through_attention() -> None:
    net = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    found = hessian_eigenvalue(net, [draw(2, 3, 8)], lambda m, x: m(x).square().mean(), steps=3)
    assert found.steps <= 3
    assert np.isfinite(found.value)


def test_no_hook_survives_a_deepcopy_or_a_second_run() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    first = activity(net, [draw(4, 3)])
    second = activity(copy.deepcopy(net), [draw(4, 3)])
    assert first.layers[0].scores.tolist() == second.layers[0].scores.tolist()
