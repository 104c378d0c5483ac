"""Hare and tortoise, Adam-Rel, the clips, NaP, UPGD and Compose against their formulas."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zoo_models
from rekindle.initial import UnknownStart
from rekindle.methods import (
    DASH,
    FIRE,
    UPGD,
    AdamRel,
    Compose,
    HareTortoise,
    HeadReset,
    IsometryLoss,
    L2Init,
    NormalizeAndProject,
    Parseval,
    RandomIsometry,
    ReDo,
    Rescale,
    SingularClip,
    WeightClip,
)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def x():
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def fit(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x()).square().mean().backward()
        optimizer.step()


def test_the_tortoise_is_the_exponential_average_and_the_hare_goes_there():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    method = HareTortoise(momentum=0.8)
    average = None
    for _ in range(5):
        fit(model, sgd, 1)
        now = {n: t.clone() for n, t in model.state_dict().items() if t.is_floating_point()}
        average = now if average is None else {n: 0.8 * average[n] + 0.2 * now[n] for n in now}
        method.update(model)
    for name, value in method.tortoise().items():
        torch.testing.assert_close(value, average[name])
    momenta = copy.deepcopy(sgd.state_dict()["state"])
    receipt = method(model, sgd)
    for name, value in average.items():
        torch.testing.assert_close(model.state_dict()[name], value)  # BatchNorm statistics included
    assert receipt.optimizer.reset == 0, "the authors leave the optimizer alone"
    for key, slots in sgd.state_dict()["state"].items():
        assert torch.equal(slots["momentum_buffer"], momenta[key]["momentum_buffer"])
    renewing = HareTortoise(momentum=0.8, optimizer_state="fresh")
    renewing.update(model)
    assert renewing(model, sgd).optimizer.reset == 6
    assert not torch.equal(model[0].weight, now["0.weight"])


def test_observing_updates_once_a_training_pass():
    model = net()
    method = HareTortoise(momentum=0.5)
    with pytest.raises(ValueError, match="not started"):
        method(model)
    with method.observe(model):
        model(x())
        model.eval()
        model(x())
        model.train()
        with torch.no_grad():
            model[0].weight.add_(1)
            model(x())
        model(x())
    old = method.tortoise()["0.weight"]
    torch.testing.assert_close(old, model[0].weight.detach() - 0.5)


def test_adam_rel_resets_the_clock_and_nothing_else():
    model = net()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    fit(model, adam)
    weights = copy.deepcopy(model.state_dict())
    before = {p: {k: v.clone() for k, v in s.items()} for p, s in adam.state.items()}
    receipt = AdamRel()(model, adam)
    for parameter, state in adam.state.items():
        assert float(state["step"]) == 0
        assert torch.equal(state["exp_avg"], before[parameter]["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], before[parameter]["exp_avg_sq"])
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert receipt.optimizer.reset == 6
    with pytest.raises(ValueError, match="pass the optimizer"):
        AdamRel()(model)


def test_weights_are_clipped_to_a_multiple_of_the_initial_bound():
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2)
    ).double()
    for parameter in model.parameters():
        parameter.data.mul_(5)
    old = copy.deepcopy(model.state_dict())
    receipt = WeightClip(1.5)(model)
    clipped = 0
    for index, fan_in in ((0, 18), (3, 12), (5, 5)):
        limit = 1.5 * fan_in**-0.5
        for part in ("weight", "bias"):
            before = old[f"{index}.{part}"]
            torch.testing.assert_close(getattr(model[index], part).detach(), before.clamp(-limit, limit))
            clipped += int((before.abs() > limit).sum())
    assert receipt.totals()["counts"]["clipped"] == clipped > 0
    assert not WeightClip(1.5)(model).records


def test_recurrent_layers_are_clipped_by_their_own_bound():
    model = zoo_models.build("lstm")
    for parameter in model.parameters():
        parameter.data.mul_(9)
    embedding = model.embedding.weight.clone()
    WeightClip(1.0)(model)
    assert model.lstm.weight_ih_l0.abs().max() <= 16**-0.5
    assert model.lstm.bias_hh_l1.abs().max() <= 16**-0.5
    assert torch.equal(embedding, model.embedding.weight)


def test_nap_keeps_first_norms_and_directions():
    model = net()
    method = NormalizeAndProject()
    with pytest.raises(UnknownStart, match="remember"):
        method(model)
    method.remember(model)
    first = {0: model[0].weight.norm().item()}
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    fit(model, adam)
    old = {0: model[0].weight.detach().clone()}
    head = model[3].weight.detach().clone()
    state = copy.deepcopy(adam.state_dict())
    method(model, adam)
    torch.testing.assert_close(model[0].weight.detach(), old[0] * first[0] / old[0].norm())
    assert torch.equal(model[3].weight, head), "the scale of the output layer is not taken back by a norm"
    everything = NormalizeAndProject(targets="layers")
    everything.remember(net())
    everything(model)
    assert model[3].weight.norm().item() == pytest.approx(net()[3].weight.norm().item())
    for key, slots in adam.state_dict()["state"].items():
        assert all(torch.equal(v, state["state"][key][k]) for k, v in slots.items())
    again = NormalizeAndProject()
    again.load_state_dict(method.state_dict())
    again(model)
    model[0].weight.data.zero_()
    with pytest.raises(ValueError, match=r"'0\.weight' has norm 0"):
        again(model)


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.4), (0.3, 0.5), (0.2, 9.0)])
def test_singular_values_are_clipped_and_vectors_stay(low, high):
    model = net()
    u, s, v = torch.linalg.svd(model[0].weight.detach(), full_matrices=False)
    SingularClip(low, high)(model)
    torch.testing.assert_close(model[0].weight.detach(), u @ torch.diag(s.clamp(low, high)) @ v)


def test_singular_clip_between_equal_bounds_is_fire():
    one, two = net(), net()
    SingularClip(1, 1, scale="paper")(one)
    FIRE()(two)
    torch.testing.assert_close(one[0].weight, two[0].weight, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="low"):
        SingularClip(2, 1)


def test_upgd_with_sgd_is_the_papers_step():
    model = net()
    lr, decay, beta, sigma = 0.1, 0.01, 0.9, 0.05
    sgd = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)
    method = UPGD(sigma, beta)
    utility = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    noise = torch.Generator().manual_seed(4)
    draws = torch.Generator().manual_seed(4)
    for t in range(1, 4):
        model.zero_grad()
        model(x()).square().mean().backward()
        expected = {}
        for n, p in model.named_parameters():
            utility[n] = beta * utility[n] + (1 - beta) * -(p.grad * p.detach())
        top = max(float(u.max()) / (1 - beta**t) for u in utility.values())
        drawn = iter(torch.randn(sum(p.numel() for p in model.parameters()), generator=noise).double())
        for n, p in model.named_parameters():
            share = torch.sigmoid(utility[n] / (1 - beta**t) / top)
            xi = torch.stack([next(drawn) for _ in range(p.numel())]).view(p.shape)
            expected[n] = p.detach() * (1 - lr * decay) - lr * (p.grad + sigma * xi) * (1 - share)
        method(model, sgd, generator=draws)
        sgd.step()
        for n, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), expected[n])


def test_upgd_with_an_adaptive_optimizer_gates_the_step_and_not_the_gradient():
    """The authors' adaptive form: moments from the plain gradient, then (m̂/√v̂ + σξ)·(1 − s), all in float64."""
    model = net()
    lr, decay, beta, sigma = 0.1, 0.01, 0.9, 0.05
    adam = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    method = UPGD(sigma, beta)
    state = {n: [torch.zeros_like(p) for _ in range(3)] for n, p in model.named_parameters()}
    noise, draws = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    for t in range(1, 5):
        model.zero_grad()
        model(x()).square().mean().backward()
        plain = {n: p.grad.clone() for n, p in model.named_parameters()}
        for n, p in model.named_parameters():
            u, m, v = state[n]
            g = plain[n]
            state[n] = [
                beta * u - (1 - beta) * g * p.detach(),
                0.9 * m + 0.1 * g,
                0.999 * v + 0.001 * g * g,
            ]
        top = max(float(u.max()) for u, _, _ in state.values())
        expected = {}
        drawn = iter(torch.randn(sum(p.numel() for p in model.parameters()), generator=noise).double())
        for n, p in model.named_parameters():
            u, m, v = state[n]
            step = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            xi = torch.stack([next(drawn) for _ in range(p.numel())]).view(p.shape)
            expected[n] = p.detach() * (1 - lr * decay) - lr * (step + sigma * xi) * (1 - torch.sigmoid(u / top))
        method(model, adam, generator=draws)
        assert all(torch.equal(p.grad, plain[n]) for n, p in model.named_parameters())
        adam.step()
        for n, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), expected[n])
    method(model, adam)
    method(model, adam)  # the step between was skipped, as a gradient scaler does
    adam.step()
    after = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.zero_grad()
    adam.step()  # without gradients nothing moves, and nothing is gated a second time
    assert all(torch.equal(p, after[n]) for n, p in model.named_parameters())


