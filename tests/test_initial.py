"""Stored and fresh starts: own scheme, own generator, global state untouched."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from rekindle.initial import UnknownStart, check_start, draw, snapshot, tensors_of
from rekindle.isolation import forked_rng


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.lstm = nn.LSTM(8, 4)
        self.table = nn.Embedding(5, 8)
        self.register_buffer("mask", torch.arange(4.0))


def test_a_draw_equals_a_new_module_under_the_same_seed():
    # nn.Linear draws its weight, then its bias, from the global state: so must the draw.
    generator = gen(3)
    seed = int(torch.randint(2**62, (), generator=gen(3)))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        expected = nn.Linear(7, 5)
    got = draw(nn.Linear(7, 5), generator=generator)
    assert torch.equal(got["weight"], expected.weight)
    assert torch.equal(got["bias"], expected.bias)


def test_every_parameter_of_a_mixed_network_is_drawn_and_statistics_start_again():
    net = Net()
    net.norm.running_mean.fill_(3.0)
    net.norm.num_batches_tracked.fill_(9)
    before = snapshot(net)
    start = draw(net, generator=gen())
    assert set(start) == set(before)
    assert all(torch.isfinite(t).all() for t in start.values())
    for name in ("conv.weight", "attention.in_proj_weight", "attention.out_proj.weight", "lstm.weight_hh_l0"):
        assert not torch.equal(start[name], before[name])
        assert 0.3 < float(start[name].std() / before[name].std()) < 3
    assert start["attention.out_proj.bias"].abs().max() == 0  # set by the attention, not by its Linear
    assert start["norm.running_mean"].abs().max() == 0
    assert int(start["norm.num_batches_tracked"]) == 0
    assert torch.equal(start["mask"], before["mask"])
    for name, tensor in snapshot(net).items():
        assert torch.equal(tensor, before[name])  # the model itself is untouched


def test_only_the_generator_decides_and_global_state_stays():
    net = Net()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = draw(net, generator=gen(1))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    second = draw(net, generator=gen(1))
    third = draw(net, generator=gen(2))
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert not torch.equal(first["conv.weight"], third["conv.weight"])


def test_an_exception_inside_restores_the_global_state():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), forked_rng(gen()):
        torch.rand(3).reshape(2)
    assert torch.equal(before, torch.get_rng_state())


def test_transformers_scheme_is_the_models_own():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    start = draw(model, generator=gen())
    assert start["transformer.h.0.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    # GPT-2 scales what writes into the residual stream by 1/sqrt(2·layers): a parent's doing
    assert start["transformer.h.0.mlp.c_proj.weight"].std().item() == pytest.approx(0.01, rel=0.1)
    assert start["transformer.h.0.mlp.c_fc.bias"].abs().max() == 0
    part = draw(model, generator=gen(), names=["transformer.h.1.mlp.c_fc.weight"])
    assert list(part) == ["transformer.h.1.mlp.c_fc.weight"]


class WithToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 4))
        self.fc = nn.Linear(4, 4)


def test_a_parameter_without_a_scheme_is_refused_by_name_and_a_factory_helps():
    model = WithToken()
    with pytest.raises(UnknownStart, match="'token'"):
        draw(model, generator=gen())
    assert set(draw(model, generator=gen(), names=["fc.weight"])) == {"fc.weight"}
    one = draw(model, generator=gen(), fresh=WithToken)
    two = draw(model, generator=gen(), fresh=WithToken)
    assert torch.equal(one["token"], two["token"])
    assert not torch.equal(one["token"], model.token)
    with pytest.raises(UnknownStart, match="token"):
        draw(model, generator=gen(), fresh=lambda: nn.Linear(4, 4))


def test_nanogpt_style_init_weights_is_used():
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)
            self.apply(self._init_weights)

        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.5)
                nn.init.zeros_(module.bias)

    start = draw(Tiny(), generator=gen())
    assert start["fc.weight"].std().item() == pytest.approx(0.5, rel=0.1)
    assert start["fc.bias"].abs().max() == 0


def test_parametrized_weights_start_through_right_inverse():
    model = weight_norm(nn.Linear(6, 4))
    start = draw(model, generator=gen(4))
    g, v = start["parametrizations.weight.original0"], start["parametrizations.weight.original1"]
    effective = g * v / v.norm(dim=1, keepdim=True)
    assert effective.abs().max() <= 1 / 6**0.5 + 1e-6  # the bound of nn.Linear's own scheme
    assert effective.std() > 0.1


def test_stored_starts_are_checked():
    model = nn.Linear(3, 2)
    start = snapshot(model)
    check_start(model, start)
    with pytest.raises(UnknownStart, match="'bias'"):
        check_start(model, {"weight": start["weight"]})
    with pytest.raises(UnknownStart, match="shape"):
        check_start(model, {**start, "weight": torch.zeros(5, 3)})
    with pytest.raises(UnknownStart, match="NaN"):
        check_start(model, {**start, "weight": torch.full((2, 3), float("nan"))})
    with pytest.raises(UnknownStart, match="nothing"):
        draw(model, generator=gen(), names=["nothing"])
    assert list(tensors_of(nn.DataParallel(torch.compile(nn.Linear(1, 1))))) == ["weight", "bias"]
