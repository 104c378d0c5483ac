"""ReGraMa: scores are gradient magnitudes of rows over their layer's mean."""

import pytest
import torch
from torch import nn

import zoo_models
from rekindle.methods import ReDo, ReGraMa


def loss(model, x):
    return model(x).square().mean()


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 2)
    ).double()


def image(seed=0):
    return torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scores_match_the_definition():
    model = net()
    method = ReGraMa(sample=1)
    with method.observe(model):
        for seed in range(2):
            model.zero_grad()
            loss(model, image(seed)).backward()
    expected = {}
    for name, layer in (("0", model[0]), ("3", model[3])):
        total = torch.zeros(layer.weight.shape[0]).double()
        for seed in range(2):
            model.zero_grad()
            loss(model, image(seed)).backward()
            for row in range(len(total)):
                total[row] += layer.weight.grad[row].abs().mean()
        expected[name] = total / total.mean()
    for name, score in method.scores(model).items():
        torch.testing.assert_close(score, expected[name])


def test_a_saturated_unit_has_no_gradient_though_it_is_active():
    model = net()
    model[3].bias.data.fill_(2.0)
    model[0].bias.data[2] = 50.0  # tanh at 1 for every input: active, and unable to learn
    x = image()
    assert ReDo(tau=0.1)(net_copy(model), batches=[x]).totals()["counts"].get("rows", 0) == 0
    receipt = ReGraMa(tau=0.01)(model, batches=[x], loss=loss)
    assert {r.name: r.counts["rows"] for r in receipt.records if "rows" in r.counts} == {"0.weight": 1}
    assert model[0].bias[2] == 0
    assert model[3].weight[:, 8:12].abs().max() == 0


def net_copy(model):
    twin = net()
    twin.load_state_dict(model.state_dict())
    return twin


def test_batches_and_observation_agree_and_gradients_are_left_alone():
    model = net()
    one, two = ReGraMa(), ReGraMa()
    with one.observe(model):
        loss(model, image()).backward()
    kept = model[3].weight.grad.clone()
    two.wiring(model, [image()])
    two.look(model, [image()], loss)
    for name, score in one.scores(model).items():
        torch.testing.assert_close(two.scores(model)[name], score)
    assert torch.equal(model[3].weight.grad, kept)


def test_a_gated_neuron_is_inactive_only_if_both_its_rows_are():
    model = zoo_models.build("llama")
    batch = zoo_models.batch("llama")
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.up_proj.weight[3] = 0  # the gate's row gets no gradient, the up's row does
    method = ReGraMa(tau=1e-6)
    method.wiring(model, [batch])
    method.look(model, [batch], zoo_models.loss)
    assert method.scores(model)["model.layers.0.mlp.gate_proj"][3] > 0.01
    with torch.no_grad():
        mlp.down_proj.weight[:, 3] = 0  # now neither does
    receipt = method(model, batches=[batch], loss=zoo_models.loss)
    counts = {r.name: r.counts for r in receipt.records}
    assert counts["model.layers.0.mlp.up_proj.weight"]["rows"] == 1
    assert counts["model.layers.0.mlp.gate_proj.weight"]["rows"] == 1


def test_missing_inputs_are_named():
    with pytest.raises(ValueError, match="loss="):
        ReGraMa()(net(), batches=[image()])
    with pytest.raises(ValueError, match=r"observe\(model\)"):
        ReGraMa()(net())
