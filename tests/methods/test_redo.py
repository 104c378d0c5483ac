"""ReDo: who is dormant, and that recycling the dead changes no output."""

import copy

import pytest
import torch
from torch import nn

import zoo_models
from rekindle.methods import ContinualBackprop, ReDo, ReGraMa, SelfNormalizedReset
from rekindle.recording.wiring import WiringError


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def data(n=64):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_scores_are_mean_activity_over_the_layers_mean():
    model, x = mlp(), data()
    method = ReDo()
    method.look(model, [x[:20], x[20:]])
    scores = method.scores(model)
    h1 = torch.relu(model[0](x)).detach()
    h2 = torch.relu(model[2](h1)).detach()
    for name, h in (("0", h1), ("2", h2)):
        mean = torch.tensor([sum(abs(float(v)) for v in h[:, i]) / len(h) for i in range(h.shape[1])])
        torch.testing.assert_close(scores[name].float(), (mean / mean.mean()).float(), rtol=1e-5, atol=1e-7)


def test_at_tau_zero_the_output_on_the_data_does_not_change():
    model, x = mlp(), data()
    with torch.no_grad():
        model[0].bias[[1, 5]] = -100
        model[2].bias[2] = -100
    before = model(x)
    receipt = ReDo(tau=0)(model, batches=[x])
    assert torch.equal(model(x), before)
    assert receipt.totals()["counts"] == {"neurons": 3, "rows": 3, "columns": 3}
    method = ReDo()
    method.look(model, [x])
    assert (method.scores(model)["0"] > 0).sum() >= 7  # and they live again


def test_convolutions_behind_a_flatten_and_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5), nn.ReLU(),
        nn.Linear(5, 2),
    ).double()  # fmt: skip
    model[5].bias.data.fill_(1.0)
    model[1].bias.data[2] = -100
    model[5].bias.data[1] = -100
    model.eval()
    x = torch.randn(16, 1, 6, 6, dtype=torch.float64)
    before = model(x)
    receipt = ReDo(tau=0)(model, batches=[x])
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-12)
    assert receipt.totals()["counts"] == {"neurons": 2, "rows": 2, "columns": 4 + 1}
    assert (model[1].weight[2], model[1].bias[2], model[1].running_var[2]) == (1, 0, 1)


def test_a_wholly_silent_layer_is_wholly_dormant_and_nan_free():
    model, x = mlp(), data()
    with torch.no_grad():
        model[2].bias.fill_(-1000)
    receipt = ReDo(tau=0)(model, batches=[x])
    rows = {r.name: r.counts.get("rows") for r in receipt.records if "rows" in r.counts}
    assert rows["2.weight"] == 6


def test_observing_while_training_gives_the_same_scores_as_looking():
    model, x = mlp(), data()
    method = ReDo()
    with method.observe(model):
        model(x)
        with torch.no_grad():
            model(x * 100)  # evaluation passes do not count
    observed = method.scores(model)
    method.forget()
    method.look(model, [x])
    for name, score in method.scores(model).items():
        torch.testing.assert_close(observed[name], score)
    model(x)
    torch.testing.assert_close(method.scores(model)["0"], observed["0"])  # hooks are gone


def test_not_measured_is_an_error_never_zero():
    model = mlp()
    with pytest.raises(ValueError, match="train inside observe"):
        ReDo()(model)

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.use = nn.Linear(2, 3), nn.Linear(3, 1), False

        def forward(self, x):
            return self.b(torch.relu(self.a(x))) if self.use else x

    skips = Skips()
    method = ReDo(consumers={"a": "b"})
    with pytest.raises(WiringError, match="not measured"):
        method(skips, batches=[torch.ones(2, 2)])


def test_gelu_and_unhooked_functionals_are_measured():
    # Ports that hook nn.ReLU report no dormant neuron in a GPT; here a dead one is found behind a functional.
    model = zoo_models.build("nanogpt").eval()
    with torch.no_grad():
        model.h[0].mlp["c_fc"].bias[7] = -1000
    receipt = ReDo(tau=0)(model, batches=[zoo_models.batch("nanogpt")])
    assert receipt.totals()["counts"]["neurons"] == 1
    assert model.h[0].mlp["c_proj"].weight[:, 7].abs().max() == 0


