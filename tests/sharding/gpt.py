"""The model of the sharding cases, ways to spread it over processes, and the comparison with one process.

It is a small GPT of the awkward kind: fused q/k/v whose thirds do not end where shards end, a tied embedding, stacked
experts, widths that no number of ranks divides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import rekindle
from rekindle.blocks.layouts import matrices

WIDTH, VOCABULARY = 30, 41


class Experts(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 22, WIDTH) / 5)
        self.down = nn.Parameter(torch.randn(count, WIDTH, 22) / 5)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(torch.einsum("eoi,bti->beto", self.up, x))
        return torch.einsum("eoi,beti->bto", self.down, inner)


class Layer(nn.Module):
    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 53)
        self.down = nn.Linear(53, WIDTH)
        self.experts = Experts() if experts else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.down(torch.relu(self.up(x)))
        return x if self.experts is None else x + self.experts(x)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.tall = nn.Linear(4, 400, bias=False)
        self.layers = nn.ModuleList([Layer(False), Layer(True)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + 0 * self.tall(x[..., :4]).sum()


LAYOUTS = {
    "*.qkv.weight": matrices("(part out) in", part=("query", "key", "value")),
    "*.experts.*": matrices("expert out in", count="expert"),
}


def gpt(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT()


TOKENS = torch.arange(24).reshape(2, 12) % VOCABULARY


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(TOKENS).logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(model: GPT, mesh: DeviceMesh, **options: Any) -> GPT:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def placed(model: GPT, mesh: DeviceMesh, placement: Callable[[str, Tensor], Any]) -> GPT:
    """Make every weight of at least two dimensions a DTensor, as tensor and expert parallel code does."""
    done: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = placement(f"{path}.{name}", parameter)
            if placements is not None:
                if id(parameter) not in done:
                    distributed = distribute_tensor(parameter.detach().clone(), mesh, placements)
                    done[id(parameter)] = nn.Parameter(distributed)
                module.register_parameter(name, done[id(parameter)])
    return model


def compare(model: nn.Module, alone: nn.Module, tolerance: float = 1e-5, leave: str | None = None) -> None:
    other = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        if leave is not None and name.endswith(leave):
            continue
        expected = other[name.removeprefix("module.")].detach()
        off = float((whole(parameter).detach() - expected).norm() / expected.norm().clamp_min(1e-12))
        assert off <= tolerance, (name, off)


def near(a: float | None, b: float | None) -> bool:
    return a is b if a is None or b is None else math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6)


OPTIONS: dict[str, Any] = {"layouts": LAYOUTS, "targets": "auto"}


def check(model: GPT, **options: Any) -> None:
    """Plan, receipt and weights are those of one process."""
    options = {**OPTIONS, **options}
    alone = gpt()
    planning = {key: options[key] for key in ("layouts", "targets", "scale") if key in options}
    expected_plan, plan = rekindle.plan(alone, **planning), rekindle.plan(model, **planning)
    for a, b in zip(expected_plan.entries, plan.entries, strict=True):
        assert (a.name.removeprefix("module."), a.reason, a.shape, a.left) == (b.name, b.reason, b.shape, b.left)
        assert near(a.dfi_now, b.dfi_now), (a.name, a.dfi_now, b.dfi_now)
    expected, receipt = rekindle.fire(alone, **options), rekindle.fire(model, **options)
    compare(model, alone)
    assert receipt.changed == expected.changed
    assert receipt.skipped == expected.skipped
    for a, b in zip(expected.records, receipt.records, strict=True):
        assert (a.name, a.part, a.count, a.out, a.in_) == (b.name, b.part, b.count, b.out, b.in_)
        for field in ("scale", "dfi_before", "sfe", "norm_before", "norm_after"):
            assert near(getattr(a, field), getattr(b, field)), (a.name, field, getattr(a, field), getattr(b, field))
        assert b.converged


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: {key: whole(value) if isinstance(value, Tensor) else value for key, value in state.items()}
        for p, state in optimizer.state.items()
    }
