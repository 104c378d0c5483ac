"""A probe tells a network that cannot learn from one that can, and leaves no trace."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rekindle.advice import probing
from rekindle.advice.intervals import mean_interval
from rekindle.advice.probing import ProbeResult, probe


class TinyGPT(nn.Module):
    def __init__(self, tokens: int = 16, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.block(self.embedding(tokens), src_mask=mask, is_causal=True))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def cnn() -> nn.Module:
    body = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 4))


def gpt_batches() -> list[Tensor]:
    phrase = torch.arange(16).repeat(3)
    return [torch.stack([phrase[i : i + 12] for i in torch.randint(16, (16,))]) for _ in range(6)]


def lost(model: nn.Module) -> nn.Module:
    """Dead by hand: no unit of any hidden layer ever fires, so that no gradient passes."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
                module.bias.fill_(-100.0)
            if isinstance(module, nn.BatchNorm2d):
                module.weight.zero_(), module.bias.fill_(-100.0)
            if isinstance(module, TinyGPT):
                module.head.weight.mul_(1e-6)
                module.block.norm2.weight.zero_()
    return model


LABELED = {
    "mlp": (mlp, lambda: [(torch.randn(32, 8), torch.randint(4, (32,))) for _ in range(4)]),
    "cnn": (cnn, lambda: [(torch.randn(16, 1, 8, 8), torch.randint(4, (16,))) for _ in range(4)]),
}


