"""Full precision whatever the caller has switched on, and Gram matrices on both sides of every block size."""

from __future__ import annotations

import pytest
import torch

from rekindle.engine.arithmetic import gram, mirrored, norm2
from rekindle.engine.devices import full_precision

SIZES = [1, 2, 63, 65, 100, 129, 159, 160, 385, 513, 577]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("extra", [0, 7])
def test_gram(n: int, extra: int) -> None:
    x = torch.randn(2, n, n + extra, dtype=torch.float64)
    expected = x @ x.mT
    torch.testing.assert_close(gram(x), expected)
    torch.testing.assert_close(gram(x, by="blocks"), expected)
    half = gram(x, by="half")
    torch.testing.assert_close(half.tril(), expected.tril())
    torch.testing.assert_close(norm2(half), expected.square().sum((1, 2)))
    twice = gram(x, by="half", out=half.clone(), add=True)
    torch.testing.assert_close(twice.tril(), 2 * expected.tril())
    torch.testing.assert_close(mirrored(half), expected)


def test_autocast_is_off_inside_and_on_again_afterwards() -> None:
    w = torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with full_precision():
            assert (w @ w).dtype == torch.float32
        assert (w @ w).dtype == torch.bfloat16

    @full_precision()
    def product() -> torch.dtype:
        return (w @ w).dtype

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [product(), product()] == [torch.float32] * 2


def test_a_weight_written_inside_is_not_used_from_autocasts_cache() -> None:
    layer, x = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x)  # casts the weight, and keeps the cast copy
        with full_precision(), torch.no_grad():
            layer.weight.zero_()
        assert not layer(x).any()