def test_upgd_protects_the_most_useful_weight_and_needs_gradients():
    model = nn.Linear(2, 1, bias=False).double()
    with pytest.raises(ValueError, match=r"backward\(\)"):
        UPGD()(model)
    model.weight.data = torch.tensor([[1.0, 1.0]]).double()
    model.weight.grad = torch.tensor([[-5.0, 1.0]]).double()  # −g·w: the first is useful, the second harmful
    foreign = SimpleNamespace(param_groups=[{"params": [model.weight], "lr": 0.1}], state={})  # has no hooks
    UPGD(sigma=0.0)(model, foreign)
    kept = model.weight.grad / torch.tensor([[-5.0, 1.0]]).double()
    assert kept[0, 0] == pytest.approx(1 - torch.sigmoid(torch.tensor(1.0)).item())
    assert kept[0, 1] > 0.5


def test_compose_applies_in_order_and_joins_everything():
    model = net()
    adam = torch.optim.Adam(model.parameters())
    fit(model, adam)
    both = Compose([Rescale(2.0, targets="auto"), HeadReset(), L2Init(0.1), Parseval(0.2)])
    both.remember(model)
    alone = L2Init(0.1)
    alone.remember(model)
    with torch.no_grad():
        model[0].weight.add_(0.5)
    expected = alone.loss_term(model) + Parseval(0.2).loss_term(model)
    torch.testing.assert_close(both.loss_term(model), expected)
    receipt = Compose([Rescale(2.0, targets="auto"), HeadReset()])(model, adam)
    assert receipt.method == "compose(rescale, head-reset)"
    assert receipt.changed == ("0.weight", "3.weight", "3.bias")
    assert receipt.optimizer.reset == 9
    assert "3.weight" not in receipt.skipped
    assert model[0].weight.norm().item() == pytest.approx(2 * 4**0.5)
    watched = Compose([ReDo(), HareTortoise()])
    with watched.observe(model):
        model(x())
    assert watched.methods[0].scores(model)
    assert watched.methods[1].tortoise()
    again = Compose([ReDo(), HareTortoise()])
    again.load_state_dict(watched.state_dict())
    assert again.methods[1].tortoise().keys() == watched.methods[1].tortoise().keys()
    with pytest.raises(ValueError, match="at least one"):
        Compose([])


