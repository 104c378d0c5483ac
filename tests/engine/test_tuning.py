"""Routes are looked up by the kind of CPU, never timed, and can be pinned."""

import pytest
import torch

from rekindle.engine import cpu, tuning
from rekindle.engine.isometry import polar


@pytest.fixture(autouse=True)
def _looked_up_anew():  # type: ignore[no-untyped-def]
    tuning.tuning.cache_clear()
    yield
    tuning.tuning.cache_clear()


def test_a_kind_that_is_not_in_the_table_gets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "vendor", lambda: "Babbage")
    assert tuning.tuning() is tuning.DEFAULT


@pytest.mark.parametrize("kind", tuning.TABLE)
def test_every_row_solves_every_size_of_matrix(kind: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "vendor", lambda: kind[0])
    monkeypatch.setattr(cpu, "capability", lambda: kind[1])
    assert tuning.tuning() is tuning.TABLE[kind]
    for n in (1, 3, 9, 16, 33, 56, 65):
        w = torch.randn(7, n, n + 2)
        w[3, 0] = 0
        _, proof = polar(w, certificate=True)
        assert bool(proof.converged.all()), n
        again = polar(w)
        gram = again @ again.mT - torch.eye(n)
        assert float(gram.square().sum((1, 2)).max()) / n <= 1e-6, n
        nuclear = torch.linalg.svdvals(w.double()).sum(1)
        assert bool(((again.double() * w).sum((1, 2)) >= (1 - 5e-4) * nuclear).all()), n


@pytest.mark.parametrize("solver", ["products", "halley", "gram"])
@pytest.mark.parametrize("shape", [(3, 6, 6), (2, 40, 70), (2, 100, 100)])
def test_a_pinned_route_converges_like_auto(solver: str, shape: tuple[int, ...]) -> None:
    w = torch.randn(shape)
    w[0, 1] = w[0, 0]  # a duplicate
    q, proof = polar(w, solver=solver, certificate=True)  # type: ignore[call-overload]
    assert bool(proof.converged.all())
    nuclear = torch.linalg.svdvals(w.double()).sum(1)
    assert bool(((q.double() * w).sum((1, 2)) >= (1 - 5e-4) * nuclear).all())
