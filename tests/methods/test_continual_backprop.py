"""Continual backpropagation against a plain re-implementation, step by step."""

import copy

import pytest
import torch
from torch import nn

from rekindle.methods import ContinualBackprop
from rekindle.methods.continual_backprop import outgoing
from rekindle.recording.wiring import wire


def mlp(width=10):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2)).double()


def inputs(step):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def test_utilities_means_and_replacements_follow_the_formula():
    model = mlp()
    method = ContinualBackprop(replacement_rate=0.13, decay=0.9, maturity_threshold=3)
    utility, mean, age, debt = [0.0] * 10, [0.0] * 10, [0] * 10, 0.0
    replaced = 0
    with method.observe(model):
        for step in range(12):
            x = inputs(step)
            h = torch.relu(x @ model[0].weight.T + model[0].bias).detach()
            model(x)
            out = model[2].weight.detach()
            for i in range(10):
                age[i] += 1
                utility[i] = 0.9 * utility[i] + 0.1 * float(h[:, i].abs().mean() * out[:, i].abs().sum())
                mean[i] = 0.9 * mean[i] + 0.1 * float(h[:, i].mean())
            mature = [i for i in range(10) if age[i] > 3]
            debt += 0.13 * len(mature)
            due = sorted(mature, key=lambda i: utility[i] / (1 - 0.9 ** age[i]))[: int(debt)]
            debt -= len(due)
            bias = model[2].bias.detach().clone()
            for i in due:
                bias += out[:, i] * mean[i] / (1 - 0.9 ** age[i])
                utility[i], mean[i], age[i] = 0.0, 0.0, 0
            receipt = method(model)
            assert receipt.totals()["counts"].get("neurons", 0) == len(due)
            assert all(model[2].weight[:, i].abs().max() == 0 for i in due)
            torch.testing.assert_close(model[2].bias.detach(), bias)
            replaced += len(due)
            corrected = method.utilities("0")
            for i in range(10):
                if age[i]:
                    assert corrected[i].item() == pytest.approx(utility[i] / (1 - 0.9 ** age[i]), rel=1e-9)
    assert replaced >= 5


def test_a_leaving_neuron_hands_its_mean_over_so_the_mean_output_stays():
    model = mlp()
    x = inputs(0)
    method = ContinualBackprop(replacement_rate=0.9, maturity_threshold=0)
    before = model(x).mean(0)
    with method.observe(model):
        model(x)
    receipt = method(model)
    assert receipt.totals()["counts"]["neurons"] == 9
    torch.testing.assert_close(model(x).mean(0), before)


def test_convolutions_hand_the_sum_over_the_taps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2)).double()
    x = torch.ones(3, 1, 5, 5).double()  # a constant image: every position has the mean activity
    before = model(x)
    method = ContinualBackprop(replacement_rate=0.99, maturity_threshold=0)
    with method.observe(model):
        model(x)
    method(model)
    torch.testing.assert_close(model(x), before)


def test_a_norm_after_the_activation_means_nothing_is_handed_over_and_it_is_said():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 2))
    method = ContinualBackprop(replacement_rate=0.5, maturity_threshold=0)
    before = model[3].bias.detach().clone()
    with method.observe(model):
        model(torch.randn(4, 3))
    receipt = method(model)
    assert torch.equal(before, model[3].bias)
    assert any("norm follows" in note for note in receipt.notes)


def test_the_mean_decays():
    # Released code adds up feature activity without decay.
    model = mlp()
    method = ContinualBackprop(replacement_rate=0.0, decay=0.5)
    with method.observe(model):
        for scale in [1.0] * 3 + [0.0] * 30:
            model(inputs(0) * scale)
            method(model)
    rest = torch.relu(model[0].bias).detach()
    torch.testing.assert_close(method.state_dict()["lives"]["0"]["mean"], rest, atol=1e-6, rtol=0)


