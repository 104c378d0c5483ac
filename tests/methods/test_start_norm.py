"""Equal norms of scale-invariant weights: the function stays, all arms have the same, and a first task is shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rekindle.lab import networks, streams
from rekindle.lab.arms import ARMS
from rekindle.lab.settings import SETTINGS, Run, Setting
from rekindle.lab.sources import Examples, Stream, Task, generator
from rekindle.lab.train import Learner, execute
from rekindle.methods.start_norm import StartNorm, scale_invariant

EPS = 1e-12  # the usual 1e-5 is the one thing that a smaller norm does change in the function
BLOBS = Setting("blobs", "blobs", "blob-net", batch=20, norm=0.3, health=False)


class Net(nn.Module):
    """A convolution and a linear layer with BatchNorm behind them, one with GroupNorm, and two that are not free."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv, self.conv_norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, eps=EPS)
        self.second, self.second_norm = nn.Conv2d(4, 4, 1, bias=False), nn.GroupNorm(2, 4, eps=EPS)
        self.hidden, self.hidden_norm = nn.Linear(64, 8), nn.BatchNorm1d(8, eps=EPS)
        self.plain, self.head = nn.Linear(8, 8), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv_norm(self.conv(x)))
        x = torch.relu(self.second_norm(self.second(x)))
        x = torch.relu(self.hidden_norm(self.hidden(x.flatten(1))))
        out: Tensor = self.head(torch.relu(self.plain(x)))
        return out


@pytest.fixture(autouse=True)
def own_names() -> Iterator[None]:
    @streams.register("blobs")
    def blobs(seed: int) -> Stream:
        x = torch.randn(60, 1, 6, 6, generator=generator(seed, "blobs"))
        data = Examples(x, torch.arange(60) % 3)
        return Stream("blobs", 3, (1, 6, 6), 3, lambda index: Task(f"task {index}", data, data, epochs=2))

    @networks.register("blob-net")
    def net(shape: tuple[int, ...], classes: int) -> nn.Module:
        return Net(classes)

    yield
    del streams.STREAMS["blobs"]


def worn() -> Net:
    """Weights, biases and statistics that no start has."""
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 3 * torch.rand(())).add_(0.1 * torch.randn_like(parameter))
        for norm in (model.conv_norm, model.hidden_norm):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
    return model


FREE = {"conv": "conv_norm", "second": "second_norm", "hidden": "hidden_norm"}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("factor", [3.0, 0.3])
def test_the_norm_is_that_of_the_start_and_the_function_stays(training: bool, factor: float) -> None:
    method, model, x = StartNorm(factor), worn(), torch.randn(20, 1, 6, 6)
    start = Net()
    method.remember(start)
    assert scale_invariant(model) == FREE
    model.train(training)
    with torch.no_grad():
        before, others = model(x), {n: p.clone() for n, p in model.named_parameters()}
        receipt = method(model)
        after = model(x)
    assert receipt.changed == tuple(f"{name}.weight" for name in FREE)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight") in FREE:
            assert parameter.norm().item() == pytest.approx(factor * start.get_parameter(name).norm().item())
            torch.testing.assert_close(parameter / parameter.norm(), others[name] / others[name].norm())
        else:
            assert torch.equal(parameter, others[name])


@pytest.mark.parametrize("training", [True, False])
def test_each_channel_by_itself_where_its_norm_is_free(training: bool) -> None:
    method, model, start, x = StartNorm(0.5, per="channel"), worn(), Net(), torch.randn(20, 1, 6, 6)
    method.remember(start)
    with torch.no_grad():
        model.hidden.weight[3] = 0.0  # a channel without a direction stays
        before = model.train(training)(x)
        method(model)
        after = model.train(training)(x)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    for name in ("conv", "hidden"):
        own, first = (net.get_parameter(f"{name}.weight").detach().flatten(1).norm(dim=1) for net in (model, start))
        expected = 0.5 * first
        if name == "hidden":
            expected[3] = 0.0
        torch.testing.assert_close(own, expected)
    grouped = model.second.weight.norm().item()  # GroupNorm takes out the norm of a group, not of a channel
    assert grouped == pytest.approx(0.5 * start.second.weight.norm().item())
    with pytest.raises(ValueError, match="neither"):
        StartNorm(per="neuron")  # type: ignore[arg-type]