def test_targets_narrow_and_refusals_are_in_the_receipt():
    model = zoo_models.build("resnet")
    receipt = ReDo(tau=10, targets="layer2.*")(model, batches=[zoo_models.batch("resnet")])
    assert set(receipt.changed) == {"layer2.conv1.weight", "layer2.conv2.weight"}
    assert receipt.skipped["layer1.conv1"] == "not among the targets"
    assert "residual" in receipt.skipped["layer1.conv2"]
    with pytest.raises(WiringError, match="nope"):
        ReDo(targets="nope")(model, batches=[zoo_models.batch("resnet")])


def test_state_continues():
    model, x = mlp(), data()
    method, again = ReDo(), ReDo()
    method.look(model, [x])
    again.load_state_dict(method.state_dict())
    for name, score in method.scores(model).items():
        assert torch.equal(score, again.scores(model)[name])


@pytest.mark.parametrize("make", [ReDo, ReGraMa, ContinualBackprop, SelfNormalizedReset])
def test_new_weights_come_from_the_factory_where_there_is_one(make):
    """A network that initializes itself is redrawn as it was made, not as torch would."""

    def fresh():
        model = nn.Sequential(nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 2))
        nn.init.normal_(model[0].weight, std=3.0)
        return model

    torch.manual_seed(0)
    model = fresh()
    with torch.no_grad():
        model[0].bias.fill_(-1e4)  # silent, without gradient, and old
    method = make(fresh=fresh)
    if isinstance(method, ContinualBackprop):
        method.replacement_rate, method.maturity_threshold = 0.9, 0
    if isinstance(method, SelfNormalizedReset):
        method = make(fresh=fresh, first_threshold=1)
    batch = torch.randn(16, 50)
    with method.observe(model):
        model(batch).sum().backward()
        method(model)
    renewed = model[0].weight[(model[0].bias == 0)]
    assert len(renewed) >= 30 and 2.5 < renewed.std().item() < 3.5


@pytest.mark.parametrize("dead", [1, 2, 3])
def test_a_chain_of_dead_layers_is_revived_as_a_whole(dead):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)]
    model = nn.Sequential(*(part for layer in layers[:-1] for part in (layer, nn.ReLU())), layers[-1])
    with torch.no_grad():
        for layer in layers[:dead]:
            layer.bias.fill_(-100.0)
    x = torch.randn(64, 4)
    receipt = ReDo()(model, torch.optim.SGD(model.parameters()), batches=[x])
    assert any("as a whole" in note for note in receipt.notes)
    # The output layer reads nothing yet; once it does, gradients reach every layer of the chain.
    nn.init.ones_(layers[dead].weight)
    model(x).square().mean().backward()
    assert all(layer.weight.grad.abs().max() > 0 for layer in layers)


def test_observing_measures_a_sample_of_the_passes_and_resumes_where_it_was():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    data = [torch.randn(4, 2, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    whole, first, second = ReDo(sample=3), ReDo(sample=3), ReDo(sample=3)
    with whole.observe(model):
        for x in data:
            model(x)
    with first.observe(model):
        for x in data[:2]:
            model(x)
    second.load_state_dict(first.state_dict())
    with second.observe(model):
        for x in data[2:]:
            model(x)
    expected = torch.cat([torch.relu(model[0](data[0])), torch.relu(model[0](data[3]))]).mean(0)
    torch.testing.assert_close(whole.scores(model)["0"], (expected / expected.mean()).detach())
    assert torch.equal(whole.scores(model)["0"], second.scores(model)["0"])


@pytest.mark.parametrize("depth", [1, 4])
def test_a_revived_chain_learns_like_a_fresh_network(depth):
    # The control starts as a revived chain does: fresh hidden layers, and an output layer that reads nothing yet.
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    target = torch.sin(2 * x[:, :1]) + x[:, 1:2]

    def network(seed):
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 16), *(nn.Linear(16, 16) for _ in range(depth - 1)), nn.Linear(16, 1)]
        return nn.Sequential(*(part for layer in layers[:-1] for part in (layer, nn.ReLU())), layers[-1])

    def learned(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for _ in range(100):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    lost, revived, control = [], [], []
    for seed in range(3):
        dead, fresh = network(seed), network(seed + 10)
        with torch.no_grad():
            fresh[-1].weight.zero_()
            for layer in dead[:-1:2]:
                layer.bias.fill_(-100.0)
        lost.append(learned(copy.deepcopy(dead)))
        ReDo()(dead, batches=[x])
        revived.append(learned(dead))
        control.append(learned(fresh))
    assert sum(revived) < 3 * sum(control) and sum(revived) < sum(lost) / 3