@pytest.mark.parametrize("kind", ["mlp", "cnn", "gpt"])
def test_a_dead_network_scores_below_a_fresh_one(kind: str) -> None:
    build, data = LABELED.get(kind, (TinyGPT, gpt_batches))
    batches: list[Any] = data()
    task = "next-token" if kind == "gpt" else "next"
    results = []
    for model in (build(), lost(build())):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        results.append(probe(model, batches, task=task, optimizer=optimizer, steps=70, seeds=3))
    young, dead = results
    assert young.enough and dead.enough
    assert dead.interval[1] < young.score
    assert dead.interval[1] < 1 and dead.verdict == "lost" and young.verdict != "lost"


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that a probe must not touch, as it is now."""
    state: list[Any] = [t.clone() for t in model.state_dict().values()]
    state += [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
    state += [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    state += [torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()]
    return [*state, [m.training for m in model.modules()], [len(m._forward_hooks) for m in model.modules()]]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor | numpy.ndarray):
        return bool((torch.as_tensor(a) == torch.as_tensor(b)).all())
    return bool(a == b)


def trained(build: Callable[[], nn.Module], batches: list[Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches:
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    model[0].register_forward_hook(lambda *_: None)
    return model, optimizer


@pytest.mark.parametrize("task", ["next", "random-labels", "regression"])
def test_nothing_of_the_model_is_touched(task: Any) -> None:
    batches = LABELED["cnn"][1]()
    model, optimizer = trained(cnn, batches)
    places = [p.data_ptr() for p in model.parameters()]
    before = everything(model, optimizer)
    probe(model, batches, task=task, optimizer=optimizer, steps=5, seeds=2)
    after = everything(model, optimizer)
    assert all(same(a, b) for a, b in zip(before, after, strict=True))
    assert places == [p.data_ptr() for p in model.parameters()]


def test_an_interrupt_leaves_no_trace_either() -> None:
    batches = LABELED["cnn"][1]()
    model, optimizer = trained(cnn, batches)
    before, calls = everything(model, optimizer), []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) > 20:
            raise KeyboardInterrupt
        return functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(KeyboardInterrupt):
        probe(model, batches, loss=loss, optimizer=optimizer, steps=50)
    assert all(same(a, b) for a, b in zip(before, everything(model, optimizer), strict=True))


def test_the_same_seeds_give_the_same_numbers() -> None:
    build, data = LABELED["cnn"]
    model, batches = build(), data()
    first, second = (probe(model, batches, steps=8, seeds=[3, 5]) for _ in range(2))
    assert first.model == second.model and first.fresh == second.fresh


def test_a_copy_that_learns_is_plain_training() -> None:
    """The curve of the model is that of a plain loop over the same batches."""
    model, batches = mlp(), [(torch.randn(32, 8), torch.randint(4, (32,)))]
    found = probe(model, batches, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), steps=6, seeds=1)
    plain = copy.deepcopy(model)
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for _ in range(6):
        loss = functional.cross_entropy(plain(batches[0][0]), batches[0][1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert found.model[0] == pytest.approx(losses, rel=1e-6)


def test_too_short_says_so() -> None:
    model, batches = mlp(), LABELED["mlp"][1]()
    found = probe(model, batches, optimizer=torch.optim.SGD(model.parameters(), lr=1e-6), steps=5, seeds=2)
    assert not found.enough and found.verdict == "unknown"
    assert str(found).startswith("too short to say")


def test_seconds_are_kept_within_a_fifth(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on with every loss, so that no busy machine matters."""
    model, batches, clock = mlp(), LABELED["mlp"][1](), Clock()
    monkeypatch.setattr(probing, "perf_counter", clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    found = probe(model, batches, loss=clock.loss, optimizer=optimizer, budget=20.0, seeds=2)
    assert not found.enough and 16 < clock() < 24


class Clock:
    """Each loss takes a tenth of a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.now += 0.1
        return functional.cross_entropy(model(batch[0]), batch[1])


def test_speed_is_the_ratio_of_steps_to_half_of_what_is_learned() -> None:
    slow = [[2.0 - 0.01 * step for step in range(100)], [2.0 - 0.02 * step for step in range(100)]]
    found = probing._result("next", {"model": [slow[0]] * 2, "fresh": [slow[1]] * 2}, 100, [2.0, 2.0], 0.2, 1.0)
    assert found.speed == pytest.approx(0.5, abs=0.03) and found.speed_interval[0] == pytest.approx(found.speed)
    turned = probing._result("next", {"model": [slow[1]] * 2, "fresh": [slow[0]] * 2}, 100, [2.0, 2.0], 0.2, 1.0)
    assert turned.speed == pytest.approx(2.0, abs=0.2) and "steps of a fresh network" in str(turned)
    never = probing._result("next", {"model": [[2.0] * 100] * 2, "fresh": [slow[0]] * 2}, 100, [2.0, 2.0], 0.2, 1.0)
    assert never.speed == pytest.approx(0.5, abs=0.05)  # as if with its last step


def test_a_model_that_cannot_be_copied_can_be_probed() -> None:
    """Only tensors are copied, never the module."""
    model, batches = mlp(), LABELED["mlp"][1]()
    model.lock = threading.Lock()  # type: ignore[assignment]
    assert probe(model, batches, steps=2, seeds=1).steps == 2


def test_frozen_parameters_stay_and_are_shared() -> None:
    model, batches = mlp(), LABELED["mlp"][1]()
    model[0].requires_grad_(False)
    found = probe(model, batches, steps=5, seeds=1)
    assert len(found.model[0]) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"task": "juggling"}, "juggling"),
        ({"seeds": []}, "at least one seed"),
        ({"steps": 0}, "at least one step"),
        ({"task": "regression", "loss": lambda m, b: m(b[0]).sum()}, "a loss of its own"),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        probe(mlp(), LABELED["mlp"][1](), **{"steps": 2, **arguments})


def test_batches_without_targets_need_a_loss() -> None:
    with pytest.raises(ValueError, match="pass loss="):
        probe(mlp(), [torch.randn(4, 8)], steps=2)


def test_a_model_without_a_scheme_asks_for_a_factory() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 4) / 3)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    batches = LABELED["mlp"][1]()
    with pytest.raises(ValueError, match="fresh="):
        probe(Own(), batches, steps=2)
    assert isinstance(probe(Own(), batches, fresh=Own, steps=2, seeds=1), ProbeResult)


def test_the_interval_is_students() -> None:
    scipy = pytest.importorskip("scipy.stats", reason="the laboratory is not installed")
    for count in (2, 3, 5, 10, 31):
        values = torch.randn(count, generator=torch.Generator().manual_seed(count)).tolist()
        mean, (low, high) = mean_interval(values)
        half = scipy.t.ppf(0.975, count - 1) * numpy.std(values, ddof=1) / count**0.5
        assert (low, high) == pytest.approx((mean - half, mean + half), rel=1e-3)
