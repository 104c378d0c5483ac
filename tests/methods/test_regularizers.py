"""Regularizers: value and gradient against the formula in float64, coupled and decoupled."""

import pytest
import torch
from torch import nn

import zoo_models
from rekindle.initial import UnknownStart, snapshot
from rekindle.methods import IsometryLoss, L2Init, Parseval, SpectralRegularizer, WeightDecay


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 3)
    ).double()


def gradients(term, model):
    model.zero_grad()
    term.backward()
    return {n: p.grad for n, p in model.named_parameters()}


def test_l2_init_pulls_to_the_start():
    model = net()
    start = snapshot(model)
    for parameter in model.parameters():
        parameter.data.add_(0.1)
    term = L2Init(0.3, initial=start).loss_term(model)
    count = sum(p.numel() for p in model.parameters())
    assert term.item() == pytest.approx(0.3 * 0.01 * count)
    for name, gradient in gradients(term, model).items():
        torch.testing.assert_close(gradient, 2 * 0.3 * (model.get_parameter(name).detach() - start[name]))
    with pytest.raises(UnknownStart, match="remember"):
        L2Init().loss_term(model)


def test_weight_decay_is_half_the_square_and_adamws_step():
    model, twin = net(), net()
    for name, gradient in gradients(WeightDecay(0.2).loss_term(model), model).items():
        torch.testing.assert_close(gradient, 0.2 * model.get_parameter(name).detach())
    adamw = torch.optim.AdamW(twin.parameters(), lr=0.05, weight_decay=0.2)
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    for one, optimizer in ((model, adam), (twin, adamw)):
        for parameter in one.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    WeightDecay(0.2)(model, adam)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def parseval_reference(weights, scale, smaller=False):
    total = 0.0
    for w in weights:
        w = w.detach().flatten(1)
        w = w.T if smaller and w.shape[0] > w.shape[1] else w
        total += float(((w @ w.T - scale * torch.eye(len(w)).double()) ** 2).sum())
    return total


@pytest.mark.parametrize("side", ["rows", "smaller"])
def test_parseval_on_flattened_kernels(side):
    model = nn.Sequential(
        nn.Conv2d(1, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 3)
    ).double()
    term = Parseval(0.5, scale=1.5, side=side).loss_term(model)
    hidden = [model[0].weight, model[3].weight]  # the head is not among them
    assert term.item() == pytest.approx(0.5 * parseval_reference(hidden, 1.5, side == "smaller"))
    found = gradients(term, model)
    w = model[3].weight.detach()
    expected = 0.5 * 4 * (w @ w.T - 1.5 * torch.eye(6).double()) @ w
    torch.testing.assert_close(found["3.weight"], expected)
    assert found["5.weight"] is None


def test_parseval_with_norms_pulls_their_scales_to_one_too():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2)).double()
    torch.nn.init.constant_(model[1].weight, 2.0)
    plain = Parseval(1.0, 1.5, targets="layers").loss_term(model).item()
    both = Parseval(1.0, 1.5, targets="layers", norms=True).loss_term(model).item()
    assert both == pytest.approx(plain + 4 * (2.0**2 - 1.5) ** 2)


def test_isometry_loss_is_dfi_per_dimension_at_the_scale():
    model = net()
    term = IsometryLoss(1.0, "paper").loss_term(model)
    total = 0.0
    for tap in model[0].weight.detach().flatten(2).unbind(2):
        total += dfi(tap, (5 / 2) ** 0.5 / 9) / 2
    total += dfi(model[4].weight.detach(), (6 / 20) ** 0.5) / 6
    assert term.item() == pytest.approx(total)
    flat = IsometryLoss(1.0, 0.7, conv="flat").loss_term(model).item()
    assert flat == pytest.approx(
        dfi(model[0].weight.detach().flatten(1), 0.7) / 5 + dfi(model[4].weight.detach(), 0.7) / 6
    )


