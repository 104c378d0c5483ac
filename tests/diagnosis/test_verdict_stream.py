"""The verdict on streams that take plasticity away, and on the same streams where L2-init keeps it.

The streams are those of `benchmarks/verdict.py`, shorter; more seeds and the false alarms are in
`docs/evidence/verdict.md`.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


def _load() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "verdict.py"
    spec = importlib.util.spec_from_file_location("benchmark_verdict", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench = _load()


def check(tasks: list, kept: list) -> None:  # type: ignore[type-arg]
    act, half = bench.first(tasks, "act"), bench.halved(tasks)
    assert half is not None, "the stream did not take plasticity away"
    assert act is not None
    assert act < half
    verdict = tasks[act - 1].health.verdict
    assert verdict.sure
    assert len({finding.sign for finding in verdict.findings if finding.level == "act"}) >= 2
    # Once lost, it stays lost.
    assert all(task.health.verdict == "act" for task in tasks[act:])
    assert kept[-1].accuracy > 0.75 * kept[0].accuracy, "L2-init did not keep plasticity here"
    assert bench.first(kept, "act") is None


def test_digits_with_random_labels() -> None:
    pytest.importorskip("sklearn")
    seed = 0
    x, _ = bench.digits(300)

    def run(l2_init: float) -> list:  # type: ignore[type-arg]
        stream = bench.random_labels(x, 11, seed)
        options = {"epochs": 30, "seed": seed, "batch": 16, "lr": 4e-3, "l2_init": l2_init}
        return list(bench.learn(bench.mlp(64, 64, seed), stream, **options))

    check(run(0.0), run(1e-3))


def test_fashion_mnist_with_random_labels() -> None:
    if not bench.FASHION.exists():
        pytest.skip("Fashion-MNIST is not installed: apt-get install dataset-fashion-mnist")
    x = bench.fashion(1600, 1)

    def run(l2_init: float) -> list:  # type: ignore[type-arg]
        stream = bench.random_labels(x, 7, 1)
        return list(bench.learn(bench.mlp(784, 128, 1), stream, epochs=30, seed=1, l2_init=l2_init))

    check(run(0.0), run(1e-3))


def test_a_fresh_network_raises_no_alarm() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    for name, model in bench.healthy_kinds().items():
        found = bench.health(model, [(x,)], reference=model)
        assert found.verdict == "healthy", name
        assert found.against(None).verdict == "healthy", name
