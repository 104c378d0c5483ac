"""SNR: each neuron against its own habit, in bounded memory."""

import pytest
import torch
from torch import nn

from rekindle.methods import SelfNormalizedReset
from rekindle.methods.self_normalized_reset import upper_edges


def net(neurons=3):
    return nn.Sequential(nn.Linear(neurons, neurons), nn.ReLU(), nn.Linear(neurons, 1))


def fire(method, group, pattern):
    """Record one observation in which the neurons with a 1 fire."""
    method.record(group, torch.tensor(pattern, dtype=torch.float32)[None])


def test_ages_and_intervals_are_counted_per_neuron():
    model = net()
    method = SelfNormalizedReset(longest=64)
    group = method.wiring(model, [torch.zeros(1, 3)]).groups[0]
    for t in range(1, 13):
        fire(method, group, [1, t % 3 == 0, 0])
    clock = method.state_dict()["clocks"]["0"]
    assert clock["age"].tolist() == [0, 0, 12]
    assert clock["histogram"][0, 0] == 12  # fired every time: interval 1
    assert clock["histogram"][1, 2] == 4  # every third
    assert clock["histogram"][1].sum() == 4
    assert clock["histogram"][2].sum() == 0


def test_the_threshold_contracts_to_the_percentile_of_the_neurons_own_intervals():
    model = net()
    method = SelfNormalizedReset(percentile=0.9, update_every=100, first_threshold=50, longest=64)
    group = method.wiring(model, [torch.zeros(1, 3)]).groups[0]
    for t in range(1, 101):
        fire(method, group, [1, t % 3 == 0, t % 10 != 0])
        method(model)
    clock = method.state_dict()["clocks"]["0"]
    # intervals: all 1 → limit 2; all 3 → limit 4; nine in ten 1, the others 2: the 90 % point is 1 → limit 2
    assert clock["threshold"].tolist() == [2, 4, 2]


def test_a_neuron_is_reset_when_its_silence_is_longer_than_usual_and_others_are_not():
    model = net()
    method = SelfNormalizedReset(percentile=0.99, update_every=60, first_threshold=40, longest=64)
    group = method.wiring(model, [torch.zeros(1, 3)]).groups[0]
    reset_at = []
    before = model[0].weight.detach().clone()
    for t in range(1, 80):
        alive = t <= 60
        fire(method, group, [1, t % 3 == 0 and alive, t % 12 == 0])
        receipt = method(model)
        if receipt.changed:
            reset_at.append(t)
    # neuron 1 fired every 3rd time until 60: its limit is 4, so it goes at 64; neuron 2 fires every 12th and stays
    assert reset_at[0] == 64
    assert not torch.equal(model[0].weight[1], before[1])
    assert torch.equal(model[0].weight[2], before[2])
    assert torch.equal(model[0].weight[0], before[0])
    assert model[2].weight[0, 1] == 0


def test_intervals_cut_short_by_resets_make_the_threshold_grow():
    # A neuron that naturally fires every 20th time, with a limit of 10: it is always reset before it can fire.
    model = net(1)
    method = SelfNormalizedReset(percentile=0.9, update_every=50, first_threshold=10, longest=1000)
    group = method.wiring(model, [torch.zeros(1, 1)]).groups[0]
    thresholds = []
    for t in range(1, 201):
        fire(method, group, [t % 20 == 0])
        method(model)
        thresholds.append(int(method.state_dict()["clocks"]["0"]["threshold"][0]))
    assert thresholds[0] == 10
    assert max(thresholds) >= 20
    assert thresholds[-1] >= 20  # and it is left alone from then on


@pytest.mark.parametrize("longest", [1, 7, 16, 100, 100_000])
def test_memory_is_bounded_and_bins_are_fine_enough(longest):
    edges = upper_edges(longest)
    assert edges[-1] == longest
    assert len(edges) <= 16 + 4 * 13
    assert (edges[1:] > edges[:-1]).all()
    gaps = edges[1:].double() / edges[:-1].double()
    assert longest <= 16 or (gaps[15:] <= 2**0.25 + 0.07).all()


def test_live_training_finds_the_dead_and_spares_the_living():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    model[0].bias.data[3] = -50.0
    method = SelfNormalizedReset(first_threshold=30)
    adam = torch.optim.Adam(model.parameters())
    seen = []
    with method.observe(model):
        for _ in range(40):
            adam.zero_grad()
            model(torch.randn(32, 4)).square().mean().backward()
            adam.step()
            receipt = method(model, adam)
            seen += [r.counts for r in receipt.records if "neurons" in r.counts]
    assert seen == [{"neurons": 1, "rows": 1}]
    assert model[0].bias[3].abs() < 1


def test_state_continues_and_absence_of_data_is_an_error():
    model = net()
    method = SelfNormalizedReset()
    with pytest.raises(ValueError, match=r"observe\(model\)"):
        method(model)
    group = method.wiring(model, [torch.zeros(1, 3)]).groups[0]
    fire(method, group, [1, 0, 0])
    again = SelfNormalizedReset()
    again.load_state_dict(method.state_dict())
    assert again.state_dict()["clocks"]["0"]["age"].tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match="percentile"):
        SelfNormalizedReset(1.5)
