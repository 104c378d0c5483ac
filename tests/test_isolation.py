"""Autocast of the caller changes nothing of what the library computes."""

from __future__ import annotations

import torch

from rekindle.isolation import full_precision


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
