"""DASH against a plain loop over batches, kernels and rows."""

import pytest
import torch
from torch import nn

from rekindle.methods import DASH


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(2, 3, 3), nn.Linear(3 * 4, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.fc(torch.tanh(self.conv(x)).flatten(1))))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def setting():
    torch.manual_seed(0)
    batches = [(torch.randn(6, 2, 4, 4).double(), torch.randint(0, 2, (6,))) for _ in range(3)]
    return Net().double(), batches


def test_matches_the_algorithm_step_by_step():
    model, batches = setting()
    alpha, lam = 0.3, 0.2
    average = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in batches:
        model.zero_grad()
        loss(model, batch).backward()
        for name, parameter in model.named_parameters():
            average[name] = (1 - alpha) * average[name] + alpha * -parameter.grad
    model.zero_grad()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for o in range(3):
        for i in range(2):
            w, g = model.conv.weight[o, i].detach().flatten(), average["conv.weight"][o, i].flatten()
            expected["conv.weight"][o, i] *= max(float(w @ g / (w.norm() * g.norm())), lam)
    for layer in ("fc", "head"):
        for row, (w, g) in enumerate(
            zip(getattr(model, layer).weight.detach(), average[f"{layer}.weight"], strict=True)
        ):
            expected[f"{layer}.weight"][row] *= max(float(w @ g / (w.norm() * g.norm())), lam)
    for layer in ("conv", "fc", "head"):  # a bias is one unit
        b, g = getattr(model, layer).bias.detach(), average[f"{layer}.bias"]
        expected[f"{layer}.bias"] *= max(float(b @ g / (b.norm() * g.norm())), lam)
    receipt = DASH(alpha, lam)(model, batches=batches, loss=loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-10, atol=1e-14)
    assert receipt.totals()["counts"]["units"] == 6 + 5 + 2 + 3


def test_the_bias_shrinks_with_its_rows_so_that_no_neuron_dies_of_it():
    """Rows at the floor under a bias as large as before: every ReLU below it would be off for good."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    nn.init.constant_(model[0].bias, -0.3)
    x, y = torch.randn(256, 8), torch.randint(0, 4, (256,))

    def alive():
        return int((model[1](model[0](x)) > 0).any(0).sum())

    assert alive() == 32
    DASH(lam=0.05)(model, batches=[(x, y)], loss=loss)
    assert alive() > 24
    nn.init.constant_(model[0].bias, -0.3)
    assert alive() < 8, "which is what the biases of before would have done"
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    nn.init.ones_(attention.self_attn.in_proj_bias)
    DASH(lam=0.05)(attention, batches=[torch.randn(4, 3, 8)], loss=lambda m, b: m(b)[..., 0].mean())
    assert attention.self_attn.in_proj_bias.abs().max() < 1, "a bias by another name"
    frozen = nn.Linear(4, 2)
    frozen.bias.requires_grad_(False)
    kept = frozen.bias.clone()
    DASH(targets="weight")(frozen, batches=[torch.randn(8, 4)], loss=lambda m, b: m(b).square().mean())
    assert torch.equal(frozen.bias, kept)


def test_what_points_along_the_negative_gradient_is_kept():
    # L = −w·c: the negative gradient is c, so the row along c keeps its length and the one against it shrinks to λ.
    model = nn.Linear(3, 2, bias=False).double()
    c = torch.tensor([1.0, 2.0, -1.0]).double()
    model.weight.data = torch.stack([2 * c, -c])
    DASH(0.3, 0.05, targets="weight")(model, batches=[c], loss=lambda m, x: -m(x).sum())
    torch.testing.assert_close(model.weight.detach(), torch.stack([2 * c, -0.05 * c]))


def test_leaves_modes_gradients_and_statistics_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    model.train()
    x = torch.randn(8, 3)
    model(x).sum().backward()
    kept = model[1].bias.grad.clone()
    mean = model[1].running_mean.clone()
    DASH()(model, batches=[x], loss=lambda m, b: m(b).square().mean())
    assert model.training
    assert torch.equal(model[1].bias.grad, kept)
    assert torch.equal(model[1].running_mean, mean)
    assert model[0].weight.grad is None  # it belonged to weights that are gone


def test_needs_data_and_says_so():
    with pytest.raises(ValueError, match="batches= and loss="):
        DASH()(Net())
    with pytest.raises(ValueError, match="no batch"):
        DASH()(Net(), batches=[], loss=loss)
    with pytest.raises(ValueError, match="alpha=0"):
        DASH(alpha=0)
