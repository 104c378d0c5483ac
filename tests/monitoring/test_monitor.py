"""The monitor: when it samples, what it finds there, and that training does not notice."""

import json
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rekindle.diagnosis.examination import health
from rekindle.monitoring.monitor import Monitor


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(16, 6, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def hooks(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    count = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
    return count + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def test_training_is_the_same_with_and_without_it() -> None:
    plain, optimizer = build()
    torch.manual_seed(7)
    alone = [float(step(plain, optimizer, seed)) for seed in range(12)]
    watched, optimizer2 = build()
    torch.manual_seed(7)
    with Monitor(watched, optimizer2, every=3) as monitor:
        together = [float(step(watched, optimizer2, seed)) for seed in range(12)]
    assert alone == together
    assert [sample.step for sample in monitor.history] == [3, 6, 9, 12]
    for a, b in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert hooks(watched, optimizer2) == 0


def test_what_a_sample_holds_is_what_the_step_did() -> None:
    net, optimizer = build()
    before = [p.detach().clone() for p in net.parameters()]
    with Monitor(net, optimizer, every=1) as monitor:
        step(net, optimizer)
    assert monitor.last is not None
    flat = monitor.last.flat()
    moved = sum(float((p.detach() - b).square().sum()) for p, b in zip(net.parameters(), before, strict=True))
    size = sum(float(b.square().sum()) for b in before)
    assert flat["effective_learning_rate"] == pytest.approx((moved / size) ** 0.5, rel=1e-4)
    weight = net.get_parameter("0.weight")
    assert flat["steps/0.weight"] == pytest.approx(
        float((weight.detach() - before[0]).norm() / before[0].norm()), rel=1e-4
    )
    assert flat["gradients/0.weight"] == pytest.approx(float(weight.grad.norm()), rel=1e-5)
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    expected = health(net, [x], mode="cheap")
    for name, value in expected.units["0"].items():
        assert flat[f"units/0/{name}"] == pytest.approx(value)
    assert flat["weights/0.weight/dfi"] == pytest.approx(expected.weights["0.weight"]["dfi"])


def test_own_batches_and_a_loss() -> None:
    net, optimizer = build()
    batch = (torch.randn(9, 6), torch.randint(0, 3, (9,)))
    loss = lambda model, b: F.cross_entropy(model(b[0]), b[1])  # noqa: E731
    with Monitor(net, optimizer, every=2, batches=[batch], loss=loss) as monitor:
        for seed in range(2):
            step(net, optimizer, seed)
    assert monitor.last is not None
    found = monitor.last.health
    assert found.units["0"]["rows"] == 9
    assert "gradient_dormant" in found.units["0"]
    assert "loss" in found.whole


def test_no_forward_seen_means_unmeasured_not_zero() -> None:
    net, optimizer = build()
    with Monitor(net, optimizer, every=1) as monitor:
        optimizer.step()
    assert monitor.last is not None
    assert "dormant" not in monitor.last.flat()
    assert any("no forward pass" in each.reason for each in monitor.last.health.unmeasured)


def test_keyword_inputs_and_padding() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 4)

        def forward(self, x: Tensor, attention_mask: Tensor, scale: float = 1.0) -> Tensor:
            return torch.relu(self.fc(x)) * scale

    net = Model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    with Monitor(net, optimizer, every=1) as monitor:
        net(torch.randn(2, 3, 2), attention_mask=mask, scale=2.0).sum().backward()
        optimizer.step()
    assert monitor.last is not None
    assert monitor.last.health.units["fc"]["rows"] == 3


def test_weights_can_be_looked_at_less_often() -> None:
    net, optimizer = build()
    with Monitor(net, optimizer, every=1, weights_every=2) as monitor:
        for seed in range(4):
            step(net, optimizer, seed)
    slow = ("weights/0.weight/norm", "units/0/feature_rank", "units/0/rank_limit", "feature_rank_worst", "weight_norm")
    flats = [sample.flat() for sample in monitor.history]
    for name in slow:  # stand as they were
        values = [flat[name] for flat in flats]
        assert values[0] == values[1] and values[2] == values[3]
    assert flats[0]["weight_norm"] != flats[2]["weight_norm"]
    assert len({flat["units/0/usage"] for flat in flats}) > 2
    assert flats[2].keys() == flats[3].keys()
    about = [sample.health.about for sample in monitor.history]
    assert about[0] == about[1]


def test_a_weight_that_broke_stays_broken_until_it_is_measured_again() -> None:
    net, optimizer = build()
    with torch.no_grad():
        net[4].weight[0, 0] = torch.nan
    with Monitor(net, optimizer, every=1, weights_every=2) as monitor:
        for seed in range(2):
            step(net, optimizer, seed)
    assert all("4.weight" in sample.health.broken for sample in monitor.history)


def test_hooks_are_there_only_around_the_step_that_is_sampled() -> None:
    net, optimizer = build()
    counts = []
    with Monitor(net, optimizer, every=4):
        for seed in range(9):
            step(net, optimizer, seed)
            counts.append(hooks(net, optimizer))
    assert counts == [1, 1, 3, 1, 1, 1, 3, 1, 1]


def test_sinks_get_every_sample() -> None:
    net, optimizer = build()
    rows: list[tuple[int, dict[str, float]]] = []
    with Monitor(net, optimizer, every=2, sinks=[lambda at, row: rows.append((at, row))], prefix="h/"):
        for seed in range(4):
            step(net, optimizer, seed)
    assert [at for at, _ in rows] == [2, 4]
    assert all(key.startswith("h/") for _, row in rows for key in row)
    assert "h/dormant" in rows[0][1]


def test_reference_can_be_set_at_a_boundary() -> None:
    net, optimizer = build()
    with Monitor(net, optimizer, every=1) as monitor:
        step(net, optimizer)
        assert not monitor.last.health.verdict.sure
        monitor.set_reference(monitor.last.health)
        with torch.no_grad():
            net[0].bias.fill_(-1e3)
        step(net, optimizer)
    verdict = monitor.last.health.verdict
    assert verdict.sure
    assert verdict == "act"
    assert {"dormancy", "feature rank"} <= {finding.sign for finding in verdict.findings}


def test_saved_and_resumed() -> None:
    net, optimizer = build()
    first = Monitor(net, optimizer, every=3)
    for seed in range(4):
        step(net, optimizer, seed)
    first.set_reference()
    state = json.loads(json.dumps(first.state_dict()))
    first.detach()
    second = Monitor(net, optimizer, every=3)
    second.load_state_dict(state)
    assert second.steps == 4
    assert [s.flat() for s in second.history] == [pytest.approx(s.flat()) for s in first.history]
    for seed in range(2):
        step(net, optimizer, seed)
    assert [s.step for s in second.history] == [3, 4, 6]
    assert second.last.health.verdict.sure
    second.detach()


def test_a_failing_sample_warns_and_training_goes_on() -> None:
    net, optimizer = build()

    def bad(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("no luck")

    monitor = Monitor(net, optimizer, every=2, batches=[torch.zeros(4, 6)], loss=bad)
    step(net, optimizer, 0)
    with pytest.warns(RuntimeWarning, match="no health sample at step 2: no luck"):
        step(net, optimizer, 1)
    step(net, optimizer, 2)
    assert (monitor.steps, len(monitor.history)) == (3, 0)
    assert net.training
    with pytest.raises(RuntimeError, match="no luck"):
        monitor.sample()
    monitor.detach()
    monitor.detach()
    assert hooks(net, optimizer) == 0


def test_it_comes_off_when_the_block_raises_and_can_come_back() -> None:
    net, optimizer = build()
    with pytest.raises(KeyError), Monitor(net, optimizer, every=1) as monitor:
        raise KeyError
    assert hooks(net, optimizer) == 0
    step(net, optimizer)
    assert monitor.steps == 0
    monitor.attach()
    monitor.attach()
    step(net, optimizer)
    assert monitor.steps == 1
    monitor.detach()


def test_history_is_bounded_and_inputs_are_let_go() -> None:
    net, optimizer = build()
    with Monitor(net, optimizer, every=1, history=2) as monitor:
        for seed in range(5):
            step(net, optimizer, seed)
        assert not any(seen.last for seen in monitor._seen)
        assert monitor._before is None
    assert [s.step for s in monitor.history] == [4, 5]


def test_a_model_that_is_never_called_is_watched_by_its_parts() -> None:
    class Both(nn.Module):
        """As a LightningModule: the training step calls the parts."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
            self.decoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
            self.loss = nn.MSELoss()

    model = Both()
    optimizer = torch.optim.Adam(model.parameters())
    monitor = Monitor(model, optimizer, every=3)
    for _ in range(2):
        with monitor:  # attached a second time, it looks again who is called
            for _ in range(3):
                x = torch.randn(32, 4)
                optimizer.zero_grad()
                model.loss(model.decoder(model.encoder(x)), x).backward()
                optimizer.step()
        assert not any(seen.last for seen in monitor._seen)
    inside, hidden = monitor.last.health, model.encoder(x)
    assert inside.units.keys() == {"encoder.0", "decoder.0"} and inside.verdict != "unknown"
    alone = health(model.encoder, [(x,)]).units["0"], health(model.decoder, [(hidden,)]).units["0"]
    for name, there in zip(("encoder.0", "decoder.0"), alone, strict=True):
        assert inside.units[name]["units"] == there["units"]
        assert abs(inside.units[name]["usage"] - there["usage"]) < 0.05, name  # the step has moved the weights a little


def test_parts_in_lists_are_watched_a_look_before_training_changes_nothing_and_no_part_counts_twice() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 4))])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Listed()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(32, 4)
    with Monitor(model, optimizer, every=1) as monitor:
        with torch.no_grad():
            model(x)  # a summary of the model
        for whole in (False, True):
            out = model(x) if whole else model.layers[1](model.layers[0](x))
            out.square().mean().backward()
            optimizer.step()
    parts, all_of_it = (sample.health for sample in monitor.history)
    assert parts.verdict != "unknown" and list(parts.weights) == list(all_of_it.weights)
    assert all_of_it.units and all_of_it.to_dict()["units"].keys() == health(model, [x]).to_dict()["units"].keys()


def test_a_compiled_model() -> None:
    net, optimizer = build()
    compiled = torch.compile(net, backend="eager")
    with Monitor(compiled, optimizer, every=1) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(compiled, optimizer)
    assert "units/0/dormant" in monitor.last.flat()
    assert "gradients/0.weight" in monitor.last.flat()


def test_a_model_compiled_in_place_is_not_compiled_at_every_step() -> None:
    net, optimizer = build()
    net.compile(backend="eager")
    torch._dynamo.utils.counters.clear()
    with Monitor(net, optimizer, every=4) as monitor:
        for seed in range(8):
            step(net, optimizer, seed)
    assert [sample.step for sample in monitor.history] == [4, 8]
    assert "units/0/dormant" in monitor.last.flat()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_errors_speak_of_the_argument() -> None:
    net, optimizer = build()
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="none of this model's parameters"):
        Monitor(net, other)
    with pytest.raises(ValueError, match="positive"):
        Monitor(net, optimizer, every=0)
    with pytest.raises(ValueError, match="batches is not"):
        Monitor(net, optimizer, loss=lambda m, b: m(b).sum())
    assert hooks(net, optimizer) == 0


@pytest.mark.parametrize("way", ["net.compile", "torch.compile", "loss"])
def test_a_compiled_model_is_compiled_once(way: str) -> None:
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, every=4) as monitor:
        run: Any = model
        if way == "net.compile":
            model.compile(backend=counting)
        elif way == "torch.compile":
            run = torch.compile(model, backend=counting)
        else:
            run = torch.compile(lambda x: model(x).square(), backend=counting)
        for _ in range(9):
            optimizer.zero_grad()
            run(torch.ones(3, 4)).mean().backward()
            optimizer.step()
    assert len(graphs) == 1
    assert [sample.step for sample in monitor.history] == [4, 8]
    assert all("dormant" in sample.flat() for sample in monitor.history)
    torch._dynamo.reset()
