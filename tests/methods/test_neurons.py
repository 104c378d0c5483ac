"""Replacing neurons: exactly these rows, columns, norms and optimizer slots, and nothing else."""

import pytest
import torch
from torch import nn

from rekindle.methods import ReDo
from rekindle.methods.replacement import Replacement
from rekindle.recording.wiring import wire


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.fc, self.head = nn.Linear(4 * 4, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(torch.relu(self.fc(torch.relu(self.norm(self.conv(x))).flatten(1))))


def trained(optimizer_class=torch.optim.Adam, **options):
    torch.manual_seed(0)
    model = Net().double()
    optimizer = optimizer_class(model.parameters(), lr=0.01, **options)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 2, 4, 4).double()).square().mean().backward()
        optimizer.step()
    return model, optimizer


def replace(model, optimizer, second_moment="mean", **neurons):
    chosen = {name: torch.tensor(index) for name, index in neurons.items()}
    plan = Replacement(model, wire(model, [torch.zeros(2, 2, 4, 4).double()]), chosen)
    return plan.apply("test", optimizer, lambda: torch.Generator().manual_seed(0), second_moment=second_moment)


def test_rows_columns_bias_and_norm_change_and_the_rest_does_not():
    model, optimizer = trained()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    receipt = replace(model, optimizer, conv=[1], fc=[0, 3])
    after = model.state_dict()
    changed = {name: (after[name] != before[name]) for name in before}
    assert changed["conv.weight"].flatten(1).all(1).tolist() == [False, True, False, False]
    assert not changed["conv.weight"][[0, 2, 3]].any()
    assert after["conv.bias"][1] == 0
    assert (after["norm.weight"][1], after["norm.bias"][1]) == (1, 0)
    assert (after["norm.running_mean"][1], after["norm.running_var"][1]) == (0, 1)
    for name in ("norm.weight", "norm.running_mean", "conv.bias"):
        assert not changed[name][[0, 2, 3]].any()
    # conv neuron 1 owns columns 4 to 7 of fc after the flatten: zero for real, but for the rows drawn again
    assert after["fc.weight"][[1, 2, 4], 4:8].abs().max() == 0
    assert after["fc.weight"][[0, 3], 4:8].abs().min() > 0
    kept = [c for c in range(16) if c not in range(4, 8)]
    assert not changed["fc.weight"][[1, 2, 4]][:, kept].any()
    assert changed["fc.weight"][[0, 3]][:, kept].all()
    assert after["head.weight"][:, [0, 3]].abs().max() == 0
    assert not changed["head.weight"][:, [1, 2, 4]].any()
    assert not changed["head.bias"].any()
    assert receipt.totals()["counts"] == {"neurons": 3, "rows": 3, "columns": 6}


def test_fresh_rows_follow_the_layers_own_scheme():
    model = nn.Sequential(nn.Linear(100, 400), nn.ReLU(), nn.Linear(400, 1))
    with torch.no_grad():
        model[0].weight.fill_(5.0)
    Replacement(model, wire(model, [torch.zeros(2, 100)]), {"0": torch.arange(300)}).apply(
        "test", None, lambda: torch.Generator().manual_seed(1)
    )
    bound = 100**-0.5
    assert model[0].weight[:300].abs().max() <= bound
    assert model[0].weight[:300].std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert (model[0].weight[300:] == 5).all()


