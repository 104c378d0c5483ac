"""Small matrices: polynomials for the bulk and one corrected direction, against float64 SVD."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rekindle.engine import arithmetic, bulk, schedules, solving
from rekindle.engine.isometry import polar
from rekindle.engine.solving import Source


def with_spectrum(s: torch.Tensor, seed: int) -> torch.Tensor:
    """A float32 matrix (n, n) with these singular values."""
    draw = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(len(s), len(s), generator=draw, dtype=torch.float64))[0] for _ in range(2))
    return ((u * s) @ v).float()


@pytest.mark.parametrize("n", [9, 16, 33, 64, 112])
@pytest.mark.parametrize("smallest", [0.5, 3e-3, 5e-4, 1e-5, 1e-9, 0.0])
@pytest.mark.parametrize("missing", [1, 2])
def test_missing_directions_are_as_exact_as_the_others(n: int, smallest: float, missing: int) -> None:
    s = torch.linspace(1, 0.4, n, dtype=torch.float64)
    s[-missing:] = smallest
    w = torch.stack([with_spectrum(s, seed) for seed in range(3)])
    q = polar(w, solver="products").double()
    assert float((q @ q.mT - torch.eye(n, dtype=torch.float64)).square().sum((1, 2)).max()) / n <= 1e-6
    assert bool(((q * w).sum((1, 2)) >= (1 - 5e-4) * s.sum()).all())
    if smallest > 1e-6:  # then the factor is unique to float32's inputs
        u, _, vh = torch.linalg.svd(w.double())
        assert float((q - u @ vh).abs().max()) <= 2e-3


@pytest.mark.parametrize("n", [16, 64, 128])
def test_the_bound_before_the_last_step_holds_after_it(n: int) -> None:
    w = torch.randn(60, n, n, generator=torch.Generator().manual_seed(n))
    solved = bulk.by_bulk(w, arithmetic.start(w, estimate=False), 1e-6)
    x = solved.x.double()
    dfi = (x @ x.mT - torch.eye(n, dtype=torch.float64)).square().sum((1, 2)) / n
    assert bool((dfi <= 1.01 * solved.residual + 1e-9)[~solved.hard].all())
    assert float(solved.hard.float().mean()) < 0.2


def test_random_square_matrices_are_hardly_ever_hard() -> None:
    for n in (16, 24, 48):  # a value just below the reach, a tiny one, and none: all three are met among so many
        w = torch.randn(2000, n, n, generator=torch.Generator().manual_seed(n))
        solved = bulk.by_bulk(w, arithmetic.norms(w), 1e-6)
        assert float(solved.hard.float().mean()) < 0.003
        u, _, vh = torch.linalg.svd(w.double())
        assert float((solved.x - u @ vh)[~solved.hard].flatten(1).norm(dim=1).max()) < 3e-3


@pytest.mark.parametrize("n", [16, 24, 48, 96])
def test_two_values_below_the_reach_need_no_float64(n: int) -> None:
    """One is far below and one just below: a step more brings the second to 1, and the first stands out."""
    s = torch.linspace(1, 0.2, n, dtype=torch.float64)
    reach = (bulk.FAR if n <= bulk.FAR_UP_TO else bulk.NEAR) / n
    s[-2:] = torch.tensor([0.6, 0.2], dtype=torch.float64) * reach
    w = torch.stack([with_spectrum(s, seed) for seed in range(8)])
    solved = bulk.by_bulk(w, arithmetic.norms(w), 1e-6)
    assert not bool(solved.hard.any())
    u, _, vh = torch.linalg.svd(w.double())
    assert float((solved.x - u @ vh).flatten(1).norm(dim=1).max()) < 3e-3


@pytest.mark.parametrize("n", [16, 24, 48])
def test_a_matrix_does_not_depend_on_the_others_of_its_batch(n: int) -> None:
    w = torch.randn(400, n, n, generator=torch.Generator().manual_seed(n))
    together = bulk.by_bulk(w, arithmetic.norms(w), 1e-6).x
    alone = torch.cat([bulk.by_bulk(one, arithmetic.norms(one), 1e-6).x for one in w.split(1)])
    assert float((together - alone).abs().max()) < 2e-6  # rounding; one cubic step more would be 1e-3


def test_the_arrays_it_works_in_serve_every_mode_and_thread() -> None:
    w = torch.randn(40, 20, 20, generator=torch.Generator().manual_seed(0))
    bulk._workspace.room = None
    with torch.inference_mode():
        inside = polar(w)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(polar, [w] * 8))
    assert all(torch.equal(q, inside) for q in [polar(w), *results])


def test_a_schedule_reaches_what_it_promises() -> None:
    for low in (0.3, 0.02, 1e-3):
        x = torch.logspace(torch.tensor(low).log10().item(), 0, 500, dtype=torch.float64)
        for step in schedules.bulk(low, 0.006):
            x = step.a * x + step.b * x**3 + step.c * x**5
        assert float((x - 1).abs().max()) <= 0.0061


def test_seeds_of_many_matrices_at_once_are_those_one_by_one() -> None:
    for seed in (0, 7, 2**62, 2**63 - 2):
        source = Source((5, 2, 2), torch.float32, torch.device("cpu"), lambda: torch.zeros(5, 2, 2))
        assert solving._seeds(seed, [1], [source, source]).tolist() == [solving._seed(seed, 1, j) for j in range(5)]