def test_plain_isometry_loss_beside_adam_is_adamo():
    """Rosseau et al. 2026: θ ← θ − lr·Adam(∇task) − lr·λ·∇‖WWᵀ − I‖²_F on the smaller side, all written out."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2)).double()
    method = IsometryLoss(0.1, 1.0, per_dimension=False, decoupled=True, targets="all")
    assert method.moment == "step"
    x, y, lr = torch.randn(16, 3).double(), torch.randn(16, 2).double(), 1e-2
    adam = torch.optim.Adam(model.parameters(), lr=lr)
    weights = [p.detach().clone() for p in model.parameters()]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    for step in range(1, 6):
        adam.zero_grad()
        (model(x) - y).square().mean().backward()
        for i, parameter in enumerate(model.parameters()):
            m, v = moments[i]
            g = parameter.grad
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            moments[i] = m, v
            w = weights[i] - lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
            if w.dim() == 2:
                off = w @ w.T - torch.eye(len(w)).double() if len(w) <= w.shape[1] else None
                pull = off @ w if off is not None else w @ (w.T @ w - torch.eye(w.shape[1]).double())
                w = w - lr * 0.1 * 4 * pull
            weights[i] = w
        adam.step()
        method(model, adam)
        for parameter, expected in zip(model.parameters(), weights, strict=True):
            torch.testing.assert_close(parameter.detach(), expected)


def dfi(w, scale):
    w = w / scale
    gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
    return float(((gram - torch.eye(len(gram)).double()) ** 2).sum())


def test_descending_the_isometry_loss_leads_to_an_isometry():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.02)
    method = IsometryLoss(1.0, 1.0, conv="flat")
    for _ in range(600):
        method(model, sgd)
    assert method.loss_term(model).item() < 1e-6


def test_fused_weights_are_split_as_in_the_plan():
    model = zoo_models.build("gpt2").double()
    only = "transformer.h.0.attn.c_attn"
    term = Parseval(1.0, targets=only).loss_term(model).item()
    weight = model.transformer.h[0].attn.c_attn.weight.detach()  # stored (in, 3·out)
    assert term == pytest.approx(parseval_reference([part.T for part in weight.chunk(3, 1)], 1.0))


def test_spectral_regularizer_matches_the_svd():
    model = net()
    method = SpectralRegularizer(0.7, k=2, iterations=200)
    term = method.loss_term(model)
    expected = 0.0
    for w in (model[0].weight, model[4].weight, model[6].weight):
        expected += (float(torch.linalg.svdvals(w.detach().flatten(1))[0]) ** 2 - 1) ** 2
    expected += sum(float(layer.bias.detach().norm()) ** 4 for layer in (model[0], model[1], model[4], model[6]))
    expected += (float(model[1].weight.detach().abs().max()) ** 2 - 1) ** 2
    assert term.item() == pytest.approx(0.7 * expected, rel=1e-9)
    found = gradients(term, model)["4.weight"]
    u, s, v = torch.linalg.svd(model[4].weight.detach(), full_matrices=False)
    torch.testing.assert_close(
        found, 0.7 * 2 * (s[0] ** 2 - 1) * 2 * s[0] * torch.outer(u[:, 0], v[0]), atol=1e-7, rtol=1e-5
    )


def test_one_power_step_a_call_follows_slow_changes():
    model = net()
    method = SpectralRegularizer(1.0)
    for _ in range(60):
        value = method.loss_term(model).item()
        with torch.no_grad():
            model[4].weight.mul_(1.001)
    exact = SpectralRegularizer(1.0, iterations=300).loss_term(model).item()
    assert value == pytest.approx(exact, rel=0.05)
    again = SpectralRegularizer(1.0)
    again.load_state_dict(method.state_dict())
    assert again.loss_term(model).item() == pytest.approx(method.loss_term(model).item(), rel=1e-6)


@pytest.mark.parametrize("make", [L2Init, Parseval, SpectralRegularizer, IsometryLoss])
def test_decoupled_step_is_lr_times_the_gradient_and_leaves_moments(make):
    model = net()
    method = make(0.3)
    if make is L2Init:
        method.remember(model)
        with torch.no_grad():
            model[0].weight.add_(0.1)
    adam = torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1:].parameters(), "lr": 0.01}]
    )
    if isinstance(method, SpectralRegularizer):
        method.iterations = 200
    wanted = gradients(method.loss_term(model), model)
    before = snapshot(model)
    model.zero_grad()
    receipt = method(model, adam)
    for name, parameter in model.named_parameters():
        rate = 0.5 if name.startswith("0.") else 0.01
        step = 0 if wanted[name] is None else rate * wanted[name]
        torch.testing.assert_close(parameter.detach(), before[name] - step, atol=1e-7, rtol=1e-6)
    assert not adam.state
    assert receipt.records
    with pytest.raises(ValueError, match="pass the optimizer"):
        method(model)


def test_a_loss_term_reaches_training():
    model = net()
    method = Parseval(1.0)
    x = torch.randn(4, 2, 4, 4).double()
    (model(x).square().mean() + method.loss_term(model)).backward()
    assert model[0].weight.grad.abs().max() > 0
    assert method.moment == "loss"
    assert WeightDecay().moment == "step"
    with pytest.raises(ValueError, match="coefficient"):
        Parseval(-1)


@pytest.mark.parametrize("targets", ["trainable", "layers"])
def test_the_gradient_of_l2_init_is_that_of_its_loss_term(targets):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    method = L2Init(0.3, targets=targets)
    method.remember(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    parameters = list(model.parameters())
    expected = torch.autograd.grad(method.loss_term(model), parameters, allow_unused=True)
    found, factor = method.gradients(model, parameters)
    given = [None if g is None else factor * g for g in found]
    assert [g is None for g in given] == [g is None for g in expected] and any(g is not None for g in given)
    for gradient, reference in zip(given, expected, strict=True):
        if reference is not None:
            torch.testing.assert_close(gradient, reference)
