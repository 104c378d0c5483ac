"""Hyperball, soft weight rescaling and selective resets against plain float64 references."""

import copy

import pytest
import torch
from torch import nn

import rekindle
from rekindle.methods import Hyperball, SelectiveWeightReset, SoftWeightRescaling


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def data(step=0):
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def backward(model, step=0):
    model.zero_grad()
    model(data(step)).square().mean().backward()


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("rate", [None, 0.02])
def test_hyperball_is_adams_direction_at_a_fixed_length_on_a_sphere(rate, decay):
    model, lr = mlp(), 0.05
    adam, method = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay), Hyperball(rate)
    method.remember(model)
    plain = copy.deepcopy(model)
    radius = {n: p.norm().item() for n, p in model.named_parameters() if n in ("0.weight", "2.weight")}
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in plain.named_parameters()}
    for t in range(1, 5):
        backward(plain, t)
        with torch.no_grad():
            for n, p in plain.named_parameters():
                m, v = (0.9 * moments[n][0] + 0.1 * p.grad), (0.999 * moments[n][1] + 0.001 * p.grad.square())
                moments[n] = m, v
                u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
                if n in radius:
                    moved = p - (rate or lr) * radius[n] * u / u.norm()
                    p.copy_(moved / moved.norm() * radius[n])
                else:
                    p.copy_((1 - lr * decay) * p - lr * u)
        backward(model, t)
        receipt = method(model, adam)
        adam.step()
        for n, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), dict(plain.named_parameters())[n].detach(), rtol=1e-9, atol=1e-12)
    assert receipt.changed == ("0.weight", "2.weight")
    assert not adam._optimizer_step_post_hooks or len(adam._optimizer_step_post_hooks) == 1


def test_hyperball_keeps_still_without_a_gradient_and_names_what_it_needs():
    model = mlp()
    adam, method = torch.optim.SGD(model.parameters(), lr=0.1), Hyperball()
    with pytest.raises(ValueError, match="pass the one that trains"):
        method(model)
    before = model[0].weight.detach().clone()
    method(model, adam)
    adam.step()
    torch.testing.assert_close(model[0].weight.detach(), before, rtol=1e-12, atol=0)
    with rekindle.attach(model, adam, "hyperball") as remedy:
        for step in range(3):
            backward(model, step)
            adam.step()
            remedy.step()
    assert model[0].weight.norm().item() == pytest.approx(before.norm().item(), rel=1e-9)
    assert not torch.allclose(model[0].weight, before)


def test_soft_rescaling_follows_its_formula_and_keeps_the_decisions_of_a_relu_chain():
    model, method = mlp(), SoftWeightRescaling(0.2, head=0.5)
    method.remember(model)
    first = {n: p.norm().item() for n, p in model.named_parameters()}
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.mul_(1.5 + number)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    before = model(data())
    method(model)
    product = 1.0
    for layer, pull in (("0", 0.2), ("2", 0.2), ("4", 0.5)):
        w, b = weights[f"{layer}.weight"], weights[f"{layer}.bias"]
        c = (pull * first[f"{layer}.weight"] + (1 - pull) * w.norm().item()) / w.norm().item()
        product *= c
        torch.testing.assert_close(model[int(layer)].weight.detach(), c * w)
        torch.testing.assert_close(model[int(layer)].bias.detach(), product * b)
    torch.testing.assert_close(model(data()), product * before)


def test_soft_rescaling_begins_its_product_at_the_last_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    model = model.double().train()
    method = SoftWeightRescaling(0.3)
    method.remember(model)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.add_(0.1).mul_(2 + number)
    before = model(data())
    receipt = method(model)
    assert {"0.weight", "1.weight", "1.bias", "5.weight", "5.bias"} < set(receipt.changed)
    ratios = model(data()) / before
    torch.testing.assert_close(ratios, ratios[0, 0].expand_as(ratios), rtol=1e-4, atol=0)  # but for BatchNorm's ε
    with pytest.raises(ValueError, match="remember"):
        SoftWeightRescaling()(mlp())


@pytest.mark.parametrize("utility", ["gradient", "magnitude"])
@pytest.mark.parametrize("decay", [0.0, 0.9])
@pytest.mark.parametrize("choose", ["proportional", "threshold"])
def test_selective_resets_draw_the_least_useful_weights_anew(utility, decay, choose):
    model = mlp()
    method = SelectiveWeightReset(0.3, every=3, utility=utility, decay=decay, choose=choose)
    average = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for step in range(1, 4):
        backward(model, step)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        for n, p in model.named_parameters():
            now = (p.detach() * p.grad if utility == "gradient" else p.detach()).abs()
            average[n] = decay * average[n] + (1 - decay) * now
        receipt = method(model)
        if step < 3:
            assert not receipt.records
    for n, p in model.named_parameters():
        flat = average[n].flatten()
        changed = (p.detach() != before[n]).flatten()
        if choose == "threshold":
            assert torch.equal(changed, flat <= 0.3 * flat.mean())
        else:
            assert int(0.3 * len(flat)) <= int(changed.sum()) <= int(0.3 * len(flat)) + 1
            assert bool((flat[changed][:, None] <= flat[~changed][None]).all())
        assert bool((p.detach().flatten()[changed].abs() <= p[0].numel() ** -0.5 + 1).all())
    assert not method.state_dict()["averages"]


def test_selective_resets_need_gradients_and_check_their_options():
    with pytest.raises(ValueError, match="no gradient"):
        SelectiveWeightReset()(mlp())
    for options in ({"factor": -1.0}, {"every": 0}, {"factor": 2.0}, {"utility": "random"}):
        with pytest.raises(ValueError, match=r"factor|utility"):
            SelectiveWeightReset(**options)
