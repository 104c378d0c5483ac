"""A certificate is about the numbers in the new file, whatever their dtype; the solution comes from the old ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rekindle.checkpoint import fire_file, open_checkpoint
from rekindle.projection.planning import plan
from small_networks import dfi_reference, polar_reference


def stored(path: Path, name: str) -> torch.Tensor:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.read(name).clone()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_stored_residual_is_that_of_the_new_file(tmp_path: Path, dtype: str) -> None:
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    torch.manual_seed(0)
    save_file({"a.weight": torch.randn(64, 64), "b.weight": torch.randn(4, 64)}, old)
    receipt = fire_file(old, new, dtype=dtype, heads=(), targets="auto", scale="paper")
    (record,) = receipt.records
    true = dfi_reference(stored(new, "a.weight"), 1.0) / 64
    assert record.residual_stored == pytest.approx(true, rel=0.05, abs=1e-10)


def test_the_second_block_of_a_fused_weight_is_solved_from_the_old_file(tmp_path: Path) -> None:
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(16, 2), "head": nn.Linear(16, 4)})
    w = model["attn"].in_proj_weight.detach().clone()
    save_file(dict(model.state_dict()), old)
    receipt = fire_file(old, new, plan=plan(model, targets="attn.in_proj_weight", scale="paper"), dtype="bfloat16")
    assert len(receipt.records) == 3
    found = stored(new, "attn.in_proj_weight")
    for i, record in enumerate(receipt.records):
        part = slice(16 * i, 16 * i + 16)
        wanted = polar_reference(w[part])
        # The rounded factor, but for numbers half-way between two; the factor of rounded weights differs everywhere.
        assert float((found[part] == wanted.bfloat16()).double().mean()) > 0.98
        assert record.residual_stored == pytest.approx(dfi_reference(found[part], 1.0) / 16, rel=0.05)
