"""Missing directions: rebuilt from the matrix where it has them, filled from the seed where it has not."""

from __future__ import annotations

import pytest
import torch

from rekindle.engine.completion import Rebuilt, fill, rebuild


def iterate_with_gaps(
    n: int, m: int, values: list[float], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An iterate that is an isometry except in len(values) directions, its W, and W's polar factor."""
    g = torch.Generator().manual_seed(n + m)
    u = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(m, n, generator=g, dtype=torch.float64))[0]
    s = torch.linspace(1, 0.1, n, dtype=torch.float64)
    lifted = torch.ones(n, dtype=torch.float64)
    for i, value in enumerate(values):
        s[n - 1 - i], lifted[n - 1 - i] = value, min(0.9, 300 * value)
    return ((u * lifted) @ v.T).to(dtype), ((u * s) @ v.T).to(dtype), u @ v.T


def rebuilt(
    x: torch.Tensor, w: torch.Tensor, expected: int, most: int, complete: bool = True, seed: int = 0
) -> Rebuilt:
    """`rebuild` of one matrix, or of a batch whose seeds count up."""
    x, w = x.reshape(-1, *x.shape[-2:]), w.reshape(-1, *w.shape[-2:])
    seeds = torch.arange(len(x)) + seed
    one = torch.ones(len(x), dtype=x.dtype)
    return rebuild(x, w, sigma=one, expected=expected, most=most, threshold=2e-3, seeds=seeds, complete=complete)


@pytest.mark.parametrize(("n", "m"), [(60, 60), (60, 90), (300, 300)])
def test_small_directions_come_from_the_matrix(n: int, m: int) -> None:
    x, w, polar = iterate_with_gaps(n, m, [1e-3, 3e-4, 1e-4])
    got = rebuilt(x, w, expected=1, most=n)
    assert not got.failed.any() and not got.null.any()
    # W itself is rounded to float32: a direction of 1e-4 is known to about 1e-3.
    torch.testing.assert_close(got.x[0].double(), polar, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("n", "m"), [(60, 60), (60, 90)])
def test_exact_zeros_are_filled_or_left(n: int, m: int) -> None:
    g = torch.Generator().manual_seed(0)
    w = torch.zeros(n, m, dtype=torch.float64)
    w[: n - 4] = torch.linalg.qr(torch.randn(m, n - 4, generator=g, dtype=torch.float64))[0].T
    full, part = rebuilt(w, w, 4, n, seed=5), rebuilt(w, w, 4, n, complete=False, seed=5)
    assert full.null.tolist() == part.null.tolist() == [4]
    torch.testing.assert_close(full.x[0] @ full.x[0].T, torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(part.x[0], w)
    left = torch.eye(n, dtype=torch.float64)[None, n - 4 :]
    torch.testing.assert_close(full.x, fill(w[None], left, torch.tensor([4]), torch.tensor([5])))


def test_too_many_missing_directions_are_refused() -> None:
    x = torch.zeros(80, 80)
    x[0, 0] = 1
    assert rebuilt(x, x, expected=1, most=20).failed.all()


def test_nothing_missing_changes_nothing() -> None:
    x = torch.eye(40, 50)
    got = rebuilt(x, x, expected=0, most=10)
    assert not got.failed.any() and not got.null.any() and torch.equal(got.x[0], x)


@pytest.mark.parametrize(("n", "m"), [(60, 60), (60, 90)])
def test_a_batch_is_repaired_as_each_of_its_matrices_alone(n: int, m: int) -> None:
    """Small directions, zeros, both, nothing missing, and too much missing: other numbers of directions in each."""
    kinds = [[1e-3, 3e-4], [0.0] * 5, [3e-4, 0.0, 1e-4], [], [0.0] * (n // 2)]
    pairs = [iterate_with_gaps(n, m, each, torch.float64)[:2] for each in kinds]
    x, w = (torch.stack(each) for each in zip(*pairs, strict=True))
    got = rebuilt(x, w, expected=1, most=n // 4)
    assert got.failed.tolist() == [False] * 4 + [True]
    assert got.null[:4].tolist() == [0, 5, 1, 0]
    for i in range(4):
        alone = rebuilt(x[i], w[i], expected=1, most=n // 4, seed=i)
        torch.testing.assert_close(got.x[i], alone.x[0], atol=1e-9, rtol=0)
        torch.testing.assert_close(got.x[i] @ got.x[i].T, torch.eye(n, dtype=torch.float64), atol=1e-9, rtol=0)
