"""Missing directions: rebuilt from the matrix where it has them, filled from the seed where it has not."""

from __future__ import annotations

import pytest
import torch

from rekindle.engine.completion import fill, rebuild


def iterate_with_gaps(n: int, m: int, values: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An iterate that is an isometry except in len(values) directions, its W, and W's polar factor."""
    g = torch.Generator().manual_seed(n + m)
    u = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(m, n, generator=g, dtype=torch.float64))[0]
    s = torch.linspace(1, 0.1, n, dtype=torch.float64)
    lifted = torch.ones(n, dtype=torch.float64)
    for i, value in enumerate(values):
        s[n - 1 - i], lifted[n - 1 - i] = value, min(0.9, 300 * value)
    return ((u * lifted) @ v.T).float(), ((u * s) @ v.T).float(), u @ v.T


@pytest.mark.parametrize(("n", "m"), [(60, 60), (60, 90), (300, 300)])
def test_small_directions_come_from_the_matrix(n: int, m: int) -> None:
    x, w, polar = iterate_with_gaps(n, m, [1e-3, 3e-4, 1e-4])
    got = rebuild(x, w, sigma=1.0, expected=1, most=n, threshold=2e-3, seed=0, complete=True)
    assert got is not None and got.null == 0
    # W itself is rounded to float32: a direction of 1e-4 is known to about 1e-3.
    torch.testing.assert_close(got.x.double(), polar, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("n", "m"), [(60, 60), (60, 90)])
def test_exact_zeros_are_filled_or_left(n: int, m: int) -> None:
    g = torch.Generator().manual_seed(0)
    w = torch.zeros(n, m, dtype=torch.float64)
    w[: n - 4] = torch.linalg.qr(torch.randn(m, n - 4, generator=g, dtype=torch.float64))[0].T
    full = rebuild(w, w, sigma=1.0, expected=4, most=n, threshold=2e-3, seed=5, complete=True)
    part = rebuild(w, w, sigma=1.0, expected=4, most=n, threshold=2e-3, seed=5, complete=False)
    assert full is not None and part is not None and full.null == part.null == 4
    torch.testing.assert_close(full.x @ full.x.T, torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(part.x, w)
    torch.testing.assert_close(full.x, fill(w, torch.eye(n, dtype=torch.float64)[n - 4 :], seed=5))


def test_too_many_missing_directions_are_refused() -> None:
    x = torch.zeros(80, 80)
    x[0, 0] = 1
    assert rebuild(x, x, sigma=1.0, expected=1, most=20, threshold=2e-3, seed=0, complete=True) is None


def test_nothing_missing_changes_nothing() -> None:
    x = torch.eye(40, 50)
    got = rebuild(x, x, sigma=1.0, expected=0, most=10, threshold=2e-3, seed=0, complete=True)
    assert got is not None and got.null == 0 and torch.equal(got.x, x)