@pytest.mark.parametrize("second_moment", ["mean", "zero"])
def test_optimizer_rows_and_columns_are_reset_and_no_others(second_moment):
    # Released code resets a copy: buf[idx].zero_() on an indexed tensor changes nothing.
    model, adam = trained()
    before = {p: {k: v.clone() for k, v in adam.state[p].items()} for p in model.parameters()}
    receipt = replace(model, adam, second_moment, fc=[0, 3])
    fc, head = adam.state[model.fc.weight], adam.state[model.head.weight]
    others = [1, 2, 4]
    assert fc["exp_avg"][[0, 3]].abs().max() == 0
    assert head["exp_avg"][:, [0, 3]].abs().max() == 0
    assert torch.equal(fc["exp_avg"][others], before[model.fc.weight]["exp_avg"][others])
    assert torch.equal(head["exp_avg"][:, others], before[model.head.weight]["exp_avg"][:, others])
    old = before[model.fc.weight]["exp_avg_sq"]
    expected = old[others].mean(0) if second_moment == "mean" else torch.zeros(16).double()
    torch.testing.assert_close(fc["exp_avg_sq"][0], expected)
    torch.testing.assert_close(adam.state[model.fc.bias]["exp_avg"][[0, 3]], torch.zeros(2).double())
    for untouched in (model.conv.weight, model.norm.weight, model.head.bias):
        for key, value in before[untouched].items():
            assert torch.equal(adam.state[untouched][key], value)
    assert float(fc["step"]) == 4  # one number a parameter: rows cannot have their own
    assert receipt.optimizer.parameters == 3


def test_with_the_mean_the_next_steps_of_a_new_row_are_not_too_large():
    # The step count is old, so a zero second moment is not bias-corrected: the row would run ahead of the others.
    ahead = {}
    for second_moment in ("mean", "zero"):
        model, adam = trained()

        def steps(count, model=model, adam=adam):
            for _ in range(count):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                adam.step()

        steps(500)
        replace(model, adam, second_moment, fc=[0])
        before = model.fc.weight.detach().clone()
        steps(10)
        moved = (model.fc.weight.detach() - before).abs().mean(1)
        ahead[second_moment] = float(moved[0] / moved[1])
    assert ahead["mean"] < 1.01
    assert ahead["zero"] > 2


def test_momentum_sgd_rows_are_reset_too():
    model, sgd = trained(torch.optim.SGD, momentum=0.9)
    replace(model, sgd, fc=[2])
    assert sgd.state[model.fc.weight]["momentum_buffer"][2].abs().max() == 0
    assert sgd.state[model.fc.weight]["momentum_buffer"][1].abs().max() > 0
    assert sgd.state[model.head.weight]["momentum_buffer"][:, 2].abs().max() == 0


def test_state_is_found_by_parameter_whatever_the_optimizers_order():
    # Ports that count parameters reset the rows of some other layer when groups are ordered differently.
    model, _ = trained()
    late = [model.head.bias, model.fc.weight, model.head.weight]
    early = [p for p in model.parameters() if all(p is not q for q in late)]
    adam = torch.optim.Adam([{"params": late, "lr": 0.1}, {"params": early[::-1]}])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    replace(model, adam, fc=[4])
    for parameter, rows in ((model.fc.weight, [4]), (model.fc.bias, [4])):
        zero = adam.state[parameter]["exp_avg"].flatten(1 if parameter.ndim > 1 else 0) == 0
        assert (zero.all(1) if parameter.ndim > 1 else zero).nonzero().flatten().tolist() == rows
    assert (adam.state[model.head.weight]["exp_avg"] == 0).all(0).nonzero().flatten().tolist() == [4]
    for parameter in (model.conv.weight, model.conv.bias, model.norm.weight, model.head.bias):
        assert (adam.state[parameter]["exp_avg"] != 0).all()


def test_gradients_of_replaced_rows_are_cleared():
    model, adam = trained()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    receipt = replace(model, adam, fc=[2])
    assert model.fc.weight.grad[2].abs().max() == 0
    assert model.fc.weight.grad[1].abs().max() > 0
    assert model.head.weight.grad[:, 2].abs().max() == 0
    assert receipt.gradients_cleared == 3


def test_advanced_indexing_makes_a_copy_which_is_why_this_file_exists():
    w = torch.ones(2, 3)
    mask = torch.tensor([True, False, True])
    w[:, mask].data.fill_(0)
    assert w.sum() == 6


def test_frozen_layers_are_left_alone_with_the_reason():
    model = Net()
    model.head.weight.requires_grad_(False)
    wiring = ReDo().wiring(model, [torch.zeros(2, 2, 4, 4)])
    assert [group.name for group in wiring] == ["conv"]
    assert "frozen" in wiring.refused["fc"]
