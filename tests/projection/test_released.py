"""The presets reproduce what the paper's code does, to 1e-6 of a plain transcription of its formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rekindle.projection.firing import fire


def recipe(w: Tensor, steps: int) -> Tensor:
    """Frobenius normalization and cubic Newton–Schulz steps, on the transpose where in > out."""
    x = w / w.norm()
    wide = w.shape[1] > w.shape[0]
    x = x.T if wide else x
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x @ (x.T @ x)
    return x.T if wide else x


def linear(w: Tensor, steps: int) -> Tensor:
    return math.sqrt(w.shape[0] / w.shape[1]) * recipe(w, steps)


def convolution(w: Tensor, steps: int) -> Tensor:
    out, into, height, width = w.shape
    new = torch.empty_like(w)
    for i in range(height):
        for j in range(width):
            new[:, :, i, j] = math.sqrt(out / into) / (height * width) * recipe(w[:, :, i, j], steps)
    return new


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.detach(), wanted, rtol=0, atol=1e-6 * max(1.0, float(wanted.abs().max())))


class Residual(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, 2, bias=False), nn.BatchNorm2d(out))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2 = Residual(16, 24), Residual(24, 40)
        self.linear = nn.Linear(40, 10)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width, bias=False) for _ in range(4))


class ViT(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.patch = nn.Linear(48, width)
        self.position = nn.Parameter(torch.randn(1, 5, width))
        self.attention = nn.ModuleList([Attention(width) for _ in range(2)])
        self.mlp = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)) for _ in range(2)]
        )
        self.mlp_head = nn.Linear(width, 10)


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), CausalSelfAttention(width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})


class GPT(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(65, width),
                "wpe": nn.Embedding(16, width),
                "h": nn.ModuleList([Block(width) for _ in range(2)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, 65, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight


def before_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cnn_every_convolution_and_linear_head_included(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Net().to(dtype)
    before = before_of(model)
    receipt = fire(model, targets="paper-cnn", solver={"solver": "paper", "steps": 10})
    changed = set()
    for name, parameter in model.named_parameters():
        w = before[name]
        if w.ndim == 1:
            assert torch.equal(parameter, w), name
            continue
        changed.add(name)
        close(parameter, convolution(w, 10) if w.ndim == 4 else linear(w, 10))
    assert set(receipt.changed) == changed
    assert all(record.steps == 10 for record in receipt.records)


def test_the_receipt_of_the_recipe_shows_how_far_it_is_from_an_isometry() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))
    w = model[0].weight.detach().clone()
    record = fire(model, targets="paper-cnn", solver={"solver": "paper", "steps": 10}).records[0]
    x = recipe(w.double(), 10)
    deviation = float((x.T @ x - torch.eye(64, dtype=torch.float64)).square().sum())
    assert record.dfi_after == pytest.approx(deviation, rel=1e-3)
    assert record.dfi_after > 1.0
    assert not record.converged
    assert record.sfe == pytest.approx(float((w.double() - x).square().sum()), rel=1e-3)
    assert record.spectral_after == pytest.approx(float(torch.linalg.svdvals(x)[0]), rel=0.03)
    assert record.norm_after == pytest.approx(float(x.norm()), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vit_queries_and_keys_only(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = ViT().to(dtype)
    before = before_of(model)
    receipt = fire(model, targets="paper-vit", solver={"solver": "paper", "steps": 10})
    for name, parameter in model.named_parameters():
        if "to_q" in name or "to_k" in name:
            close(parameter, linear(before[name], 10))
        else:
            assert torch.equal(parameter, before[name]), name
    assert len(receipt.changed) == 4


def gpt_reference(name: str, w: Tensor) -> Tensor:
    if "c_attn" in name:
        return torch.cat([linear(part, 5) for part in w.chunk(3)])
    return linear(w, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gpt_every_linear_with_split_attention_and_the_tied_head(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = GPT().to(dtype)
    before = before_of(model)
    fire(model, targets="paper-gpt", solver={"solver": "paper", "steps": 5})
    for name, parameter in model.named_parameters():
        if name.endswith("wpe.weight") or "ln_" in name or name.endswith("bias"):
            assert torch.equal(parameter, before[name]), name
        else:
            close(parameter, gpt_reference(name, before[name]))
    assert model.lm_head.weight is model.transformer["wte"].weight


@pytest.mark.filterwarnings("ignore")
def test_the_same_on_transformers_gpt2() -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=24, vocab_size=65, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    before = before_of(model)
    fire(model, targets="paper-gpt", solver={"solver": "paper", "steps": 5})
    for name, parameter in model.named_parameters():
        if name.endswith("wpe.weight") or "ln_" in name or name.endswith("bias"):
            assert torch.equal(parameter, before[name]), name
        elif name.endswith("wte.weight"):
            close(parameter, linear(before[name], 5))
        else:
            close(parameter, gpt_reference(name, before[name].T).T)
