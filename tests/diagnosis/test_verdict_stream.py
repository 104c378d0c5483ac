"""The verdict on networks that lose plasticity: on states made by hand, and on streams that take it away.

The streams are those of `benchmarks/verdict.py`, shorter. Training is chaotic, and another CPU rounds otherwise: what
is asserted of it is true of most of several seeds, with room. Full runs are in `docs/evidence/verdict.md`.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SEEDS = (0, 1, 2)


def _load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmark_verdict", BENCHMARKS / "verdict.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _load(monkeypatch)


@torch.no_grad()
def worn(model: nn.Sequential, share: float) -> None:
    """Make this share of every hidden layer's neurons dead, and the others similar to each other by as much."""
    for layer in [each for each in model if isinstance(each, nn.Linear)][:-1]:
        dead = round(share * layer.out_features)
        layer.bias[:dead] = -100.0
        layer.weight[dead:].lerp_(layer.weight[dead : dead + 1].expand_as(layer.weight[dead:]).clone(), share)


def test_a_network_that_wears_out_by_hand_is_seen_before_half_of_it_is_dead(bench: ModuleType) -> None:
    x = torch.randn(256, 64)
    fresh = bench.health(bench.mlp(64, 64, 0), [(x,)])
    said = []
    for tenths in range(10):
        model = bench.mlp(64, 64, 0)
        worn(model, tenths / 10)
        said.append(bench.health(model, [(x,)], reference=fresh).verdict)
    assert said[0] == "healthy"
    first = [str(each) for each in said].index("act")
    assert 1 < first < 5
    assert all(each == "act" for each in said[first:])  # once lost, it stays lost
    assert said[first].sure
    assert len({finding.sign for finding in said[first].findings if finding.level == "act"}) >= 2


@pytest.mark.trains
def test_digits_with_random_labels(bench: ModuleType) -> None:
    pytest.importorskip("sklearn")
    x, _ = bench.digits(300)

    def runs(l2_init: float) -> list:  # type: ignore[type-arg]
        options = {"epochs": 30, "batch": 16, "lr": 4e-3, "l2_init": l2_init}
        return [
            list(bench.learn(bench.mlp(64, 64, seed), bench.random_labels(x, 11, seed), seed=seed, **options))
            for seed in SEEDS
        ]

    def kept(tasks: list) -> float:  # type: ignore[type-arg]
        return sum(task.accuracy for task in tasks[-3:]) / 3 / tasks[0].accuracy

    lost, protected = runs(0.0), runs(1e-3)
    assert sum(map(kept, lost)) < 0.75 * sum(map(kept, protected)), "the stream takes no plasticity away"
    assert sum(bench.first(tasks, "act") is not None for tasks in lost) >= 2
    assert sum(bench.first(tasks, "act") is None for tasks in protected) >= 2
    verdicts = [tasks[-1].health.verdict for tasks in lost if bench.first(tasks, "act") is not None]
    assert all(verdict.sure for verdict in verdicts)


def test_a_fresh_network_raises_no_alarm(bench: ModuleType) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    for name, model in bench.healthy_kinds().items():
        found = bench.health(model, [(x,)], reference=model)
        assert found.verdict == "healthy", name
        assert found.against(None).verdict == "healthy", name


def test_the_page_counts_what_the_runs_say(bench: ModuleType) -> None:
    base = {"seed": 1, "seconds": 1.0, "on": "a CPU", "torch": "2", "alone": "healthy", "act": None, "halved": None}
    runs = [
        {**base, "part": "stream", "kind": "ReLU", "arm": "nothing", "accuracy": [0.4, 0.3, 0.1], "act": 2, "halved": 3}
        | {"verdicts": ["healthy", "act", "act"]},
        {**base, "part": "stream", "kind": "ReLU", "arm": "L2-init", "accuracy": [0.4, 0.4, 0.4]}
        | {"verdicts": ["healthy", "watch", "healthy"]},
        {**base, "part": "activation", "kind": "Tanh", "arm": "nothing", "accuracy": [0.4, 0.4, 0.4], "act": 2}
        | {"verdicts": ["healthy", "act", "act"]},
        {**base, "part": "healthy", "kind": "MLP tanh", "arm": "", "accuracy": [0.9, 0.9]}
        | {"verdicts": ["healthy", "act"]},
    ]
    assert [bench.outcome(run) for run in runs[:3]] == ["in time", "quiet", "false alarm"]
    page = "\n".join([*bench._streams(runs), *bench._activations(runs), *bench._alarms(runs), bench._conditions(runs)])
    assert "Late: 0 of 1 seeds. False `act` with L2-init: 0 of 2 verdicts." in page
    assert "| Tanh | nothing | 1 | 0.400 | 0.400 | - | - | - | 1 | - |" in page
    assert "`act` on 1 of 1 healthy networks (1 of 1 verdicts)" in page
    assert "a CPU" in page