def test_compose_of_different_moments_gives_each_moment_its_part():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    joined = Compose([Rescale(2.0, targets="auto"), Parseval(0.2), WeightClip(0.5), UPGD(), AdamRel()])
    assert {moment for moment in ("event", "loss", "step", "backward") if joined.at(moment)} == {
        "event",
        "loss",
        "step",
        "backward",
    }
    assert [type(m) for m in joined.at("event").methods] == [Rescale, AdamRel]
    torch.testing.assert_close(joined.at("loss").loss_term(model), Parseval(0.2).loss_term(model))
    torch.testing.assert_close(joined.loss_term(model), Parseval(0.2).loss_term(model))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match='at\\("backward"\\)'):
        joined(model, sgd)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    fired = Compose([Rescale(2.0, targets="auto"), IsometryLoss(1.0)])
    receipt = fired(model, sgd)
    assert receipt.changed == ("0.weight",)
    assert "isometry-loss acts through loss_term(model)" in receipt.notes
    assert model[0].weight.norm().item() == pytest.approx(2 * 4**0.5), "no step of the penalty"
    assert fired.at("loss").loss_term(model) > 0
    assert fired.at("backward") is None


def test_compose_needs_what_its_members_need():
    assert Compose([Rescale(), DASH()]).batches == "all"
    assert Compose([Rescale(), ReDo(period=7)]).period == 7
    assert Compose([Rescale(), HareTortoise()]).watches
    assert not Compose([Rescale(), ReDo()]).watches
    with pytest.raises(TypeError, match="cannot be called"):
        Compose([Rescale(), 3])


def test_fire_hands_its_seed_over():
    def fired(**options):
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).double()
        nn.init.zeros_(model[0].weight)
        model[0].weight.data[0, 0] = 1.0  # rank 1: the rest is completed by random directions
        FIRE(**options)(model)
        return model[0].weight.detach()

    assert torch.equal(fired(seed=7), fired(seed=7))
    assert not torch.allclose(fired(seed=7), fired(seed=0))
    assert torch.equal(fired(), fired(seed=0))


def test_methods_compute_in_full_precision_under_autocast():
    plain, cast = net().float(), net().float()
    SingularClip(0.2, 0.5)(plain)
    with torch.autocast("cpu", torch.bfloat16):
        SingularClip(0.2, 0.5)(cast)
        inside = IsometryLoss(1.0).loss_term(cast)
    assert torch.equal(plain[0].weight, cast[0].weight)
    torch.testing.assert_close(inside, IsometryLoss(1.0).loss_term(cast))


def test_members_of_a_compose_draw_from_their_own_generators():
    def result(method, **options):
        model = net()
        method(model, **options)
        return model[0].weight.detach()

    assert torch.equal(result(Compose([RandomIsometry(seed=3)])), result(RandomIsometry(seed=3)))
    given = {"generator": torch.Generator().manual_seed(9)}
    same = {"generator": torch.Generator().manual_seed(9)}
    assert torch.equal(result(Compose([RandomIsometry(seed=3)]), **given), result(RandomIsometry(), **same))
