"""Every layout gives what one process gives: weights, plan and receipt. Run by `launching`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from gpt import (
    LAYOUTS,
    OPTIONS,
    TOKENS,
    check,
    compare,
    gpt,
    placed,
    sharded,
    world_mesh,
)
from launching import world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rekindle


def case_fsdp2() -> None:
    check(sharded(gpt(), world_mesh()))


def case_fsdp2_nearest_scale_and_strength() -> None:
    check(sharded(gpt(), world_mesh()), scale="nearest", strength=0.3)


def case_fsdp2_only_queries_and_full_measures() -> None:
    check(sharded(gpt(), world_mesh()), targets="attention.qk", measure="full")


def case_fsdp2_left_unsharded_after_forward() -> None:
    model = sharded(gpt(), world_mesh(), reshard_after_forward=False)
    model(TOKENS)
    alone = gpt()
    rekindle.fire(alone, **OPTIONS)
    rekindle.fire(model, **OPTIONS)
    assert torch.allclose(model(TOKENS), alone(TOKENS), atol=1e-4)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    compare(model, alone)


def case_fsdp2_mixed_precision_keeps_float32_weights() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    check(sharded(gpt(), world_mesh(), mp_policy=policy))


def case_fsdp2_cpu_offload() -> None:
    check(sharded(gpt(), world_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


def case_distributed_data_parallel_is_bit_identical() -> None:
    model = DistributedDataParallel(gpt())
    alone = gpt()
    rekindle.fire(alone, **OPTIONS)
    rekindle.fire(model, **OPTIONS)
    compare(model, alone)
    for parameter in model.parameters():
        copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, parameter.detach())
        assert all(torch.equal(copies[0], each) for each in copies)


def case_tall_matrices_end_where_one_process_ends() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 640), nn.Linear(640, 60), nn.Linear(60, 8))
    alone = copy.deepcopy(model)
    model = fully_shard(model, mesh=world_mesh())
    receipt, expected = rekindle.fire(model, heads=()), rekindle.fire(alone, heads=())
    compare(model, alone)
    for a, b in zip(expected.records, receipt.records, strict=True):
        assert b.spectral_before == pytest.approx(a.spectral_before, rel=1e-4)


def case_every_weight_cut_by_rows_by_columns_or_copied() -> None:
    for placement in (Shard(0), Shard(1), Replicate()):
        check(placed(gpt(), world_mesh(), lambda _, p, s=placement: [s] if p.ndim > 1 else None))


def case_experts_cut_along_their_axis() -> None:
    check(placed(gpt(), world_mesh(), lambda name, p: [Shard(0)] if "experts" in name else None))


def case_tensor_parallel_plan_of_torch() -> None:
    mesh = world_mesh()
    model = gpt()
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    check(model)


@world(4)
def case_cut_in_both_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    check(placed(gpt(), mesh, lambda _, p: [Shard(0), Shard(1)] if p.ndim > 1 else None))
    check(placed(gpt(), mesh, lambda _, p: [Shard(0), Shard(0)] if p.ndim > 1 else None))


@world(4)
def case_fsdp2_over_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = gpt()
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    # 53 rows over two tensor ranks and then two data ranks: neither cut is even.
    check(sharded(model, mesh["data"]))


@world(4)
def case_hybrid_shards_and_copies() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    check(sharded(gpt(), mesh))


@world(4)
def case_pipeline_stages_fire_their_own_part() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage, alone = gpt(), gpt()
    number = mesh["stage"].get_local_rank()
    layer, twin = stage.layers[number], alone.layers[number]
    fully_shard(layer, mesh=mesh["data"])
    receipt = rekindle.fire(layer, heads=(), layouts=LAYOUTS)
    expected = rekindle.fire(twin, heads=(), layouts=LAYOUTS)
    compare(layer, twin)
    assert receipt.changed == expected.changed


def case_ranks_with_empty_shards() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 3), nn.Linear(3, 2))
    alone = copy.deepcopy(model)
    model = fully_shard(model, mesh=world_mesh())
    receipt = rekindle.fire(model, heads=(), min_norm=0)
    rekindle.fire(alone, heads=(), min_norm=0)
    compare(model, alone)
    assert len(receipt.records) == 3


def case_stacked_experts_on_a_part_of_the_mesh() -> None:
    """Expert parallel beside data parallel: two groups of ranks hold the same experts, dense weights are on all."""
    if dist.get_world_size() < 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model = placed(gpt(), mesh["expert"], lambda name, p: [Shard(0)] if "experts" in name else None)
    check(placed(model, world_mesh(), lambda name, p: [Shard(0)] if name.endswith("out.weight") else None))


def case_fsdp1_is_refused_and_works_when_summoned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 2))
    alone = copy.deepcopy(model)
    model[2] = FullyShardedDataParallel(model[2], use_orig_params=True, device_id=torch.device("cpu"))
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (wrapped, alone)]
    data = torch.randn(4, 5)
    for m, optimizer in zip((wrapped, alone), optimizers, strict=True):
        m(data).square().mean().backward()
        optimizer.step()
    with pytest.raises(ValueError, match=r"wrapped by FSDP1.*summon_full_params"):
        rekindle.fire(wrapped, optimizers[0])
    rekindle.fire(alone, optimizers[1], targets="auto")
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=True):
        receipt = rekindle.fire(wrapped.module, optimizers[0], targets="auto")
    assert receipt.changed == ("0.weight", "2.weight")
    with FullyShardedDataParallel.summon_full_params(wrapped):
        for a, b in zip(wrapped.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-5)


def case_a_parametrized_sharded_weight_is_skipped_with_the_reason() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6), nn.Linear(6, 2))
    plan = rekindle.plan(fully_shard(model, mesh=world_mesh()))
    assert "parametrized and sharded" in next(e.reason for e in plan.entries if e.name == "0.weight")