def test_debts_are_paid_evenly_never_in_a_burst():
    model = mlp(100)
    method = ContinualBackprop(replacement_rate=0.004, maturity_threshold=20)
    amounts = []
    with method.observe(model):
        for step in range(200):
            model(inputs(step))
            amounts.append(method(model).totals()["counts"].get("neurons", 0))
    assert sum(amounts[:20]) == 0  # nobody is mature
    assert max(amounts) == 1  # 0.4 a step
    assert sum(amounts) == pytest.approx(0.004 * 100 * 180, rel=0.1)


def test_only_mature_neurons_go():
    model = mlp()
    method = ContinualBackprop(replacement_rate=0.5, maturity_threshold=5)
    with method.observe(model):
        for step in range(6):
            model(inputs(step))
            receipt = method(model)
        assert receipt.totals()["counts"]["neurons"] == 5
        model(inputs(9))
        assert method(model).totals()["counts"].get("neurons", 0) <= 3  # the five new ones are safe


@pytest.mark.parametrize("spread", [1, 4])
def test_outgoing_weight_sums(spread):
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3 * spread, 2))
    weight = model[3].weight.detach()
    expected = [float(weight[:, i * spread : (i + 1) * spread].abs().sum()) for i in range(3)]
    total = torch.empty(3)
    outgoing(wire(model, [torch.zeros(1, 1, 2 + (spread > 1), 2 + (spread > 1))]).groups[0], total)
    torch.testing.assert_close(total, torch.tensor(expected))


def test_adams_rows_and_columns_start_again_with_the_neuron():
    # Released code replaces weights and leaves Adam's moments of the old ones.
    model = mlp()
    adam = torch.optim.Adam(model.parameters())
    method = ContinualBackprop(replacement_rate=0.1, maturity_threshold=0)
    with method.observe(model):
        model(inputs(0)).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    receipt = method(model, adam)
    assert receipt.totals()["counts"]["neurons"] == 1
    gone = (adam.state[model[0].weight]["exp_avg"] == 0).all(1).nonzero().flatten()
    assert len(gone) == 1
    assert (adam.state[model[2].weight]["exp_avg"] == 0).all(0).nonzero().flatten().tolist() == gone.tolist()
    assert model[2].weight[:, gone].abs().max() == 0


def test_no_loader_is_touched():
    # Released code deep-copies its data loader at every step; here there is none.
    class Loader:
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

        def __iter__(self):
            raise AssertionError("read")

    model = mlp()
    method = ContinualBackprop(maturity_threshold=0)
    with method.observe(model):
        model(inputs(0))
        method(model, batches=Loader())


def test_state_continues_bit_for_bit():
    def run(method, model, start, end):
        with method.observe(model):
            for step in range(start, end):
                model(inputs(step))
                method(model)

    straight = mlp()
    one = ContinualBackprop(replacement_rate=0.2, maturity_threshold=2)
    run(one, straight, 0, 10)
    broken = mlp()
    first = ContinualBackprop(replacement_rate=0.2, maturity_threshold=2)
    run(first, broken, 0, 5)
    second = ContinualBackprop(replacement_rate=0.2, maturity_threshold=2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(second, broken, 5, 10)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), broken.parameters(), strict=True))


def test_without_observation_it_refuses():
    with pytest.raises(ValueError, match=r"observe\(model\)"):
        ContinualBackprop()(mlp())


def test_layers_of_different_widths_positions_and_dtypes_lie_in_one_row_without_a_difference():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 5), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(5, 2)).double()
    method = ContinualBackprop(replacement_rate=0.0, decay=0.9)
    plain, expected = copy.deepcopy(model), {}
    with method.observe(model):
        for step in range(3):
            x = torch.randn(7, 1, 5, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            model(x)
            method(model)
            for group, reader, layer in zip(("0", "2", "5"), (2, 5, 7), (1, 3, 6), strict=True):
                h, weight = plain[: layer + 1](x), plain[reader].weight
                size = h.transpose(0, 1).flatten(1).abs().mean(1)
                out = weight.abs().sum((0, 2, 3)) if reader == 2 else weight.abs().sum(0).view(len(size), -1).sum(1)
                expected[group] = 0.9 * expected.get(group, 0.0) + 0.1 * (size * out).detach()
    for group, utility in expected.items():
        torch.testing.assert_close(method.state_dict()["lives"][group]["utility"], utility)