class OwnNorm(nn.Module):
    """A normalization of somebody's own, with statistics and without an ε."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.running_mean) / self.running_var.sqrt()


@pytest.mark.parametrize("per", ["weight", "channel"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("layer", "behind", "shape"),
    [
        (lambda bias: nn.Linear(6, 4, bias=bias), nn.InstanceNorm1d(3, eps=EPS), (16, 3, 6)),
        (lambda bias: nn.Linear(6, 4, bias=bias), nn.BatchNorm1d(3, eps=EPS), (16, 3, 6)),
        (
            lambda bias: nn.Conv2d(1, 4, 3, bias=bias),
            nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, eps=EPS)),
            (9, 1, 6, 6),
        ),
        (lambda bias: nn.Linear(6, 4, bias=bias), OwnNorm(4), (16, 6)),
        (lambda bias: nn.Linear(6, 4, bias=bias), nn.BatchNorm1d(4, eps=EPS), (16, 6)),
    ],
)
def test_a_normalization_of_another_axis_is_not_one_of_channels(
    per: Any, bias: bool, layer: Any, behind: nn.Module, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer(bias), *(behind if isinstance(behind, nn.Sequential) else [behind]), nn.ReLU())
    x = torch.randn(shape)
    with torch.no_grad():
        before = model(x)
        if scale_invariant(model):
            StartNorm(0.3, per=per)(model)
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


def test_without_a_stored_start_the_scheme_of_the_layer_says_its_norm() -> None:
    model = worn()
    StartNorm(1.0)(model, generator=torch.Generator().manual_seed(3))
    draws = [nn.Linear(64, 8).weight.norm().item() for _ in range(20)]
    assert min(draws) * 0.9 < model.hidden.weight.norm().item() < max(draws) * 1.1


def test_a_receipt_says_where_epsilon_counts() -> None:
    for eps, said in ((1e-12, False), (1e-1, True)):
        model = worn()
        model.conv_norm.eps = eps
        notes = [note for note in StartNorm(0.1)(model).notes if "ε" in note]
        assert len(notes) == said and all("conv_norm" in note for note in notes)


def test_weights_that_are_shared_frozen_or_computed_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)
            self.second = nn.Linear(6, 6, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.norm(self.first(x)))
            return out

    assert scale_invariant(Tied()) == {}
    layer = nn.Linear(6, 6)
    twice = nn.ModuleList([nn.Sequential(layer, nn.BatchNorm1d(6)), nn.Sequential(layer, nn.ReLU())])
    assert scale_invariant(twice) == {}
    frozen = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    assert scale_invariant(frozen) == {"0": "1"}
    assert scale_invariant(frozen.requires_grad_(False)) == {}
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    assert scale_invariant(nn.Sequential(computed, nn.BatchNorm1d(6))) == {}


def test_a_zero_weight_stays_and_a_network_without_a_free_norm_is_refused() -> None:
    model = worn()
    model.second.weight.data.zero_()
    method = StartNorm(1.0)
    method.remember(Net())
    assert "second.weight" not in method(model).changed
    with pytest.raises(ValueError, match="no weight here is followed by a normalization"):
        StartNorm(1.0)(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="factor=0"):
        StartNorm(0)


def norms_after_boundaries(setting: Setting, arm: str) -> list[list[float]]:
    learner = Learner(Run(setting, ARMS[arm], 0), stream := setting.make_stream(0))
    found = []
    with learner:
        for index in (0, 1, 2):
            if index:
                learner.boundary(index, stream[index])
                found.append([learner.model.get_parameter(f"{name}.weight").norm().item() for name in FREE])
            list(learner.learn(index, stream[index]))
            learner.evaluated(stream[index])
    return found


def test_every_arm_has_the_same_norms_at_every_boundary() -> None:
    net = BLOBS.make_network(BLOBS.make_stream(0), 0)
    wanted = [0.3 * net.get_parameter(f"{name}.weight").norm().item() for name in FREE]
    for arm in ("nothing", "fire", "full-reset", "random-isometry", "dash", "shrink", "shrink-perturb", "l2-init"):
        for norms in norms_after_boundaries(BLOBS, arm):
            assert norms == pytest.approx(wanted, rel=1e-5), arm
    free = norms_after_boundaries(replace(BLOBS, norm=None), "nothing")
    assert all(min(a / b for a, b in zip(norms, wanted, strict=True)) > 2 for norms in free)


def test_as_an_arm_it_restores_the_effective_learning_rate_of_the_start_alone_or_after_fire() -> None:
    setting = replace(BLOBS, norm=None)
    net = setting.make_network(setting.make_stream(0), 0)
    wanted = [net.get_parameter(f"{name}.weight").norm().item() for name in FREE]
    for arm in ("effective-lr", "fire-effective-lr"):
        for norms in norms_after_boundaries(setting, arm):
            assert norms == pytest.approx(wanted, rel=1e-5), arm


def test_a_setting_without_such_weights_ends_with_the_reason() -> None:
    setting = replace(BLOBS, network="mlp")
    assert (
        "no weight here is followed by a normalization"
        in list(execute(Run(setting, ARMS["nothing"], 0)))[-1]["refused"]
    )


def test_settings_that_differ_at_boundaries_share_the_first_task(tmp_path: Path) -> None:
    plain = replace(BLOBS, norm=None)
    runs = [Run(plain, ARMS["fire"], 0), Run(replace(BLOBS, name="other"), ARMS["nothing"], 0)]
    assert runs[0].first_task_key == runs[1].first_task_key and runs[0].identity != runs[1].identity
    for run in runs:
        list(execute(run, starts=tmp_path))
    assert len(list(tmp_path.glob("*.pt"))) == 1
    alone = [row for row in execute(runs[1]) if row["kind"] == "task"]
    shared = [row for row in execute(runs[1], starts=tmp_path) if row["kind"] == "task"]
    assert [row["train_loss"] for row in alone] == [row["train_loss"] for row in shared]
    for other in (replace(plain, lr=0.1), replace(plain, batch=10)):
        assert Run(other, ARMS["fire"], 0).first_task_key != runs[0].first_task_key


def test_every_convolution_of_warm_start_is_free() -> None:
    setting = SETTINGS["warm-start"]
    net = networks.network(setting.network, shape=(3, 16, 16), classes=10, seed=0, **setting.network_options)
    convolutions = [name for name, module in net.named_modules() if isinstance(module, nn.Conv2d)]
    assert sorted(scale_invariant(net)) == sorted(convolutions)
