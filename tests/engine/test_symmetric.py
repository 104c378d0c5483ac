"""Products of symmetric matrices and block solves against the plain ones, on both sides of every block size."""

from __future__ import annotations

import pytest
import torch

from rekindle.engine.symmetric import factor, inverse, leaf, solve_lower, solve_upper, symmetric_product

SIZES = [1, 2, 31, 32, 33, 63, 65, 100, 127, 129, 383, 384, 385, 500, 513, 577]


def positive(n: int, batch: int = 2) -> torch.Tensor:
    x = torch.randn(batch, n, n + 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return x @ x.mT / n + torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize("n", SIZES)
def test_the_factor_solves_both_ways(n: int) -> None:
    a, x = positive(n), torch.randn(2, n, 5, dtype=torch.float64)
    lower = torch.linalg.cholesky(a)
    upper_garbage = a + torch.triu(torch.full_like(a, 1e9), 1)  # only the lower half may be read
    factored, size = upper_garbage.clone(), leaf(n)
    if n <= 128:
        factored = a.clone()
    factor(factored, size)
    y, z = torch.empty_like(x), torch.empty_like(x)
    solve_lower(factored, x.clone(), y, size)
    torch.testing.assert_close(y, torch.linalg.solve_triangular(lower, x, upper=False))
    solve_upper(factored, y, z, size)
    torch.testing.assert_close(z, torch.linalg.solve(a, x))


@pytest.mark.parametrize("n", SIZES)
def test_inverse(n: int) -> None:
    a = positive(n)
    torch.testing.assert_close(inverse(a.clone()), torch.linalg.inv(a))


@pytest.mark.parametrize("n", SIZES)
def test_product_of_two_that_commute(n: int) -> None:
    a = positive(n)
    b = torch.linalg.inv(a)
    torch.testing.assert_close(symmetric_product(a, b + a), a @ (b + a))
